//! A GPU: the clients that have attached it, the bytes that each client may have mapped, and the
//! known use of the remaining memory.
//!
//! All records of a client on one GPU are in its [`Attachment`].
//!
//! Invariant: Σ charges ≤ capacity. A client's *charge* is the most that it can have mapped,
//! counting messages in flight.
//!
//! - `gpus`: all GPUs.
//! - `hold`: a client's hold of a GPU's lock, and statistics of its earlier holds.
//! - `drain_time`: how long a client usually takes to finish its work and release the lock.
//! - `account`: the bytes that a client may have mapped.
//! - `ledger`: the sums over all accounts.
//! - `capacity`: the bytes that can be charged to clients.
//! - `verification`: frees that clients reported and no measurement has confirmed yet.
//! - `shortfall`: mappings that failed although the ledger had room for them.
//! - `context_queue`: clients that wait to create a context.
//! - `reservation`: room for the driver's own allocations.
//! - `returning`: room for the context of a client that wakes up.
//! - `others`: memory that is kept free for programs that are not clients.
//! - `rate`: the speed at which memory moves.
//!
//! The decisions about one GPU's memory are methods of [`Gpu`]. These methods read other components
//! through a [`Context`] and change only the GPU. The methods leave commands and timers in
//! [`Effects`]:
//!
//! - `free`: bytes that are free for a client, and their measurement.
//! - `holders`: changes of holds.
//! - `credit`, `eviction`: raise and lower allowances.
//! - `eviction_blocks`: memory that cannot be evicted.
//! - `contexts`: contexts that do not exist yet, or are removed and restored.
//! - `rooms`: memory that is kept free for other programs.
//! - `failures`: mappings that fail.
//! - `reports`: memory as clients report it.
//! - `measurements`: memory as NVML reports it.

pub(crate) mod account;
pub(crate) mod capacity;
pub(crate) mod context_queue;
mod contexts;
mod credit;
mod drain_time;
mod eviction;
mod eviction_blocks;
mod failures;
mod free;
mod gpus;
mod hold;
mod holders;
pub(crate) mod ledger;
mod measurements;
pub(crate) mod others;
pub(crate) mod rate;
mod reports;
mod reservation;
mod returning;
mod rooms;
pub(crate) mod shortfall;
pub(crate) mod verification;

pub(crate) use account::Account;
pub(crate) use contexts::Admission;
pub(crate) use failures::{FAILURE_TIMEOUT, Measurement};
pub(crate) use gpus::Gpus;
pub(crate) use hold::{ClientLock, Hold, STUCK, TurnStep};
pub(crate) use reports::AT_REST;
pub(crate) use reservation::ReservationNeeds;
pub(crate) use returning::Return;

use crate::{
    api::*,
    client::Clients,
    effects::Effects,
    entity::Entity,
    policy::{History, utilization::FULL},
    queue::Queues,
    quota::Quota,
    rules::Rules,
    sleep::Sleep,
};
use context_queue::ContextQueue;
use ledger::Ledger;
use others::Others;
use rate::Rates;
use reservation::Reservation;
use returning::Returning;
use shortfall::{Failures, Trial};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A client keeps growing if its demand grew twice within this time, and the last growth was within
/// this time too.
const GROWING: Duration = Duration::from_secs(1);

/// The clients' access to a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Access {
    /// Clients take turns and share the GPU's capacity.
    #[default]
    Turns,
    /// The GPU is gone, so no client waits for it. Turns and capacity would only keep the driver's
    /// error from the clients.
    Gone,
    /// The clients' memory is evicted, and no client runs.
    Suspended,
}

/// The state of other components that decisions about a GPU depend on.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub clients: &'a Clients,
    pub queues: &'a Queues,
    pub sleep: &'a Sleep,
    pub quota: &'a Quota,
}

