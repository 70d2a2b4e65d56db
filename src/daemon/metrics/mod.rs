//! Metrics in the OpenMetrics format over HTTP, if they are configured. A separate thread with its
//! own runtime serves the metrics, so that no scraper can delay a hand-over. The scheduling loop
//! only copies its state.
//!
//! - `listen`: the sockets.
//! - `server`: HTTP.
//! - `source`: creates the text of the metrics, which concurrent scrapers share.
//! - `text`: formats a snapshot. `families`: the table of all metrics.
//! - `snapshot`: the figures.

mod families;
pub mod listen;
mod server;
mod snapshot;
mod source;
mod text;

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::thread;

use tokio::task::{LocalSet, spawn_local};
use tracing::{error, info};

use crate::daemon::control::views::Views;
use listen::Listener;
use source::Source;

/// Starts to serve metrics on these sockets until the process exits. Does nothing if there are no
/// sockets.
pub fn start(sockets: Vec<OwnedFd>, views: Views) -> std::io::Result<()> {
    if sockets.is_empty() {
        return Ok(());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
    thread::Builder::new().name("metrics".into()).spawn(move || {
        LocalSet::new().block_on(&runtime, async {
            let (places, source) = (server::places(), Rc::new(Source::new(views)));
            for socket in sockets {
                match Listener::new(socket) {
                    Ok(listener) => {
                        info!("metrics are at {}", listener.place());
                        spawn_local(server::serve(listener, places.clone(), source.clone()));
                    }
                    Err(e) => error!("cannot serve metrics: {e}"),
                }
            }
            std::future::pending::<()>().await;
        });
    })?;
    Ok(())
}
