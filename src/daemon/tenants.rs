//! Budgets of tenants: limits on each tenant's use of the scheduler. Budgets keep one tenant from
//! denying service to other tenants.
//!
//! - *Time slices*. A tenant's messages are read in slices of at most [`SLICE`]. Tenants with pending
//!   messages get one slice each in turn, regardless of their numbers of clients. So a message waits
//!   for at most one slice of each other tenant, however many messages the other tenants send.
//! - *Messages per second*, limited by a token bucket. A costly message takes several tokens. While a
//!   tenant has no tokens, the daemon does not read its messages. No message is lost: unread messages
//!   stay in the tenant's sockets.
//! - *Amounts*: clients, arrivals, open ranges of other clients' memory, GPUs that NVML does not list,
//!   and bytes that clients have not read. A [`Share`] is a part of an amount. Dropping it gives the
//!   part back.
//!
//! If all clients of a tenant disconnect, the tenant's bucket is kept until it would be full. So
//! reconnecting yields no tokens. The limits of root on the host are [`ROOT_FACTOR`] times as high.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::identity::Tenant;
use crate::scheduler::Time;
use crate::sys::clock;

/// Length of a slice. After this time, the slice ends once the message in progress has been handled.
const SLICE: Duration = Duration::from_micros(100);
/// Average number of messages that a tenant may send per second, and the maximum number in a burst. Two
/// clients that only take turns send about 8,000 messages per second.
const MESSAGES_PER_SECOND: u32 = 10_000;
/// Time on the scheduling loop that costs one token. A tenant with many clients has costly
/// messages. With [`MESSAGES_PER_SECOND`] tokens, such a tenant gets at most two fifths of the
/// loop's time.
const TOKEN_TIME: Duration = Duration::from_micros(40);
/// Limits of root on the host are this many times as high.
pub const ROOT_FACTOR: u32 = 8;

/// A resource with a limit for each tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
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
}

impl What {
    const COUNT: usize = 6;

    /// A tenant's limit on this resource. `clients`: the configured limit on clients.
    fn limit(self, clients: u32) -> u32 {
        match self {
            Self::Clients => clients,
            Self::Arrivals => clients.saturating_add(64),
            Self::Refusals => 32,
            Self::Imports => 4096,
            // The maximum number of GPUs that one client can attach.
            Self::Gpus => nvshare_wire::MAX_SLOTS,
            Self::Queued => 16 << 20,
        }
    }
}

/// The budgets of all tenants.
#[derive(Debug)]
pub struct Budgets {
    tenants: RefCell<BTreeMap<Tenant, Rc<Budget>>>,
    clients: Rc<Cell<u32>>,
}

impl Budgets {
    /// Creates budgets. `clients`: the limit on clients of each tenant.
    pub fn new(clients: u32) -> Self {
        Self { tenants: RefCell::default(), clients: Rc::new(Cell::new(clients)) }
    }

    /// Sets the limit on clients of each tenant. Clients beyond a lowered limit stay connected.
    pub fn set_clients(&self, clients: u32) {
        self.clients.set(clients);
    }

    /// The budget of a tenant.
    pub fn of(&self, tenant: &Tenant) -> Rc<Budget> {
        let mut tenants = self.tenants.borrow_mut();
        if let Some(budget) = tenants.get(tenant) {
            return budget.clone();
        }
        let now = clock::now();
        tenants.retain(|_, budget| Rc::strong_count(budget) > 1 || !budget.has_rested(now));
        let budget = Rc::new(Budget::new(tenant.clone(), self.clients.clone(), now));
        tenants.insert(tenant.clone(), budget.clone());
        budget
    }
}

/// The budget of one tenant.
#[derive(Debug)]
pub struct Budget {
    tenant: Tenant,
    clients: Rc<Cell<u32>>,
    used: [Cell<u32>; What::COUNT],
    slice: Semaphore,
    /// Time at which the token bucket is full again. Each message postpones this time by the time
    /// of one token.
    full: Cell<Time>,
}

