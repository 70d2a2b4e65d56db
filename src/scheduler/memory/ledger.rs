//! The ledger of one GPU's memory: an [`Account`] for each client, and the sums over all accounts, which follow every change of an
//! account. Other modules decide which client gains or loses bytes.
//!
//! Invariant: Σ charge ≤ capacity, so that an allowance can always be mapped.

use super::Account;
use crate::api::{ClientId, Time, UserId};
use std::collections::{BTreeMap, BTreeSet};

/// How an account's charge divides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
struct Sums {
    charge: u64,
    /// Cannot leave: pinned, or the process is stopped, or it holds the lock and cannot drain.
    unevictable: u64,
    /// On its way out.
    coming: u64,
    unverified: u64,
    last_run: Option<Time>,
}

impl Account {
    /// What of it cannot leave now.
    fn divide(&self, state: State) -> Sums {
        let evictable = if state == State::Unevictable { 0 } else { self.evictable() };
        let coming = if state == State::Unevictable || self.eviction.is_none() {
            0
        } else {
            self.charge.saturating_sub(self.allowance.max(self.report.pinned))
        };
        let present = self.frees.present();
        let idle_since = match state {
            State::Idle(since) => Some(since),
            State::Running | State::Unevictable => None,
        };
        Sums {
            charge: self.charge.saturating_add(present),
            unevictable: self.charge.saturating_sub(evictable).saturating_sub(coming).saturating_add(present),
            coming,
            unverified: self.unverified(),
            last_run: idle_since.filter(|_| evictable > 0),
        }
    }
}

/// Whether a client's memory can leave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum State {
    /// It holds the lock: its memory can leave once it has given that back.
    Running,
    /// It does not, since then.
    Idle(Time),
    /// Nothing of it can leave now.
    Unevictable,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Entry {
    user: UserId,
    state: State,
    account: Account,
    /// Its part of the sums.
    sums: Sums,
}

/// The accounts of one GPU, and their sums.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Ledger {
    accounts: BTreeMap<ClientId, Entry>,
    /// Σ charge, with what is there though its client says that it is gone.
    charged: u64,
    unevictable: u64,
    coming: u64,
    /// In doubt, by the users whose clients say that it is gone.
    unverified: BTreeMap<UserId, u64>,
    /// Those with evictable bytes, least recently run first.
    lru: BTreeSet<(Time, ClientId)>,
    /// `fixed` fell since this was last cleared: who could not be served may be served now.
    loosened: bool,
}

impl Ledger {
    /// Opens an account for a client of that user, which is idle.
    pub fn open(&mut self, now: Time, client: ClientId, user: UserId, account: Account) {
        let entry = Entry { user, state: State::Idle(now), account, sums: Sums::default() };
        self.accounts.insert(client, entry);
    }

    pub fn close(&mut self, client: ClientId) {
        if let Some(entry) = self.accounts.remove(&client) {
            self.replace((client, entry.user), entry.sums, Sums::default());
        }
    }

    pub fn account(&self, client: ClientId) -> Option<&Account> {
        Some(&self.accounts.get(&client)?.account)
    }

    /// Changes an account. The sums follow.
    pub fn change<R>(&mut self, client: ClientId, change: impl FnOnce(&mut Account) -> R) -> Option<R> {
        let result = change(&mut self.accounts.get_mut(&client)?.account);
        self.sum_up(client);
        Some(result)
    }

    /// Whether its memory can leave. The sums follow.
    pub fn set_state(&mut self, client: ClientId, state: State) {
        if let Some(entry) = self.accounts.get_mut(&client) {
            entry.state = state;
            self.sum_up(client);
        }
    }

    fn sum_up(&mut self, client: ClientId) {
        let Some(entry) = self.accounts.get_mut(&client) else { return };
        let (user, new) = (entry.user, entry.account.divide(entry.state));
        let old = std::mem::replace(&mut entry.sums, new);
        self.replace((client, user), old, new);
    }

    /// What of it cannot leave, of that client.
    pub fn unevictable_of(&self, client: ClientId) -> u64 {
        self.accounts.get(&client).map_or(0, |entry| entry.sums.unevictable)
    }

    pub fn charged(&self) -> u64 {
        self.charged
    }

