//! Admits calls before the daemon does any work for them. Limits each tenant's concurrent calls and
//! calls per second ([`tenants`](crate::daemon::tenants)), so that no tenant's calls exhaust memory or
//! delay other tenants. A call beyond a limit is refused immediately, or dropped if it expects no reply.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use zbus::fdo;
use zbus::names::OwnedUniqueName;

use super::callers::Known;
use crate::daemon::tenants::{Budget, Share, What};

/// Maximum number of concurrent calls of one connection to the bus. Limits the connection's calls until
/// the bus has named its user.
const MAX_OF_SENDER: usize = 16;
/// Maximum number of connections that are remembered after their last call has ended.
const MAX_IDLE: usize = 256;

/// Permit of an admitted call. Dropping the permit ends the call.
#[derive(Debug, Default)]
pub struct Place {
    pub _of_sender: Option<OwnedSemaphorePermit>,
    /// `None` if the bus has not named the caller yet.
    pub of_tenant: Option<Share>,
}

fn too_many(what: &str) -> fdo::Error {
    fdo::Error::LimitsExceeded(format!("too many calls {what}. Try again later."))
}

/// Admits a call of a tenant. `what`: the calls on the bus, or those on the control socket.
///
/// # Errors
/// `LimitsExceeded` if the tenant has too many calls in progress, or calls too often.
pub fn admit(budget: &Arc<Budget>, what: What) -> fdo::Result<Share> {
    let place = budget.take(what, 1).ok_or_else(|| too_many("of this user are being answered"))?;
    if budget.take_token(what) { Ok(place) } else { Err(too_many("of this user were made within a second")) }
}

/// Admits a call that queues for usage records or a timeline.
///
/// # Errors
/// `LimitsExceeded` if too many of the tenant's calls are in that queue.
pub fn admit_query(budget: &Arc<Budget>, what: What) -> fdo::Result<Share> {
    budget.take(what, 1).ok_or_else(|| too_many("of this user wait for records or a timeline"))
}

/// Connections to the bus, by their unique names. The bus never reuses a unique name.
#[derive(Debug, Default)]
pub struct Senders(Mutex<HashMap<OwnedUniqueName, Arc<Sender>>>);

/// A connection to the bus.
#[derive(Debug)]
pub struct Sender {
    places: Arc<Semaphore>,
    /// The connection's credentials, as reported by the bus. Requested again until the bus answers.
    pub known: OnceCell<Arc<Known>>,
}

impl Senders {
    pub fn of(&self, name: &OwnedUniqueName) -> Arc<Sender> {
        let mut senders = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sender) = senders.get(name) {
            return sender.clone();
        }
        if senders.len() >= MAX_IDLE {
            senders.retain(|_, sender| Arc::strong_count(&sender.places) > 1);
        }
        let sender = Sender { places: Arc::new(Semaphore::new(MAX_OF_SENDER)), known: OnceCell::new() };
        senders.entry(name.clone()).or_insert(Arc::new(sender)).clone()
    }
}

impl Sender {
    /// Admits a call of the connection. `None` if all permits are in use and the connection belongs to
    /// root. For root, only the user's limits apply then.
    ///
    /// # Errors
    /// `LimitsExceeded` if the connection has too many calls in progress.
    pub fn admit(&self) -> fdo::Result<Option<OwnedSemaphorePermit>> {
        let place = self.places.clone().try_acquire_owned().ok();
        let is_root = || self.known.get().is_some_and(|known| known.uid() == 0);
        match place {
            None if !is_root() => Err(too_many("of this connection are being answered")),
            place => Ok(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::tenants::Budgets;

    #[test]
    fn each_tenants_calls_are_limited_in_number_and_rate() {
        let budgets = Budgets::new(1);
        let calls = |uid: u32, what| -> Vec<Share> {
            (0..1000).map_while(|_| admit(&budgets.of_caller(uid), what).ok()).collect()
        };
        let places = calls(1000, What::BusCalls);
        assert_eq!(places.len(), 32);
        assert_eq!(calls(1000, What::ControlCalls).len(), 32);
        assert_eq!(calls(u32::MAX, What::BusCalls).len(), 32);
        assert_eq!(calls(0, What::BusCalls).len(), 256);
        drop(places);
        let budget = budgets.of_caller(1000);
        let admitted = (0..100_000).filter(|_| admit(&budget, What::BusCalls).is_ok()).count();
        assert!((100..10_000).contains(&admitted), "{admitted}");
        let queries: Vec<Share> = (0..10).map_while(|_| admit_query(&budget, What::BusQueries).ok()).collect();
        assert_eq!(queries.len(), 2);
        assert!(admit_query(&budget, What::ControlQueries).is_ok());
    }

    #[test]
    fn each_connections_calls_are_limited_and_idle_ones_are_forgotten() {
        let senders = Senders::default();
        let name = |n: usize| OwnedUniqueName::try_from(format!(":1.{n}")).expect("a name");
        let places: Vec<_> = (0..100).map_while(|_| senders.of(&name(0)).admit().ok()).collect();
        assert_eq!(places.len(), MAX_OF_SENDER);
        for n in 1..10_000 {
            senders.of(&name(n)).admit().expect("a place");
        }
        assert!(senders.0.lock().expect("a lock").len() <= MAX_IDLE);
        assert!(senders.of(&name(0)).admit().is_err(), "its calls are still being answered");
    }
}