/// One GPU.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Gpu {
    pub id: GpuId,
    /// Size of the GPU in bytes.
    pub total: u64,
    pub access: Access,
    /// The newest measured overhead in bytes: contexts and the memory of other programs. `None`:
    /// never measured.
    pub measured: Option<u64>,
    /// The measured overhead excludes processes that may be clients about to reconnect.
    pub incomplete: bool,
    /// The client that may try to map more than the usable memory.
    pub trial: Option<Trial>,
    /// Clients' memory is measured on this GPU. So clients' reports are believed only as far as
    /// measurements confirm them.
    pub verifies: bool,
    /// Clients whose context the newest measurement may have missed.
    pub unmeasured: BTreeSet<ClientId>,
    /// Clients that have attached the GPU. Only [`Gpus`] adds and removes them.
    pub attachments: BTreeMap<ClientId, Attachment>,
    /// Clients that are off the GPU, with the bytes that their contexts will need.
    pub away: BTreeMap<ClientId, u64>,
    /// Clients of `away` that another program has checkpointed. Other clients use their charges until
    /// their restores begin.
    pub lent: BTreeSet<ClientId>,
    /// The holders of the lock, in the order of their grants.
    holders: BTreeMap<u64, ClientId>,
    /// The last holder, if it was preempted.
    preempted: Option<ClientId>,
    /// The entity that is granted the GPU next, and the start of the GPU's idle time while that
    /// entity's memory is moved in.
    idle_for: Option<(Entity, Time)>,
    pub ledger: Ledger,
    /// A measurement was requested, and its result has not arrived.
    pub measurement_requested: bool,
    pub contexts: ContextQueue,
    pub reservations: Vec<Reservation>,
    /// The capacity when the GPU was last settled.
    pub capacity: u64,
    /// A holder or the first request in the queue lacks bytes. Bytes that become free are used for
    /// that client first.
    pub lacking: bool,
    /// All programs that use the GPU are clients.
    pub has_only_clients: bool,
    /// The GPU is being emptied: its clients move to other GPUs or sleep.
    pub drained: bool,
    /// The GPU reports errors. Programs are placed on it only if too few other GPUs are permitted.
    pub failing: bool,
    /// The client that waits for its restore on this GPU, or is being restored.
    pub returning: Option<Returning>,
    /// Clients whose restore has not ended in time, with the bytes that their contexts may still
    /// take at any moment.
    pub overdue: BTreeMap<ClientId, u64>,
    pub rates: Rates,
    pub others: Others,
}

/// A client on one GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Attachment {
    pub engine: Engine,
    /// The client's account. Only the ledger changes it, so that the ledger's sums stay up to date.
    entry: ledger::Entry,
    pub lock: ClientLock,
    /// The client's earlier turns, from which policies predict the next ones.
    pub history: History,
    /// When the client was notified that it may create its context.
    pub attached: Option<Time>,
    /// When the client first did something that needs a context.
    pub used: Option<Time>,
    pub failures: Failures,
    /// Why the client's memory cannot be evicted.
    pub eviction_block: Option<EvictionBlock>,
    /// The last delay between a failed eviction and the next request to evict.
    pub eviction_backoff: Duration,
    /// The smoothed rate, in bytes per second, at which the client's memory is evicted. Counts
    /// chunks that need no copy. `None`: never measured.
    pub rate: Option<u64>,
    /// When the client's demand last grew.
    grew: Option<Time>,
    /// The demand had also grown shortly before `grew`.
    keeps_growing: bool,
    /// How long room for the client's return is kept beside holders that cannot drain. 0: they have
    /// not kept the client from returning.
    return_patience: Duration,
}

/// A client's records during a move from one GPU to another. The client has nothing on either GPU.
#[derive(Debug)]
struct Moved {
    attachment: Attachment,
    context: Option<u64>,
    /// The client's unanswered reservation.
    reservation: Option<Reservation>,
}

impl Gpu {
    pub fn new(id: GpuId, total: u64) -> Self {
        Self { id, total, ..Self::default() }
    }

    /// Opens an account for a client that is about to create a context.
    fn attach(&mut self, now: Time, client: ClientId, tenant: TenantId, engine: Engine) {
        let mut account = Account::default();
        if self.verifies {
            account.distrust();
        }
        self.attachments.insert(client, Attachment::new(now, engine, ledger::Entry::new(now, tenant, account)));
        self.unmeasured.insert(client);
        self.contexts.push(now, client);
    }

