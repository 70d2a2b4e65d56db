//! Budgets of tenants: limits on each tenant's use of the scheduler. Budgets keep one tenant from
//! denying service to other tenants. A tenant has one [`Budget`], on the programs' socket, on the bus and
//! on the control socket. [`What::limits`] is the table of the limits.
//!
//! - *Time slices*. A tenant's messages are read in slices of at most [`SLICE`]. Tenants with pending
//!   messages get one slice each in turn, regardless of their numbers of clients. So a message waits
//!   for at most one slice of each other tenant, however many messages the other tenants send.
//! - *Tokens*, which a token bucket limits per second. A costly message takes several tokens. While a
//!   tenant has no tokens, the daemon does not read its messages. No message is lost: unread messages
//!   stay in the tenant's sockets. A D-Bus call without a token is refused.
//! - *Amounts*. A [`Share`] is a part of an amount. Dropping it gives the part back.
//!
//! If all clients of a tenant disconnect, the tenant's buckets are kept until they would be full. So
//! reconnecting yields no tokens.
//!
//! Some limits are elsewhere. The limits of the state machine are in the scheduler, which knows nothing of
//! this module. `swap_files` divides the disk equally among tenants, so that limit is no constant. `foreign`
//! limits the descriptors that wait to be closed: they are dropped without a budget.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use crate::identity::{Tenant, accountable};
use crate::scheduler::Time;
use crate::sys::clock;

/// Length of a slice. After this time, the slice ends once the message in progress has been handled.
const SLICE: Duration = Duration::from_micros(100);
/// Time on the scheduling loop that costs one token. A tenant with many clients has costly
/// messages. With its tokens of [`What::Messages`], such a tenant gets at most two fifths of the
/// loop's time.
const TOKEN_TIME: Duration = Duration::from_micros(40);

/// A token bucket has room for the tokens of this time.
const BURST: Duration = Duration::from_secs(1);
/// Most limits of root on the host are this many times as high.
const ROOT_FACTOR: u32 = 8;

/// A resource with a limit for each tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Messages of clients.
    Messages,
    /// Clients, including connections before the handshake. The configuration sets this limit.
    Clients,
    /// Connections whose process is not identified yet.
    Arrivals,
    /// Connections beyond the limit on clients, until their refusal is sent.
    Refusals,
    /// Ranges of other clients' memory that clients have open.
    Imports,
    /// GPUs that NVML does not list.
    Gpus,
    /// Bytes of messages that clients have not read.
    Queued,
    /// Calls on the bus, until they are answered.
    BusCalls,
    /// Calls on the control socket, until they are answered.
    ControlCalls,
    /// Calls on the bus that queue for usage records or a timeline.
    BusQueries,
    /// Calls on the control socket that queue for usage records or a timeline.
    ControlQueries,
    /// Rooms.
    Rooms,
    /// Checkpoint helpers with a request, until they have exited. Each started helper costs a token.
    Helpers,
    /// Units that metrics, pressure and usage records name.
    Units,
    /// Placements whose programs have not connected.
    Placements,
    /// Programs without proof of access that `status` names.
    Unproven,
}

impl What {
    const COUNT: usize = Self::Unproven as usize + 1;

    /// The table of limits. Each row has the amount that a tenant may have at the same time, its tokens
    /// per second, and the factor for root on the host. `clients`: the configured limit on clients.
    const fn limits(self, clients: u32) -> (u32, u32, u32) {
        const ANY: u32 = u32::MAX;
        match self {
            // Two clients that only take turns send about 8,000 messages per second.
            Self::Messages => (ANY, 10_000, ROOT_FACTOR),
            Self::Clients => (clients, ANY, ROOT_FACTOR),
            Self::Arrivals => (clients.saturating_add(64), ANY, ROOT_FACTOR),
            Self::Refusals => (32, ANY, ROOT_FACTOR),
            Self::Imports => (4096, ANY, ROOT_FACTOR),
            // The most GPUs of one machine, for a machine without NVML. All of a client's GPUs are detached
            // in one step when it disconnects, and other tenants wait for that.
            Self::Gpus => (16, ANY, ROOT_FACTOR),
            Self::Queued => (16 << 20, ANY, ROOT_FACTOR),
            // The bus and the control socket have separate limits, so that calls on one cannot use up the
            // limits of the other: the control socket is root's way in while the bus is flooded.
            Self::BusCalls | Self::ControlCalls => (32, 200, ROOT_FACTOR),
            // The daemon serves this queue one call at a time.
            Self::BusQueries | Self::ControlQueries => (2, ANY, ROOT_FACTOR),
            // More rooms would not give the tenant more memory.
            Self::Rooms => (4, ANY, 1),
            // A tenant can keep a helper running by stopping the client's process. `MaxConnections=` of the
            // helpers' socket leaves room for the helpers of many tenants. A program that claims to be asleep,
            // or that refuses to prepare, makes the daemon start one helper after the other.
            Self::Helpers => (4, 8, 1),
            // A user or a container's root can invent any number of units.
            Self::Units => (100, ANY, ROOT_FACTOR),
            // The scheduler has the same limit.
            Self::Placements => (64, ANY, 1),
            Self::Unproven => (16, ANY, 1),
        }
    }
}

