//! Clients' connections from beginning to end.
//!
//! - [`accept`]: the listening socket. [`claims`]: the sockets of claims.
//! - `client`: one connection: the handshake, its packets, its end.
//! - [`resume`]: connections taken over from an earlier daemon.
//! - [`room`]: memory that is kept free on requests over D-Bus.
//! - [`lock`]: GPU locks acquired over D-Bus, for which the daemon acts as a client.

pub mod accept;
pub mod claims;
mod client;
pub mod lock;
pub mod resume;
pub mod room;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use tokio::sync::watch;
use tracing::warn;

use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::daemon::tenants::Budgets;
use crate::identity::Identity;

/// The state that all connections share.
#[derive(Debug)]
pub struct Connections {
    log_limit: RefCell<LogRateLimit>,
    pub budgets: Rc<Budgets>,
    /// Becomes true once clients of an earlier daemon have been taken over.
    resumed: watch::Receiver<bool>,
}

impl Connections {
    pub fn new(budgets: Rc<Budgets>, resumed: watch::Receiver<bool>) -> Self {
        Self { log_limit: RefCell::default(), budgets, resumed }
    }

    /// Waits until clients of an earlier daemon have been taken over. Requests of other clients are read only after
    /// that.
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
