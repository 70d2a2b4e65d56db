//! The ledger of one GPU's memory: the sums over the [`Account`]s of its clients, updated with
//! every change of an account. `sharing` decides which client gains or loses bytes.
//!
//! Invariant: Σ charge ≤ capacity, so that every allowance can be mapped. A measurement that lowers
//! the capacity can break the invariant. In that case the excess is evicted first.

use super::{Account, capacity::MOST};
use crate::api::{ClientId, TenantId, Time};
use std::collections::{BTreeMap, BTreeSet};

/// An account's contribution to the sums, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Sums {
    charge: u64,
    /// Bytes of the charge that cannot be evicted: the pinned bytes, or the whole charge if the
    /// account is [`Evictability::Unevictable`].
    unevictable: u64,
    /// Bytes that an eviction in progress will free.
    evicting: u64,
    unverified: u64,
    /// The reported demand.
    demand: u64,
    /// The demand, but at most the client's highest measured memory.
    need: u64,
    /// The client may map more than its demand.
    is_ahead: bool,
    /// When the client last ran. `None`: the client is not idle, or has no evictable bytes.
    last_run: Option<Time>,
}

impl Account {
    /// The account's contribution to the sums.
    fn divide(&self, state: Evictability) -> Sums {
        let evictable = if state == Evictability::Unevictable { 0 } else { self.evictable() };
        let evicting = if state == Evictability::Unevictable || self.eviction.is_none() {
            0
        } else {
            self.charge.saturating_sub(self.allowance.max(self.report.pinned))
        };
        let present = self.frees.present();
        let idle_since = match state {
            Evictability::Idle(since) => Some(since),
            Evictability::Running | Evictability::Unevictable => None,
        };
        Sums {
            charge: self.charge.saturating_add(present),
            unevictable: self.charge.saturating_sub(evictable).saturating_sub(evicting).saturating_add(present),
            evicting,
            unverified: self.unverified(),
            demand: self.report.demand.min(MOST),
            need: self.seen_to_need(),
            is_ahead: self.ahead() > 0,
            last_run: idle_since.filter(|_| evictable > 0),
        }
    }
}

/// Whether a client's memory can be evicted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Evictability {
    /// The client holds the lock. The client's memory can be evicted after the lock is released.
    Running,
    /// The client has not held the lock since this time.
    Idle(Time),
    /// None of the client's memory can be evicted at present.
    /// [`EvictionBlock`](crate::api::EvictionBlock) lists the reasons.
    Unevictable,
}

/// A client's account on one GPU, with its contribution to the ledger's sums. Only the ledger
/// changes an entry, so that the sums stay consistent.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Entry {
    tenant: TenantId,
    state: Evictability,
    account: Account,
    /// The entry's contribution to the ledger's sums.
    sums: Sums,
}

impl Entry {
    /// The account of a client that has been idle since `now`. The sums include the account from
    /// its first change on.
    pub fn new(now: Time, tenant: TenantId, account: Account) -> Self {
        Self { tenant, state: Evictability::Idle(now), account, sums: Sums::default() }
    }

    /// A copy of the account for another GPU, where the client has been idle since `now`.
    pub fn reopen(&self, now: Time) -> Self {
        Self::new(now, self.tenant, self.account.clone())
    }

    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Bytes of the charge that cannot be evicted.
    pub fn unevictable(&self) -> u64 {
        self.sums.unevictable
    }
}

/// The sums over the accounts of one GPU, in bytes.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Ledger {
    /// Σ charge, plus memory that clients reported as freed and that measurements still show.
    charged: u64,
    unevictable: u64,
    evicting: u64,
    /// Unverified frees of each tenant's clients.
    unverified: BTreeMap<TenantId, u64>,
    all_unverified: u64,
    /// Σ demand.
    demanded: u64,
    /// Clients with a need above 0, the smallest need first.
    needs: BTreeSet<(u64, ClientId)>,
    /// Clients that may map more than their demand.
    ahead: BTreeSet<ClientId>,
    /// Idle clients with evictable bytes, least recently run first.
    lru: BTreeSet<(Time, ClientId)>,
    /// `unevictable` has fallen since this flag was cleared, so blocked requests may now fit.
    unevictable_fell: bool,
}

