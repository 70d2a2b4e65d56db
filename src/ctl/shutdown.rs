//! `nvsharectl hibernate --all --at-shutdown`: restores the programs that were saved, and saves all programs before
//! the host shuts down.
//!
//! logind announces a shutdown, and waits for this program for at most `InhibitDelayMaxSec`. A unit that is stopped
//! during the shutdown would come too late: systemd then starts no helper and no scope any more.

use std::pin::Pin;
use std::time::{Duration, Instant};

use zbus::Connection;
use zbus::export::futures_core::Stream;

use super::hibernate::Options;
use super::{CtlError, Target, all, block_on};
use crate::bus::logind::LogindProxy;

/// Restores programs, waits for the shutdown of the host, and saves all programs that can be saved in time. Prints the
/// programs for which this fails: started again, this command would restore what it has just saved. Returns a line
/// for each program that is saved.
///
/// # Errors
/// logind or the scheduler is missing.
pub fn wait_and_save(target: &Target, options: Options) -> Result<String, CtlError> {
    block_on(async {
        let failed = |e: zbus::Error| CtlError::Failed(format!("cannot ask logind to delay shutdowns: {e}"));
        let connection = Connection::system().await.map_err(failed)?;
        let logind = LogindProxy::new(&connection).await.map_err(failed)?;
        let mut signals = logind.receive_prepare_for_shutdown().await.map_err(failed)?;
        let why = "Programs are saved to disk";
        let delay = logind.inhibit("shutdown", "nvshare", why, "delay").await.map_err(failed)?;
        // Only now, so that a shutdown during the restores waits, too.
        println!("{}", said(all::restore_all(&target.connect().await?).await));
        loop {
            let next = std::future::poll_fn(|cx| Pin::new(&mut signals).poll_next(cx)).await;
            let Some(signal) = next else {
                return Err(CtlError::Failed("the connection to logind has ended".into()));
            };
            if signal.args().map_err(failed)?.start {
                break;
            }
        }
        let lasts = Duration::from_micros(logind.inhibit_delay_max_usec().await.map_err(failed)?);
        let saved = all::save_all(&target.connect().await?, Some(Instant::now() + lasts), options).await;
        drop(delay);
        Ok(said(saved))
    })
}

/// Prints an error, and returns the text of a success.
fn said(result: Result<String, CtlError>) -> String {
    result.unwrap_or_else(|e| {
        eprintln!("nvsharectl: {e}");
        String::new()
    })
}
