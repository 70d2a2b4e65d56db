//! The memory of a GPU: how many bytes each client may have mapped there, and what is known of the room for them.
//!
//! Σ charges ≤ capacity, where a client's *charge* is the most that it can have mapped while messages are under way.
//!
//! - `ledger`: the account of each client, and the sums over all accounts. `account`: one of them.
//! - `capacity`: how many bytes can be charged to clients.
//! - `verification`: frees that clients report and no measurement has confirmed yet.
//! - `shortfall`: mappings that failed although the ledger had room for them.
//! - `context_queue`: clients that wait to create a context.
//! - `reservation`: room for what the driver allocates for itself.
//! - `rate`: how fast memory moves.
//!
//! These are data; which client gains or loses bytes is decided in `settle`.

pub(crate) mod account;
pub(crate) mod capacity;
pub(crate) mod context_queue;
pub(crate) mod ledger;
pub(crate) mod rate;
pub(crate) mod reservation;
pub(crate) mod shortfall;
pub(crate) mod verification;

pub(crate) use account::Account;

use crate::api::*;
use context_queue::ContextQueue;
use ledger::Ledger;
use rate::Rates;
use reservation::Reservation;
use shortfall::{Failures, Trial};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// How long ago a client that keeps growing may have grown last.
const GROWING: Duration = Duration::from_secs(1);

/// One GPU.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct GpuMemory {
    pub total: u64,
    /// The newest measured overhead.
    pub measured: Option<u64>,
    /// Processes were left out of that which may be clients on their way back.
    pub incomplete: bool,
    /// A client that may try to map more than there seems to be.
    pub trial: Option<Trial>,
    /// Clients are measured there: what they report is believed only as far as that goes.
    pub verifies: bool,
    /// Clients whose context the newest measurement cannot have seen.
    pub unmeasured: BTreeSet<ClientId>,
    /// Clients that have attached it.
    pub clients: BTreeMap<ClientId, ClientMemory>,
    pub ledger: Ledger,
    /// A measurement was asked for and has not come.
    pub asked: bool,
    pub contexts: ContextQueue,
    pub reservations: Vec<Reservation>,
    /// The capacity when it was last settled.
    pub capacity: u64,
    /// Whether a holder or the first in line lacks bytes: what becomes free is theirs.
    pub lacking: bool,
    pub rates: Rates,
}

/// A client on one GPU, beside its account.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct ClientMemory {
    #[serde(with = "crate::encoding::Engine")]
    pub engine: Engine,
    /// When it was told to create its context, and when it first did something for which it must have one.
    pub attached: Option<Time>,
    pub used: Option<Time>,
    pub failures: Failures,
    /// Why its memory cannot leave, and for how long it is then not asked for it.
    pub eviction_block: Option<EvictionBlock>,
    pub eviction_backoff: Duration,
    /// Bytes per second at which its memory leaves, whether copied or not, smoothed.
    pub rate: Option<u64>,
    /// When its demand last grew, and whether it had grown shortly before that, too.
    grew: Option<Time>,
    keeps_growing: bool,
}

impl GpuMemory {
    pub fn new(total: u64) -> Self {
        Self {
            total,
            measured: None,
            incomplete: false,
            trial: None,
            verifies: false,
            unmeasured: BTreeSet::new(),
            clients: BTreeMap::new(),
            ledger: Ledger::default(),
            asked: false,
            contexts: ContextQueue::default(),
            reservations: Vec::new(),
            capacity: 0,
            lacking: false,
            rates: Rates::default(),
        }
    }

    /// Opens an account for a client that is about to create a context.
    pub fn attach(&mut self, now: Time, client: ClientId, user: UserId, engine: Engine) {
        let mut account = Account::default();
        if self.verifies {
            account.distrust();
        }
        self.ledger.open(now, client, user, account);
        self.clients.insert(client, ClientMemory::new(engine));
        self.unmeasured.insert(client);
        self.contexts.push(now, client);
    }

    /// Nothing of that client is there any more.
    pub fn detach(&mut self, client: ClientId) {
        self.ledger.close(client);
        self.clients.remove(&client);
        self.unmeasured.remove(&client);
        self.reservations.retain(|reservation| !reservation.is_of(client));
        self.contexts.remove(client);
    }

    /// Bytes that clients have there, as far as is known.
    pub fn in_use(&self) -> u64 {
        let accounts = self.clients.keys().filter_map(|client| self.ledger.account(*client));
        accounts.fold(0, |sum, account| sum.saturating_add(account.in_use()))
    }
}

impl ClientMemory {
    fn new(engine: Engine) -> Self {
        Self {
            engine,
            attached: None,
            used: None,
            failures: Failures::default(),
            eviction_block: None,
            eviction_backoff: Duration::ZERO,
            rate: None,
            grew: None,
            keeps_growing: false,
        }
    }

    /// Its demand is higher than before.
    pub fn grows(&mut self, now: Time) {
        self.keeps_growing = self.grew.replace(now).is_some_and(|before| now < before + GROWING);
    }

    /// Whether its demand grows time and again.
    pub fn keeps_growing(&self, now: Time) -> bool {
        self.keeps_growing && self.grew.is_some_and(|at| now < at + GROWING)
    }
}