impl Budget {
    fn new(tenant: Tenant, clients: Rc<Cell<u32>>, now: Time) -> Self {
        Self { tenant, clients, used: Default::default(), slice: Semaphore::new(1), full: Cell::new(now) }
    }

    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    fn factor(&self) -> u32 {
        if self.tenant == Tenant::Root { ROOT_FACTOR } else { 1 }
    }

    /// The tenant's limit on a resource.
    pub fn limit(&self, what: What) -> u32 {
        what.limit(self.clients.get()).saturating_mul(self.factor())
    }

    /// Takes part of an amount. `None` if that would exceed the limit.
    pub fn take(self: &Rc<Self>, what: What, amount: u32) -> Option<Share> {
        let is_there = self.used(what).get().saturating_add(amount) <= self.limit(what);
        is_there.then(|| self.hold(what, amount))
    }

    /// Takes part of an amount, even beyond the limit.
    pub fn hold(self: &Rc<Self>, what: What, amount: u32) -> Share {
        let used = self.used(what);
        used.set(used.get().saturating_add(amount));
        Share { budget: self.clone(), what, amount }
    }

    /// The part of the amount that is left.
    pub fn left(&self, what: What) -> u32 {
        self.limit(what).saturating_sub(self.used(what).get())
    }

    fn used(&self, what: What) -> &Cell<u32> {
        // The index is in range: the array has an element for each variant.
        self.used.get(what as usize).unwrap_or(&self.used[0])
    }

    /// The time after which the bucket gains one token.
    fn token(&self) -> Duration {
        Duration::from_secs(1) / MESSAGES_PER_SECOND.saturating_mul(self.factor())
    }

    /// Waits until the tenant gets a time slice and has tokens.
    pub async fn slice(&self) -> Slice<'_> {
        let permit = self.slice.acquire().await.ok();
        loop {
            let now = clock::now();
            match self.wait(now) {
                Duration::ZERO => return self.begin(permit, now),
                wait => tokio::time::sleep(wait).await,
            }
        }
    }

    /// Begins a time slice immediately, even if the tenant has another slice or has no tokens. Use
    /// this only for work that other tenants wait for, and that is limited per tenant.
    pub fn slice_at_once(&self) -> Slice<'_> {
        self.begin(None, clock::now())
    }

    fn begin<'a>(&'a self, permit: Option<SemaphorePermit<'a>>, now: Time) -> Slice<'a> {
        Slice { budget: self, ends: now.saturating_add(SLICE), spent: Cell::new(now), permit }
    }

    /// Time until the tenant has tokens again.
    fn wait(&self, now: Time) -> Duration {
        // The bucket has room for the tokens of one second.
        self.full.get().saturating_sub(now.saturating_add(Duration::from_secs(1)))
    }

    /// True if the tenant has used up its tokens.
    pub fn is_spent(&self) -> bool {
        !self.wait(clock::now()).is_zero()
    }

    fn spend(&self, tokens: u32, now: Time) {
        self.full.set(self.full.get().max(now).saturating_add(self.token().saturating_mul(tokens)));
    }

    fn has_rested(&self, now: Time) -> bool {
        self.full.get() <= now
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
        self.budget.spend(tokens.max(of_time), now);
        now < self.ends && (self.permit.is_none() || self.budget.wait(now).is_zero())
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
    budget: Rc<Budget>,
    what: What,
    amount: u32,
}

impl Drop for Share {
    fn drop(&mut self) {
        let used = self.budget.used(self.what);
        used.set(used.get().saturating_sub(self.amount));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        budget.spend(MESSAGES_PER_SECOND, now);
        assert_eq!(budget.wait(now), Duration::ZERO, "a second's may come at once");
        budget.spend(MESSAGES_PER_SECOND / 2, now);
        assert_eq!(budget.wait(now), Duration::from_millis(500));
        assert_eq!(budget.wait(now + Duration::from_millis(500)), Duration::ZERO);
        drop(budget);
        budgets.of(&Tenant::User(2)); // drops unused budgets
        assert_eq!(budgets.of(&Tenant::User(1)).wait(now), Duration::from_millis(500));
        let root = budgets.of(&Tenant::Root);
        let now = clock::now();
        root.spend(MESSAGES_PER_SECOND * 2, now);
        assert_eq!(root.wait(now), Duration::ZERO);
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