    /// Removes a client that no longer has a context on the GPU.
    fn detach(&mut self, client: ClientId) {
        if let Some(attachment) = self.attachments.remove(&client) {
            self.ledger.close(client, &attachment.entry);
        }
        self.away.remove(&client);
        self.lent.remove(&client);
        self.unmeasured.remove(&client);
        self.reservations.retain(|reservation| reservation.client != client);
        self.contexts.remove(client);
        self.end_return(client);
    }

    /// Ends a client's restore, or the client's wait for a restore. Returns whether the client was
    /// being restored or waiting.
    pub fn end_return(&mut self, client: ClientId) -> bool {
        let is_overdue = self.overdue.remove(&client).is_some();
        self.returning.take_if(|returning| returning.client == client).is_some() || is_overdue
    }

    /// Ends the wait of other clients for an overdue restore. The restored client's context may
    /// still appear.
    pub fn give_up_return(&mut self) {
        if let Some(Returning { client, bytes, .. }) = self.returning.take() {
            self.overdue.insert(client, bytes);
        }
    }

    /// Bytes set aside for the contexts of clients that are being restored or will be restored
    /// next.
    pub fn returning_bytes(&self) -> u64 {
        let overdue = self.overdue.values().fold(0u64, |sum, bytes| sum.saturating_add(*bytes));
        self.returning.map_or(0, |returning| returning.bytes).saturating_add(overdue)
    }

    /// Removes a client that is off the GPU and returns its records.
    fn take(&mut self, client: ClientId) -> Option<Moved> {
        let waits = |reservation: &Reservation| reservation.client == client && reservation.answered.is_none();
        let moved = Moved {
            attachment: self.attachments.remove(&client)?,
            context: self.away.get(&client).copied(),
            reservation: self.reservations.iter().find(|reservation| waits(reservation)).copied(),
        };
        self.ledger.close(client, &moved.attachment.entry);
        self.detach(client);
        Some(moved)
    }

    /// Adds a client that is off the GPU, with its records from another GPU.
    fn put(&mut self, now: Time, client: ClientId, moved: Moved) {
        let mut attachment = moved.attachment;
        attachment.entry = attachment.entry.reopen(now);
        self.ledger.change(client, &mut attachment.entry, |account| account.is_off(self.verifies));
        self.attachments.insert(client, attachment);
        self.away.extend(moved.context.map(|bytes| (client, bytes)));
        self.reservations.extend(moved.reservation.map(|waits| Reservation { secured: 0, ..waits }));
    }

    /// Records that a GPU was found, and can be used unless the host is about to suspend.
    pub fn found(&mut self, total: u64, suspended: bool) {
        (self.total, self.failing) = (total, false);
        self.access = if suspended { Access::Suspended } else { Access::Turns };
    }

    /// Discards the utilization that holders reported before they started to run together.
    pub fn forget_utilization(&mut self) {
        for client in self.running().collect::<Vec<_>>() {
            self.attachments.entry(client).and_modify(|attachment| attachment.history.utilization.forget());
        }
    }

    /// Handles a client's report of its utilization. A value above `FULL` means that the client
    /// wants the GPU alone. Work of the client's gang members at the same time can only raise the
    /// measured value.
    pub fn utilization(&mut self, fx: &mut Effects, client: ClientId, permille: u32) {
        let entity = self.hold(client).map(|hold| hold.entity);
        let mut holds = self.holders().filter_map(|holder| self.hold(holder));
        let is_alone = entity.is_some() && holds.all(|hold| Some(hold.entity) == entity);
        drop(holds);
        if let Some(attachment) = self.attachments.get_mut(&client).filter(|_| permille > FULL || is_alone) {
            attachment.history.utilization.reported(permille);
            fx.touch(self.id);
        }
    }

    /// Records that a client uses the GPU. `requests`: the client requests the lock that it neither
    /// has nor waits for.
    pub fn used_by(&mut self, now: Time, client: ClientId, requests: bool) {
        let Some(attachment) = self.attachments.get_mut(&client) else { return };
        attachment.used.get_or_insert(now);
        if requests {
            attachment.history.progress.asks(now);
        }
    }

