//! Clients' connections, from the handshake to their end.
//!
//! - [`accept`]: the listening socket. [`claims`]: the sockets of claims.
//! - `client`: one connection with its handshake and packets.
//! - [`resume`]: connections taken over from an earlier daemon.
//! - [`room`]: memory that is kept free at the request of D-Bus callers.
//! - [`lock`]: GPU locks acquired over D-Bus. The daemon acts as their client.

pub mod accept;
pub mod claims;
mod client;
pub mod lock;
pub mod resume;
pub mod room;

use std::cell::RefCell;
use std::fmt;
use std::sync::Arc;

use tokio::sync::watch;
use tracing::warn;

use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::daemon::tenants::Budgets;
use crate::identity::Identity;

/// The state that all connections share.
#[derive(Debug)]
pub struct Connections {
    log_limit: RefCell<LogRateLimit>,
    pub budgets: Arc<Budgets>,
    /// True once the clients of an earlier daemon have been taken over.
    resumed: watch::Receiver<bool>,
}

impl Connections {
    pub fn new(budgets: Arc<Budgets>, resumed: watch::Receiver<bool>) -> Self {
        Self { log_limit: RefCell::default(), budgets, resumed }
    }

    /// Waits until the clients of an earlier daemon have been taken over. Until then, requests of other
    /// clients are not read.
    async fn resumed(&self) {
        let _ = self.resumed.clone().wait_for(|resumed| *resumed).await;
    }

    fn log_refused(&self, identity: &Identity, what: fmt::Arguments<'_>) {
        if self.log_limit.borrow_mut().allows("client", &identity.tenant) {
            let Identity { pid, uid, unit, name, tenant, .. } = identity;
            warn!(name: "client-refused", pid, uid, unit, %tenant, "{name} {what}");
        }
    }
}
