//! Suspend and hibernation, as announced by logind. Programs' memory is evicted from the GPUs before
//! the host suspends. The driver preserves GPU memory only if it is configured to
//! (`NVreg_PreserveVideoMemoryAllocations`). Eviction before the suspend leaves the driver less to
//! write.
//!
//! While a program has a GPU attached, an inhibitor delays suspend. The daemon closes the inhibitor
//! once all evictable memory has been evicted. logind waits for at most `InhibitDelayMaxSec`, by
//! default 5 seconds.

use std::rc::Rc;
use std::time::Duration;

use tokio::sync::oneshot;
use tracing::debug;
use zbus::export::futures_core::Stream;
use zbus::{Connection, OwnedFd};

use super::Shared;
use crate::bus::logind::LogindProxy;
use crate::daemon::control::Control;

/// If logind does not report that the host has resumed, programs run again after the host has been
/// awake for this time.
const RESUMED_AFTER: Duration = Duration::from_secs(60);

/// Pause after a failed request for an inhibitor.
const RETRY: Duration = Duration::from_secs(30);

/// Follows logind's announcements until the connection ends.
pub async fn follow(connection: &Connection, shared: &Shared) {
    let mut suspended = None;
    tokio::select! {
        () = connection.closed() => {}
        Err(e) = prepare(connection, shared, &mut suspended) => {
            debug!("cannot receive suspend signals from logind: {e}");
            connection.closed().await;
        }
    }
    if suspended.is_some() {
        drop(tell(shared, false));
    }
}

/// Tells the scheduling loop that the host is about to suspend, or has resumed. The receiver completes
/// once all evictable memory has been evicted from the GPUs.
fn tell(shared: &Shared, suspended: bool) -> oneshot::Receiver<()> {
    let (done, evacuated) = oneshot::channel();
    let request = move |control: &Rc<Control>| control.suspend(suspended, done);
    let _ = shared.requests.send(Box::new(request)); // the scheduling loop may be stopping
    evacuated
}

/// Holds the inhibitor. `suspended` is `Some` from logind's announcement until the host has resumed.
/// The receiver in `suspended` completes once memory has been evicted.
async fn prepare(
    connection: &Connection,
    shared: &Shared,
    suspended: &mut Option<oneshot::Receiver<()>>,
) -> zbus::Result<std::convert::Infallible> {
    let logind = LogindProxy::new(connection).await?;
    let mut signals = logind.receive_prepare_for_sleep().await?;
    let mut published = shared.published.clone();
    let mut inhibitor: Option<OwnedFd> = None;
    loop {
        let is_wanted = published.borrow().attached;
        if suspended.is_none() && is_wanted != inhibitor.is_some() {
            inhibitor = if is_wanted { inhibit(&logind).await } else { None };
        }
        let next = std::future::poll_fn(|cx| std::pin::Pin::new(&mut signals).poll_next(cx));
        let resumed = tokio::select! {
            changed = async { published.wait_for(|now| now.attached != is_wanted).await.is_ok() } => match changed {
                true => false,
                false => std::future::pending().await, // the daemon is stopping
            },
            signal = next => {
                let start = match signal {
                    Some(signal) => signal.args()?.start,
                    None => std::future::pending().await, // the connection ends
                };
                if start {
                    *suspended = Some(tell(shared, true));
                }
                !start
            }
            () = evacuated(suspended), if inhibitor.is_some() => {
                inhibitor = None;
                false
            }
            () = tokio::time::sleep(RETRY), if is_wanted && inhibitor.is_none() && suspended.is_none() => false,
            () = tokio::time::sleep(RESUMED_AFTER), if suspended.is_some() => true,
        };
        if resumed && suspended.take().is_some() {
            drop(tell(shared, false));
        }
    }
}

async fn inhibit(logind: &LogindProxy<'_>) -> Option<OwnedFd> {
    let why = "Programs' memory is moved from GPUs to host memory";
    let inhibitor = logind.inhibit("sleep", "nvshare", why, "delay").await;
    inhibitor.map_err(|e| debug!("cannot delay suspend: {e}")).ok()
}

/// Waits until all evictable memory has been evicted from the GPUs.
async fn evacuated(suspended: &mut Option<oneshot::Receiver<()>>) {
    match suspended {
        Some(evacuated) => drop(evacuated.await),
        None => std::future::pending().await,
    }
}
