//! Admits calls before the daemon does any work for them. Limits each user's concurrent calls and
//! calls per second, so that no user's calls exhaust memory or delay other users. A call beyond a
//! limit is refused immediately, or dropped if it expects no reply. The bus and the control socket
//! have separate gates, so calls on one cannot use up the limits of the other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};
use zbus::fdo;
use zbus::names::OwnedUniqueName;

use super::callers::Known;
use crate::daemon::tenants::ROOT_FACTOR;
use crate::identity::accountable;

/// Maximum number of concurrent calls of one connection to the bus.
const MAX_OF_SENDER: usize = 16;
/// Maximum number of concurrent calls of one user. A user can have many connections.
const MAX_OF_USER: usize = 32;
/// Maximum number of one user's calls that queue for usage records or a timeline. The daemon serves
/// this queue one call at a time.
const MAX_LONG: usize = 2;
/// Average number of calls per second that one user may make. Also the maximum number in a burst.
const CALLS_PER_SECOND: u32 = 200;
/// Maximum number of connections and users that are remembered after their last call has ended.
const MAX_IDLE: usize = 256;

/// The limits of all users.
#[derive(Debug, Default)]
pub struct Gate(Mutex<HashMap<u32, Arc<User>>>);

#[derive(Debug)]
struct User {
    places: Arc<Semaphore>,
    long: Arc<Semaphore>,
    token: Duration,
    /// Time at which the token bucket is full again. Each call postpones this time by the time of
    /// one token.
    full: Mutex<Instant>,
}

/// Permit of an admitted call. Dropping the permit ends the call.
pub type Place = OwnedSemaphorePermit;

impl User {
    fn new(uid: u32) -> Self {
        let factor = if uid == 0 { ROOT_FACTOR } else { 1 };
        let places = |most: usize| Arc::new(Semaphore::new(most.saturating_mul(factor as usize)));
        Self {
            places: places(MAX_OF_USER),
            long: places(MAX_LONG),
            token: Duration::from_secs(1) / CALLS_PER_SECOND.saturating_mul(factor),
            full: Mutex::new(Instant::now()),
        }
    }

    fn take_token(&self) -> bool {
        let mut full = self.full.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let next = (*full).max(now) + self.token;
        // The bucket has room for the tokens of one second.
        let is_there = next <= now + Duration::from_secs(1);
        if is_there {
            *full = next;
        }
        is_there
    }

    fn is_idle(&self) -> bool {
        let is_full = *self.full.lock().unwrap_or_else(PoisonError::into_inner) <= Instant::now();
        is_full && Arc::strong_count(&self.places) == 1 && Arc::strong_count(&self.long) == 1
    }
}

fn too_many(what: &str) -> fdo::Error {
    fdo::Error::LimitsExceeded(format!("too many calls {what}. Try again later."))
}

impl Gate {
    fn user(&self, uid: u32) -> Arc<User> {
        let uid = accountable(uid);
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if users.len() >= MAX_IDLE && !users.contains_key(&uid) {
            users.retain(|_, user| Arc::strong_count(user) > 1 || !user.is_idle());
        }
        users.entry(uid).or_insert_with(|| Arc::new(User::new(uid))).clone()
    }

    /// Admits a call of a user. `uid`: `None` if the bus cannot identify the user. All such calls share the
    /// limits of one user.
    ///
    /// # Errors
    /// `LimitsExceeded` if the user has too many calls in progress, or calls too often.
    pub fn admit(&self, uid: Option<u32>) -> fdo::Result<Place> {
        let user = self.user(uid.unwrap_or(u32::MAX));
        let place = user.places.clone().try_acquire_owned().map_err(|_| too_many("of this user are being answered"))?;
        if user.take_token() { Ok(place) } else { Err(too_many("of this user were made within a second")) }
    }

    /// Admits a call that queues for usage records or a timeline.
    ///
    /// # Errors
    /// `LimitsExceeded` if too many of the user's calls are in that queue.
    pub fn admit_long(&self, uid: u32) -> fdo::Result<Place> {
        let place = self.user(uid).long.clone().try_acquire_owned();
        place.map_err(|_| too_many("of this user wait for records or a timeline"))
    }
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
    pub fn admit(&self) -> fdo::Result<Option<Place>> {
        let place = self.places.clone().try_acquire_owned().ok();
        let is_root = || self.known.get().is_some_and(|known| known.uid == 0);
        match place {
            None if !is_root() => Err(too_many("of this connection are being answered")),
            place => Ok(place),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_users_calls_are_limited_in_number_and_rate() {
        let gate = Gate::default();
        let places: Vec<Place> = (0..100).map_while(|_| gate.admit(Some(1000)).ok()).collect();
        assert_eq!(places.len(), MAX_OF_USER);
        assert!(gate.admit(Some(1001)).is_ok() && gate.admit(None).is_ok());
        let root: Vec<Place> = (0..1000).map_while(|_| gate.admit(Some(0)).ok()).collect();
        assert_eq!(root.len(), MAX_OF_USER * ROOT_FACTOR as usize);
        drop(places);
        let begin = Instant::now();
        let admitted = (0..100_000).filter(|_| gate.admit(Some(1000)).is_ok()).count();
        let most = CALLS_PER_SECOND + (begin.elapsed().as_secs_f64() * f64::from(CALLS_PER_SECOND)) as u32 + 1;
        assert!(admitted <= most as usize, "{admitted} of {most}");
        assert!(gate.admit(Some(1001)).is_ok());
        let long: Vec<Place> = (0..10).map_while(|_| gate.admit_long(1001).ok()).collect();
        assert_eq!(long.len(), MAX_LONG);
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