impl Ledger {
    /// Removes an account from the sums.
    pub fn close(&mut self, client: ClientId, entry: &Entry) {
        self.replace((client, entry.tenant), entry.sums, Sums::default());
    }

    /// Changes an account and updates the sums. Returns the result of `change`.
    pub fn change<R>(&mut self, client: ClientId, entry: &mut Entry, change: impl FnOnce(&mut Account) -> R) -> R {
        let result = change(&mut entry.account);
        self.sum_up(client, entry);
        result
    }

    /// Sets whether a client's memory can be evicted, and updates the sums.
    pub fn set_state(&mut self, client: ClientId, entry: &mut Entry, state: Evictability) {
        entry.state = state;
        self.sum_up(client, entry);
    }

    fn sum_up(&mut self, client: ClientId, entry: &mut Entry) {
        let new = entry.account.divide(entry.state);
        let old = std::mem::replace(&mut entry.sums, new);
        self.replace((client, entry.tenant), old, new);
    }

    pub fn charged(&self) -> u64 {
        self.charged
    }

    pub fn unevictable(&self) -> u64 {
        self.unevictable
    }

    pub fn evicting(&self) -> u64 {
        self.evicting
    }

    /// Unverified frees of all clients.
    pub fn unverified(&self) -> u64 {
        self.all_unverified
    }

    /// Unverified frees of all clients that do not belong to `tenant`.
    pub fn unverified_for(&self, tenant: TenantId) -> u64 {
        self.all_unverified - self.unverified.get(&tenant).copied().unwrap_or(0)
    }

    /// Σ demand, as clients report it.
    pub fn demanded(&self) -> u64 {
        self.demanded
    }

    /// The clients with a need of at least 1 byte and at most `bytes`, with their needs. The
    /// largest need is first.
    pub fn needs_up_to(&self, bytes: u64) -> impl Iterator<Item = (u64, ClientId)> {
        self.needs.range(..=(bytes, ClientId(u64::MAX))).rev().copied()
    }

    /// The clients that may map more than their demand.
    pub fn ahead(&self) -> impl Iterator<Item = ClientId> {
        self.ahead.iter().copied()
    }

    /// Idle clients with evictable bytes and the time when each last ran, least recently run first.
    pub fn eviction_order(&self) -> impl Iterator<Item = (Time, ClientId)> {
        self.lru.iter().copied()
    }

    /// Whether `unevictable` fell since [`Self::take_unevictable_fell`] was last called.
    pub fn unevictable_fell(&self) -> bool {
        self.unevictable_fell
    }

    /// Returns and clears `unevictable_fell`.
    pub fn take_unevictable_fell(&mut self) -> bool {
        std::mem::take(&mut self.unevictable_fell)
    }