/// The budgets of all tenants.
#[derive(Debug)]
pub struct Budgets {
    tenants: Mutex<BTreeMap<Tenant, Arc<Budget>>>,
    clients: Arc<AtomicU32>,
}

impl Budgets {
    /// Creates budgets. `clients`: the limit on clients of each tenant.
    pub fn new(clients: u32) -> Self {
        Self { tenants: Mutex::default(), clients: Arc::new(AtomicU32::new(clients)) }
    }

    /// Sets the limit on clients of each tenant. Clients beyond a lowered limit stay connected.
    pub fn set_clients(&self, clients: u32) {
        self.clients.store(clients, Relaxed);
    }

    /// The budget of a tenant.
    pub fn of(&self, tenant: &Tenant) -> Arc<Budget> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(budget) = tenants.get(tenant) {
            return budget.clone();
        }
        let now = clock::now();
        tenants.retain(|_, budget| Arc::strong_count(budget) > 1 || !budget.has_rested(now));
        let budget = Arc::new(Budget::new(tenant.clone(), self.clients.clone()));
        tenants.insert(tenant.clone(), budget.clone());
        budget
    }

    /// The budget of a user who calls over D-Bus.
    pub fn of_caller(&self, uid: u32) -> Arc<Budget> {
        match accountable(uid) {
            0 => self.of(&Tenant::Root),
            user => self.of(&Tenant::User(user)),
        }
    }
}

/// The budget of one tenant.
#[derive(Debug)]
pub struct Budget {
    tenant: Tenant,
    clients: Arc<AtomicU32>,
    used: [AtomicU32; What::COUNT],
    /// Notified when a part of an amount is given back.
    returned: Notify,
    slice: Semaphore,
    /// Times at which the token buckets are full again. Each token postpones this time.
    full: [Mutex<Time>; What::COUNT],
}

impl Budget {
    fn new(tenant: Tenant, clients: Arc<AtomicU32>) -> Self {
        let (used, full) = Default::default();
        Self { tenant, clients, used, returned: Notify::new(), slice: Semaphore::new(1), full }
    }

    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// The tenant's limits on a resource: its amount and its tokens per second.
    fn limits(&self, what: What) -> (u32, u32) {
        let (amount, rate, of_root) = what.limits(self.clients.load(Relaxed));
        let factor = if self.tenant == Tenant::Root { of_root } else { 1 };
        (amount.saturating_mul(factor), rate.saturating_mul(factor))
    }

    /// The tenant's limit on the amount of a resource.
    pub fn limit(&self, what: What) -> u32 {
        self.limits(what).0
    }

    /// Takes part of an amount. `None` if that would exceed the limit.
    pub fn take(self: &Arc<Self>, what: What, amount: u32) -> Option<Share> {
        let more = |used: u32| used.checked_add(amount).filter(|used| *used <= self.limit(what));
        self.used(what).fetch_update(Relaxed, Relaxed, more).ok()?;
        Some(Share { budget: self.clone(), what, amount })
    }

    /// Takes part of an amount, even beyond the limit.
    pub fn hold(self: &Arc<Self>, what: What, amount: u32) -> Share {
        self.used(what).fetch_add(amount, Relaxed);
        Share { budget: self.clone(), what, amount }
    }

    /// Takes one, and waits until that does not exceed the limit.
    pub async fn wait_for(self: &Arc<Self>, what: What) -> Share {
        loop {
            let returned = self.returned.notified();
            match self.take(what, 1) {
                Some(share) => return share,
                None => returned.await,
            }
        }
    }

