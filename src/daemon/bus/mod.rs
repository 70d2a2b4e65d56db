//! The D-Bus object, on the bus and on the control socket. Runs on its own thread and runtime, so that
//! no call can delay a hand-over. A request is a function that this thread sends to the scheduling loop,
//! and that the loop calls. Values for properties and signals come from the loop in one watch.
//!
//! - `connections`: the bus and the control socket.
//! - `object`: methods and properties; `served`: their dispatch by zbus; `options`: their dictionaries of
//!   options.
//! - `announce`: PropertiesChanged and the signals.
//! - `suspend`: follows logind, and evicts programs' memory before the host suspends.
//! - `gate`: admits calls; `callers`: identifies and authorizes callers.
//! - `authority`: polkit, which authorizes users other than root.

mod announce;
mod authority;
mod callers;
mod connections;
mod gate;
mod object;
mod options;
mod served;
mod suspend;

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{self as blocking, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tracing::debug;

use crate::daemon::control::Control;
use crate::daemon::control::views::Views;
use crate::daemon::core::Published;
use crate::daemon::tenants::Budgets;
use crate::recorder::follow::Follower;
use connections::{serve_bus, serve_peers};

/// Time for which a stopping daemon waits for this thread.
const STOP_PATIENCE: Duration = Duration::from_millis(300);

/// A request from the object, which the scheduling loop calls.
pub type Request = Box<dyn FnOnce(&Rc<Control>) + Send>;

/// The thread that serves the object.
#[derive(Debug)]
pub struct BusServer {
    stop: oneshot::Sender<()>,
    stopped: blocking::Receiver<()>,
}

impl BusServer {
    /// Starts the thread. The receiver completes after the first attempt to connect to the bus, even if the
    /// attempt failed.
    pub fn start(
        bus: Bus,
        control: Option<OwnedFd>,
        requests: mpsc::UnboundedSender<Request>,
        views: Views,
        published: watch::Receiver<Published>,
        budgets: Arc<Budgets>,
    ) -> std::io::Result<(Self, oneshot::Receiver<()>)> {
        let (attempted, first) = oneshot::channel();
        let (stop, asked) = oneshot::channel();
        let (done, stopped) = blocking::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        thread::Builder::new().name("dbus".into()).spawn(move || {
            let shared = Shared {
                requests,
                views,
                bundling: Arc::default(),
                drawing: Arc::default(),
                following: Arc::default(),
                reading_usage: Arc::default(),
                budgets,
                published,
                is_visitor: false,
            };
            LocalSet::new().block_on(&runtime, async {
                if let Some(control) = control {
                    spawn_local(serve_peers(control, shared.clone()));
                }
                spawn_local(serve_bus(bus, shared, attempted));
                let _ = asked.await;
            });
            drop(runtime);
            drop(done);
        })?;
        Ok((Self { stop, stopped }, first))
    }

    /// Leaves the bus and disconnects the peers.
    pub fn stop(self) {
        let _ = self.stop.send(());
        if self.stopped.recv_timeout(STOP_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            debug!("the D-Bus thread does not end, exiting without it");
        }
    }
}

/// The bus to connect to.
#[derive(Debug, Clone)]
pub enum Bus {
    None,
    System,
    Address(String),
}

/// The state of live timelines, which all readers share.
#[derive(Debug, Default)]
struct Following {
    follower: Option<Follower>,
    /// The number of timelines so far. If it does not change for a while, the follower is dropped.
    drawn: u64,
}

#[derive(Debug, Clone)]
struct Shared {
    requests: mpsc::UnboundedSender<Request>,
    views: Views,
    /// Held while a debug bundle is created. Bundles take memory, so only one is created at a time.
    bundling: Arc<Mutex<()>>,
    /// Held while a timeline is drawn, and for a pause afterwards.
    drawing: Arc<Mutex<()>>,
    /// The reader of the recording for live timelines. Held while one is drawn.
    following: Arc<Mutex<Following>>,
    /// Held while usage records are read, because records can be large.
    reading_usage: Arc<Mutex<()>>,
    budgets: Arc<Budgets>,
    published: watch::Receiver<Published>,
    /// The peer is not known to be on the host: the control socket may be mounted into a container. Clients,
    /// GPUs and their changes are hidden from such a peer.
    is_visitor: bool,
}

impl Shared {
    /// The values that the peer may see.
    fn visible(&self, published: &Published) -> Published {
        let mut visible = published.clone();
        if self.is_visitor {
            (visible.holders, visible.clients) = Default::default();
            (visible.gpus, visible.states) = Default::default();
        }
        visible
    }
}

fn seconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_secs()).unwrap_or(u32::MAX)
}