    pub fn unevictable(&self) -> u64 {
        self.unevictable
    }

    pub fn coming(&self) -> u64 {
        self.coming
    }

    /// In doubt, of clients of others than that user.
    pub fn unverified_for(&self, user: UserId) -> u64 {
        let others = self.unverified.iter().filter(|(other, _)| **other != user);
        others.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Those with evictable bytes and when they last ran, the least recent first.
    pub fn eviction_order(&self) -> impl Iterator<Item = (Time, ClientId)> {
        self.lru.iter().copied()
    }

    pub fn is_loosened(&self) -> bool {
        self.loosened
    }

    /// Whether `fixed` fell since this was last called.
    pub fn take_loosened(&mut self) -> bool {
        std::mem::take(&mut self.loosened)
    }

    fn replace(&mut self, (client, user): (ClientId, UserId), old: Sums, new: Sums) {
        if old == new {
            return;
        }
        self.charged = self.charged + new.charge - old.charge;
        self.unevictable = self.unevictable + new.unevictable - old.unevictable;
        self.coming = self.coming + new.coming - old.coming;
        if old.unverified != new.unverified {
            let unverified = self.unverified.entry(user).or_default();
            *unverified = *unverified + new.unverified - old.unverified;
            self.unverified.retain(|_, bytes| *bytes > 0);
        }
        self.loosened |= new.unevictable < old.unevictable;
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

    /// Two clients of two users that have so much, none of it pinned.
    fn ledger(a: u64, b: u64) -> Ledger {
        let mut ledger = Ledger::default();
        for (client, user, bytes) in [(A, UserId(1), a), (B, UserId(2), b)] {
            ledger.open(at(client.0), client, user, Account::default());
            ledger.change(client, |account| account.set(at(10), bytes));
            report(&mut ledger, client, bytes, 0);
        }
        ledger
    }

    /// All that was sent has been carried out.
    fn report(ledger: &mut Ledger, client: ClientId, mapped: u64, pinned: u64) {
        let report = MemoryReport { ack: u32::MAX, demand: mapped, mapped, pinned, ..MemoryReport::default() };
        ledger.change(client, |account| account.reported(at(11), report));
    }

    #[test]
    fn the_sums_follow_the_accounts() {
        let mut ledger = ledger(5, 3);
        assert_eq!((ledger.charged(), ledger.unevictable(), ledger.coming()), (8, 0, 0));
        report(&mut ledger, B, 3, 2);
        assert_eq!((ledger.unevictable(), ledger.unevictable_of(A), ledger.unevictable_of(B)), (2, 0, 2));
        ledger.change(A, |account| account.set(at(12), 1));
        assert_eq!((ledger.charged(), ledger.coming()), (8, 4), "it may have all of it mapped still");
        report(&mut ledger, A, 1, 0);
        assert_eq!((ledger.charged(), ledger.coming()), (4, 0));
        assert_eq!(ledger.unverified_for(UserId(2)), 4, "that it has left is its word");
        assert_eq!(ledger.unverified_for(UserId(1)), 0);
        ledger.close(A);
        ledger.close(B);
        assert_eq!((ledger.charged(), ledger.unevictable(), ledger.unverified_for(UserId(2))), (0, 0, 0));
    }

    #[test]
    fn what_cannot_leave_is_fixed_until_it_can() {
        let mut ledger = ledger(5, 3);
        ledger.set_state(A, State::Unevictable);
        assert_eq!((ledger.unevictable(), ledger.take_loosened()), (5, false));
        ledger.set_state(A, State::Running);
        assert_eq!((ledger.unevictable(), ledger.take_loosened(), ledger.take_loosened()), (0, true, false));
    }

    #[test]
    fn those_that_ran_least_recently_are_evicted_first() {
        let mut ledger = ledger(5, 3);
        let order = |ledger: &Ledger| ledger.eviction_order().map(|(_, client)| client).collect::<Vec<_>>();
        assert_eq!(order(&ledger), [A, B]);
        ledger.set_state(A, State::Idle(at(20)));
        assert_eq!(order(&ledger), [B, A]);
        ledger.set_state(B, State::Running);
        assert_eq!(order(&ledger), [A], "one that runs is not idle");
    }
}