    /// The part of the amount that is left.
    pub fn left(&self, what: What) -> u32 {
        self.limit(what).saturating_sub(self.used(what).load(Relaxed))
    }

    fn used(&self, what: What) -> &AtomicU32 {
        // The index is in range: the array has an element for each variant.
        self.used.get(what as usize).unwrap_or(&self.used[0])
    }

    fn full(&self, what: What) -> MutexGuard<'_, Time> {
        let full = self.full.get(what as usize).unwrap_or(&self.full[0]);
        full.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a token. False if none is left.
    pub fn take_token(&self, what: What) -> bool {
        let (mut full, now) = (self.full(what), clock::now());
        let next = full.max(now).saturating_add(self.token(what));
        let is_left = next <= now.saturating_add(BURST);
        if is_left {
            *full = next;
        }
        is_left
    }

    /// Takes a token, and waits until one is left.
    pub async fn wait_for_token(&self, what: What) {
        while !self.take_token(what) {
            tokio::time::sleep(self.token(what)).await;
        }
    }

    /// The time after which the bucket gains one token.
    fn token(&self, what: What) -> Duration {
        Duration::from_secs(1) / self.limits(what).1
    }

    /// Waits until the tenant gets a time slice and has tokens.
    pub async fn slice(&self) -> Slice<'_> {
        let permit = self.slice.acquire().await.ok();
        loop {
            let now = clock::now();
            match self.wait(What::Messages, now) {
                Duration::ZERO => return self.begin(permit, now),
                wait => tokio::time::sleep(wait).await,
            }
        }
    }

    /// Begins a time slice immediately, even if the tenant has another slice or has no tokens. Use
    /// this only for work that other tenants wait for, and that is limited per tenant, and for the
    /// messages of a lock that is held over D-Bus.
    pub fn slice_at_once(&self) -> Slice<'_> {
        self.begin(None, clock::now())
    }

    fn begin<'a>(&'a self, permit: Option<SemaphorePermit<'a>>, now: Time) -> Slice<'a> {
        Slice { budget: self, ends: now.saturating_add(SLICE), spent: Cell::new(now), permit }
    }

    /// Time until the tenant has tokens again.
    fn wait(&self, what: What, now: Time) -> Duration {
        self.full(what).saturating_sub(now.saturating_add(BURST))
    }

    /// True if the tenant has used up its tokens.
    pub fn is_spent(&self) -> bool {
        !self.wait(What::Messages, clock::now()).is_zero()
    }

    fn spend(&self, what: What, tokens: u32, now: Time) {
        let mut full = self.full(what);
        *full = (*full).max(now).saturating_add(self.token(what).saturating_mul(tokens));
    }

    fn has_rested(&self, now: Time) -> bool {
        self.full.iter().all(|full| *full.lock().unwrap_or_else(PoisonError::into_inner) <= now)
    }
}

/// A tenant's time slice. Dropping it ends the slice.
#[derive(Debug)]
pub struct Slice<'a> {
    budget: &'a Budget,
    ends: Time,
    /// The last time at which tokens were spent.
    spent: Cell<Time>,
    permit: Option<SemaphorePermit<'a>>,
}

impl Slice<'_> {
    /// Spends `tokens`, or the cost of the time since the last call if that is higher. Returns true if the
    /// slice may continue.
    pub fn spend(&self, tokens: u32) -> bool {
        let now = clock::now();
        let time = now.saturating_sub(self.spent.replace(now));
        let of_time = u32::try_from(time.as_nanos() / TOKEN_TIME.as_nanos()).unwrap_or(u32::MAX);
        self.budget.spend(What::Messages, tokens.max(of_time), now);
        now < self.ends && (self.permit.is_none() || self.budget.wait(What::Messages, now).is_zero())
    }

    /// Ends the slice. The tenant gets its next slice only after the runtime has polled the tasks of other
    /// tenants.
    pub async fn end(self) {
        tokio::task::yield_now().await;
    }
}

/// A part of an amount. Dropping the value gives the part back.
#[derive(Debug)]
pub struct Share {
    budget: Arc<Budget>,
    what: What,
    amount: u32,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.budget.used(self.what).fetch_sub(self.amount, Relaxed);
        self.budget.returned.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PER_SECOND: u32 = What::Messages.limits(0).1;

