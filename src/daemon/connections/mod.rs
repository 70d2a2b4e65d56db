//! Clients' connections from beginning to end.
//!
//! - [`accept`]: the listening socket.
//! - `client`: one connection: the handshake, its packets, its end.
//! - [`resume`]: connections of an earlier daemon.
//! - [`lock`]: GPU locks that are acquired over D-Bus, for which the daemon acts as a client.

pub mod accept;
mod client;
pub mod lock;
pub mod resume;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

use tokio::sync::watch;
use tracing::warn;

use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::identity::Identity;

/// The state that all connections share.
#[derive(Debug)]
pub struct Connections {
    log_limit: RefCell<LogRateLimit>,
    /// Number of connections of each user, those before the handshake included.
    by_user: Rc<RefCell<HashMap<u32, u32>>>,
    /// True once clients of an earlier daemon have been taken over.
    resumed: watch::Receiver<bool>,
}

impl Connections {
    pub fn new(resumed: watch::Receiver<bool>) -> Self {
        Self { log_limit: RefCell::default(), by_user: Rc::default(), resumed }
    }

    /// Waits until clients of an earlier daemon have been taken over. Before that, no other client's requests are read.
    async fn resumed(&self) {
        let _ = self.resumed.clone().wait_for(|resumed| *resumed).await;
    }

    /// Counts one more connection of a user until the value returned is dropped. Returns the user's number of connections.
    fn count(&self, uid: u32) -> (ConnectionCount, u32) {
        let count = {
            let mut counts = self.by_user.borrow_mut();
            let count = counts.entry(uid).or_default();
            *count += 1;
            *count
        };
        (ConnectionCount { by_user: self.by_user.clone(), uid }, count)
    }

    fn log_refused(&self, identity: &Identity, what: fmt::Arguments<'_>) {
        if self.log_limit.borrow_mut().allows("client", identity.uid) {
            let Identity { pid, uid, unit, name, .. } = identity;
            warn!(name: "client-refused", pid, uid, unit, "{name} {what}");
        }
    }
}

/// A connection that is counted for its user.
struct ConnectionCount {
    by_user: Rc<RefCell<HashMap<u32, u32>>>,
    uid: u32,
}

impl Drop for ConnectionCount {
    fn drop(&mut self) {
        let mut counts = self.by_user.borrow_mut();
        if let Some(count) = counts.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}