    /// Bytes for which a client whose memory is unchanged should allocate host memory.
    pub fn unchanged_memory(&self, client: ClientId) -> Option<u64> {
        let attachment = self.attachments.get(&client)?;
        let report = attachment.account().report;
        let can_move = attachment.engine == Engine::Swap && attachment.eviction_block.is_none();
        can_move.then(|| report.mapped.saturating_sub(report.pinned))
    }

    /// The known bytes of all clients on the GPU.
    pub fn in_use(&self) -> u64 {
        self.accounts().fold(0, |sum, account| sum.saturating_add(account.in_use()))
    }

    /// A client's account. `None`: the client has not attached the GPU.
    pub fn account(&self, client: ClientId) -> Option<&Account> {
        Some(self.attachments.get(&client)?.account())
    }

    /// The accounts of all clients.
    pub fn accounts(&self) -> impl Iterator<Item = &Account> {
        self.attachments.values().map(Attachment::account)
    }

    /// Changes a client's account and the ledger's sums. Marks the GPU if its unevictable memory
    /// has shrunk, because blocked requests may now fit. Returns the result of `change`, or `None`
    /// if the client has not attached the GPU.
    pub fn change_account<R>(
        &mut self,
        fx: &mut Effects,
        client: ClientId,
        change: impl FnOnce(&mut Account) -> R,
    ) -> Option<R> {
        let result = self.ledger.change(client, &mut self.attachments.get_mut(&client)?.entry, change);
        if self.ledger.unevictable_fell() {
            fx.touch(self.id);
        }
        Some(result)
    }

    /// A client's lock state. `None`: the client has not attached the GPU.
    pub fn lock(&self, client: ClientId) -> Option<&ClientLock> {
        Some(&self.attachments.get(&client)?.lock)
    }

    pub fn hold(&self, client: ClientId) -> Option<&Hold> {
        self.lock(client)?.hold.as_ref()
    }

    /// The holders of the lock, in the order of their grants.
    pub fn holders(&self) -> impl Iterator<Item = ClientId> {
        self.holders.values().copied()
    }

    /// Holders that are not bypassed. While one of them runs, a client is admitted only if the two
    /// may run together.
    pub fn running(&self) -> impl Iterator<Item = ClientId> {
        self.holders().filter(|client| self.hold(*client).is_some_and(|hold| !hold.is_bypassed()))
    }

    /// Bytes that all holders except `client` could give up after releasing the lock.
    pub fn held_by_others(&self, client: ClientId) -> u64 {
        let gives = self.running().filter(|holder| *holder != client);
        gives.filter_map(|holder| Some(self.account(holder)?.evictable())).fold(0, u64::saturating_add)
    }

    /// Bytes of a client's charge that cannot be evicted.
    pub fn unevictable_of(&self, client: ClientId) -> u64 {
        self.attachments.get(&client).map_or(0, |attachment| attachment.entry.unevictable())
    }
}

impl Attachment {
    fn new(now: Time, engine: Engine, entry: ledger::Entry) -> Self {
        Self {
            engine,
            entry,
            lock: ClientLock::new(now),
            history: History::new(now),
            attached: None,
            used: None,
            failures: Failures::default(),
            eviction_block: None,
            eviction_backoff: Duration::ZERO,
            rate: None,
            grew: None,
            keeps_growing: false,
            return_patience: Duration::ZERO,
        }
    }

    pub fn account(&self) -> &Account {
        self.entry.account()
    }

    /// Whether the client can run without its memory on the GPU, because the driver moves its pages on
    /// page faults.
    pub fn faults_in(&self, settings: &Settings) -> bool {
        settings.anti_thrash == AntiThrash::Off && self.engine == Engine::Managed
    }

    /// Records that the client's demand grew.
    pub fn grows(&mut self, now: Time) {
        self.keeps_growing = self.grew.replace(now).is_some_and(|before| now < before + GROWING);
    }

    /// Whether the client's demand has grown repeatedly.
    pub fn keeps_growing(&self, now: Time) -> bool {
        self.keeps_growing && self.grew.is_some_and(|at| now < at + GROWING)
    }
}