    #[test]
    fn a_tenants_budget_is_shared_and_returned_on_drop() {
        let budgets = Budgets::new(2);
        let (one, other) = (budgets.of(&Tenant::User(1)), budgets.of(&Tenant::User(2)));
        let shares = [one.take(What::Clients, 1), one.take(What::Clients, 1)];
        assert!(shares.iter().all(Option::is_some) && one.take(What::Clients, 1).is_none());
        assert!(budgets.of(&Tenant::User(1)).take(What::Clients, 1).is_none(), "it is the same budget");
        assert!(other.take(What::Clients, 2).is_some());
        drop(shares);
        assert!(one.take(What::Clients, 2).is_some());
        let more = one.hold(What::Clients, 3);
        assert!(one.take(What::Clients, 1).is_none());
        drop(more);
        budgets.set_clients(5);
        assert!(one.take(What::Clients, 5).is_some());
        assert_eq!(budgets.of(&Tenant::Root).limit(What::Clients), 5 * ROOT_FACTOR);
        assert!(one.take(What::Imports, 1).is_some(), "another amount");
    }

    #[test]
    fn a_tenant_without_tokens_waits_even_after_reconnecting() {
        let budgets = Budgets::new(1);
        let budget = budgets.of(&Tenant::User(1));
        let now = clock::now();
        budget.spend(What::Messages, PER_SECOND, now);
        assert_eq!(budget.wait(What::Messages, now), Duration::ZERO, "a second's may come at once");
        budget.spend(What::Messages, PER_SECOND / 2, now);
        assert_eq!(budget.wait(What::Messages, now), Duration::from_millis(500));
        assert_eq!(budget.wait(What::Messages, now + Duration::from_millis(500)), Duration::ZERO);
        drop(budget);
        budgets.of(&Tenant::User(2)); // drops unused budgets
        assert_eq!(budgets.of(&Tenant::User(1)).wait(What::Messages, now), Duration::from_millis(500));
        let root = budgets.of(&Tenant::Root);
        let now = clock::now();
        root.spend(What::Messages, PER_SECOND * 2, now);
        assert_eq!(root.wait(What::Messages, now), Duration::ZERO);
    }

    #[test]
    fn the_bus_the_control_socket_and_the_programs_have_separate_limits() {
        let budgets = Budgets::new(1);
        let budget = budgets.of(&Tenant::User(1));
        let most = |what| (0..1000).map_while(|_| budget.take(what, 1)).collect::<Vec<_>>();
        let (on_bus, on_control) = (most(What::BusCalls), most(What::ControlCalls));
        assert_eq!([on_bus.len(), on_control.len(), most(What::BusQueries).len()], [32, 32, 2]);
        let begin = clock::now();
        let taken = (0..100_000).filter(|_| budget.take_token(What::BusCalls)).count();
        let most = 201 + (200.0 * (clock::now() - begin).as_secs_f64()) as usize;
        assert!((200..=most).contains(&taken), "{taken} of {most}");
        assert!(budget.take_token(What::ControlCalls) && !budget.is_spent());
        budget.spend(What::Messages, 2 * PER_SECOND, clock::now());
        assert!(budget.is_spent() && budget.take_token(What::ControlCalls));
        assert_eq!(budgets.of_caller(0).limit(What::BusCalls), 32 * ROOT_FACTOR);
        assert_eq!(budgets.of_caller(0).limit(What::Rooms), 4);
    }

    #[test]
    fn a_waiting_tenant_continues_when_a_share_is_returned() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let budget = Budgets::new(1).of(&Tenant::User(1));
            let mut held = vec![budget.hold(What::Helpers, 1), budget.hold(What::Helpers, 3)];
            let later = async {
                tokio::task::yield_now().await;
                held.pop();
            };
            let (share, ()) = tokio::join!(budget.wait_for(What::Helpers), later);
            assert_eq!(budget.left(What::Helpers), 2);
            drop(share);
        });
    }

    #[test]
    fn a_tenant_has_one_slice_at_a_time() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let budgets = Budgets::new(1);
            let (one, other) = (budgets.of(&Tenant::User(1)), budgets.of(&Tenant::User(2)));
            let slice = one.slice().await;
            let again = tokio::time::timeout(Duration::from_millis(20), one.slice());
            assert!(again.await.is_err(), "it has one already");
            drop(other.slice().await);
            assert!(slice.spend(1) || clock::now() >= slice.ends);
            drop(slice);
            drop(one.slice().await);
        });
    }
}