    fn replace(&mut self, (client, tenant): (ClientId, TenantId), old: Sums, new: Sums) {
        if old == new {
            return;
        }
        self.charged = self.charged + new.charge - old.charge;
        self.unevictable = self.unevictable + new.unevictable - old.unevictable;
        self.evicting = self.evicting + new.evicting - old.evicting;
        self.demanded = self.demanded + new.demand - old.demand;
        if old.unverified != new.unverified {
            let unverified = self.unverified.entry(tenant).or_default();
            *unverified = *unverified + new.unverified - old.unverified;
            if *unverified == 0 {
                self.unverified.remove(&tenant);
            }
            self.all_unverified = self.all_unverified + new.unverified - old.unverified;
        }
        if old.need != new.need {
            self.needs.remove(&(old.need, client));
            if new.need > 0 {
                self.needs.insert((new.need, client));
            }
        }
        if new.is_ahead {
            self.ahead.insert(client);
        } else if old.is_ahead {
            self.ahead.remove(&client);
        }
        self.unevictable_fell |= new.unevictable < old.unevictable;
        if let Some(at) = old.last_run {
            self.lru.remove(&(at, client));
        }
        if let Some(at) = new.last_run {
            self.lru.insert((at, client));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::MemoryReport;
    use std::time::Duration;

    const A: ClientId = ClientId(1);
    const B: ClientId = ClientId(2);

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    /// Two clients of two tenants, with `a` and `b` bytes, none of them pinned.
    fn ledger(a: u64, b: u64) -> (Ledger, Entry, Entry) {
        let mut ledger = Ledger::default();
        let [a, b] = [(A, TenantId(1), a), (B, TenantId(2), b)].map(|(client, tenant, bytes)| {
            let mut entry = Entry::new(at(client.0), tenant, Account::default());
            ledger.change(client, &mut entry, |account| account.set(at(10), bytes));
            report(&mut ledger, client, &mut entry, bytes, 0);
            entry
        });
        (ledger, a, b)
    }

    /// A report that acknowledges all allowances.
    fn report(ledger: &mut Ledger, client: ClientId, entry: &mut Entry, mapped: u64, pinned: u64) {
        let report = MemoryReport { ack: u32::MAX, demand: mapped, mapped, pinned, ..MemoryReport::default() };
        ledger.change(client, entry, |account| account.reported(at(11), report));
    }

    #[test]
    fn the_sums_match_the_accounts() {
        let (mut ledger, mut a, mut b) = ledger(5, 3);
        assert_eq!((ledger.charged(), ledger.unevictable(), ledger.evicting()), (8, 0, 0));
        report(&mut ledger, B, &mut b, 3, 2);
        assert_eq!((ledger.unevictable(), a.unevictable(), b.unevictable()), (2, 0, 2));
        ledger.change(A, &mut a, |account| account.set(at(12), 1));
        assert_eq!((ledger.charged(), ledger.evicting()), (8, 4), "all of it may still be mapped");
        report(&mut ledger, A, &mut a, 1, 0);
        assert_eq!((ledger.charged(), ledger.evicting()), (4, 0));
        assert_eq!(ledger.unverified_for(TenantId(2)), 4, "no measurement has confirmed it");
        assert_eq!(ledger.unverified_for(TenantId(1)), 0);
        assert_eq!(ledger.needs_up_to(4).collect::<Vec<_>>(), [(3, B), (1, A)]);
        assert_eq!((ledger.needs_up_to(2).next(), ledger.ahead().next()), (Some((1, A)), None));
        ledger.change(B, &mut b, |account| account.set(at(13), 4));
        assert_eq!(ledger.ahead().collect::<Vec<_>>(), [B]);
        ledger.close(A, &a);
        ledger.close(B, &b);
        assert_eq!((ledger.needs_up_to(9).next(), ledger.ahead().next()), (None, None));
        assert_eq!((ledger.charged(), ledger.unevictable(), ledger.unverified_for(TenantId(2))), (0, 0, 0));
    }

    #[test]
    fn unevictable_memory_counts_until_it_is_evictable() {
        let (mut ledger, mut a, _) = ledger(5, 3);
        ledger.set_state(A, &mut a, Evictability::Unevictable);
        assert_eq!((ledger.unevictable(), ledger.take_unevictable_fell()), (5, false));
        ledger.set_state(A, &mut a, Evictability::Running);
        assert_eq!(
            (ledger.unevictable(), ledger.take_unevictable_fell(), ledger.take_unevictable_fell()),
            (0, true, false)
        );
    }

    #[test]
    fn least_recently_run_clients_are_evicted_first() {
        let (mut ledger, mut a, mut b) = ledger(5, 3);
        let order = |ledger: &Ledger| ledger.eviction_order().map(|(_, client)| client).collect::<Vec<_>>();
        assert_eq!(order(&ledger), [A, B]);
        ledger.set_state(A, &mut a, Evictability::Idle(at(20)));
        assert_eq!(order(&ledger), [B, A]);
        ledger.set_state(B, &mut b, Evictability::Running);
        assert_eq!(order(&ledger), [A], "a running client is not idle");
    }
}
