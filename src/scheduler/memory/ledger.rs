//! The ledger of one GPU's memory: an [`Account`] for each client, and the sums over all accounts, which follow every change of an
//! account. Other modules decide which client gains or loses bytes.
//!
//! An account's *charge* is the most that its client can have mapped at this moment, whatever messages are in flight.
//! Invariant: Σ charge ≤ capacity, so that an allowance can always be mapped.

use crate::{
    api::{ClientId, Found, MemoryReport, Time, UserId},
    memory::verification::UnverifiedFrees,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// No report counts for more bytes than this (16 TiB), so that sums of absurd reports cannot overflow.
const MOST: u64 = 1 << 44;
/// An eviction is asked for in steps, so that what is freed can be passed on while the rest is still being copied.
/// Chunks from 64 MiB on reach full speed; a step is some of them.
const STEP: u64 = 256 << 20;
/// A report of more than was measured is believed up to this part of it, and up to so many bytes: a chunk that has just been
/// mapped. Where nothing was measured, nothing is added: many clients that have nothing would add up.
const SLACK_PART: u64 = 16;
const SLACK: u64 = 64 << 20;
/// Bytes that may be missing from a measurement: the granularity of GPU memory.
const ROUNDING: u64 = 2 << 20;
/// A client that comes back with memory is measured within this time, or has to make do with what is free.
const UNMEASURED: Duration = Duration::from_secs(3);
/// An eviction that has made no progress for so long is not answered.
const SILENT: Duration = Duration::from_secs(1);
const MOST_STEPS: u64 = 32;

/// An eviction that was asked for and not yet confirmed.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Eviction {
    pub seq: u32,
    pub since: Time,
    /// When it was asked for, or bytes last left.
    pub progress: Time,
    mapped: u64,
    swapped: u64,
}

/// What left in an eviction that was confirmed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evicted {
    pub bytes: u64,
    /// Those of them whose contents are in the host now: what holds one value throughout need not be.
    pub contents: u64,
    pub time: Duration,
}

/// What one client may have on one GPU, and says it has.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Account {
    pub allowance: u64,
    pub charge: u64,
    /// What is believed of its newest report.
    pub report: MemoryReport,
    /// What it reported to have mapped, and pinned of that.
    claimed: (u64, u64),
    /// The most that it was last measured to have mapped; `None`: it was never measured, and is believed.
    found: Option<u64>,
    /// The most that it was ever measured to have mapped.
    seen: u64,
    /// When it first reported to have memory.
    reported: Option<Time>,
    /// It was measured since then, or that took too long.
    is_checked: bool,
    /// What the last measurement refuted, of that kind: it is not worth another.
    refuted: (u64, u64),
    pub eviction: Option<Eviction>,
    pub frees: UnverifiedFrees,
    seq: u32,
    /// Allowances that the client may still be acting on, newest last: every one is smaller than the one before it,
    /// because an earlier and smaller one never decides what can be mapped.
    steps: VecDeque<(u32, u64)>,
}

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
    /// The allowances to send so that it ends at `bytes`: one, or several on the way down.
    pub fn set(&mut self, now: Time, bytes: u64) -> Vec<(u32, u64)> {
        // What it was allowed last it may have mapped without having said so.
        let start = if self.report.ack == self.seq { self.allowance.min(self.report.mapped) } else { self.allowance };
        let mut send = Vec::new();
        if bytes < self.allowance {
            let far = start.saturating_sub(bytes);
            let steps = far.div_ceil(STEP).clamp(1, MOST_STEPS);
            for i in 1..steps {
                send.push(start - far / steps * i);
            }
            let seq = self.seq.wrapping_add(send.len() as u32 + 1);
            let fresh =
                Eviction { seq, since: now, progress: now, mapped: self.report.mapped, swapped: self.report.swapped };
            self.eviction = Some(Eviction { seq, ..self.eviction.take().unwrap_or(fresh) });
        }
        send.push(bytes);
        self.allowance = bytes;
        send.into_iter().map(|bytes| (self.push(bytes), bytes)).collect()
    }

    fn push(&mut self, bytes: u64) -> u32 {
        self.seq = self.seq.wrapping_add(1);
        while self.steps.back().is_some_and(|(_, b)| *b <= bytes) {
            self.steps.pop_back();
        }
        self.steps.push_back((self.seq, bytes));
        self.charge = self.charge.max(bytes);
        if self.allowance >= self.charge {
            self.eviction = None; // asked for and called off
        }
        self.seq
    }

    /// Takes a report. If it confirms an eviction: what left.
    pub fn reported(&mut self, now: Time, mut report: MemoryReport) -> Option<Evicted> {
        report.demand = report.demand.min(MOST);
        report.pinned = report.pinned.min(MOST);
        report.swapped = report.swapped.min(MOST);
        self.claimed = (report.mapped.min(MOST).max(report.pinned), report.pinned);
        if self.claimed.0 > 0 {
            self.reported.get_or_insert(now);
        }
        (report.mapped, report.pinned) = self.believed();
        report.ack = report.ack.min(self.seq).max(self.report.ack);
        if let Some(eviction) = self.eviction.as_mut().filter(|_| report.mapped < self.report.mapped) {
            eviction.progress = now;
        }
        self.report = report;
        // From the state that it reports, it can go to any allowance from the acknowledged one on. Steps grow smaller,
        // so the first that remains is the largest.
        while self.steps.front().is_some_and(|(seq, _)| *seq < report.ack) {
            self.steps.pop_front();
        }
        let before = self.charge;
        self.charge = self.allowed().max(report.mapped);
        if self.charge < before {
            self.frees.record_drop(now, before);
        }
        let done = self.eviction.take_if(|e| e.seq <= report.ack)?;
        let bytes = done.mapped.saturating_sub(report.mapped);
        let contents = report.swapped.saturating_sub(done.swapped).min(bytes);
        Some(Evicted { bytes, contents, time: now.saturating_sub(done.since) })
    }

    /// The highest allowance that the client may be acting on.
    fn allowed(&self) -> u64 {
        self.steps.front().map_or(0, |(_, b)| *b).max(self.allowance)
    }

    /// What is believed of what it reports to have mapped, and pinned. What it was allowed it may have mapped since it was
    /// last measured; more counts only once it was measured, and so does all that is to stay.
    fn believed(&self) -> (u64, u64) {
        let (mapped, pinned) = self.claimed;
        let verified = self.verified().unwrap_or(MOST);
        (mapped.min(verified.max(self.frees.high(self.allowed()))), pinned.min(verified))
    }

    /// The most that it is believed to have mapped beyond what it was allowed since: what was found, and a sixteenth, at
    /// most 64 MiB, for what has been mapped since or is rounded up.
    fn verified(&self) -> Option<u64> {
        self.found.map(|bytes| bytes.saturating_add((bytes / SLACK_PART).min(SLACK)))
    }

    /// Whether it reports more than is believed.
    pub fn is_disbelieved(&self) -> bool {
        self.claimed.0 > self.report.mapped.saturating_add(ROUNDING)
            || self.claimed.1 > self.report.pinned.saturating_add(ROUNDING)
    }

    /// Whether another measurement may confirm what it reports.
    pub fn is_worth_measuring(&self) -> bool {
        self.is_disbelieved() && (self.claimed.0 > self.refuted.0 || self.claimed.1 > self.refuted.1)
    }

    /// A client that comes back with memory: what it has is not known before it is measured.
    pub fn awaits_measurement(&self) -> bool {
        self.is_new() && self.is_disbelieved() && !self.is_checked
    }

    /// When it is waited for no longer.
    pub fn measurement_is_late_at(&self) -> Option<Time> {
        self.reported.filter(|_| self.awaits_measurement()).map(|at| at + UNMEASURED)
    }

    /// No measurement has come in time: what it reports is believed as far as that can be known without.
    pub fn measurement_is_late(&mut self, now: Time) {
        self.is_checked |= self.measurement_is_late_at().is_some_and(|at| at <= now);
    }

    /// Whether it reports more than it was measured to have, though that was allowed.
    pub fn is_overstated(&self) -> bool {
        self.verified().is_some_and(|most| self.report.mapped > most)
    }

    /// What it reports to have mapped, believed or not.
    pub fn claimed(&self) -> u64 {
        self.claimed.0
    }

    /// From now on nothing is believed that was not allowed or measured.
    pub fn distrust(&mut self) {
        self.found.get_or_insert(0);
    }

    /// It was found to have so much at a moment that was not before `begun`; `None`: the measurement does not tell.
    pub fn measured(&mut self, begun: Time, found: Option<Found>) {
        self.frees.measured(begun, found.map(|found| found.least), self.charge);
        if let Some(found) = found {
            self.found = Some(found.most);
            self.is_checked |= self.claimed.0 > 0;
            self.refuted = self.claimed;
            self.seen = self.seen.max(found.most.min(self.report.mapped));
        }
        (self.report.mapped, self.report.pinned) = self.believed();
        self.charge = self.allowed().max(self.report.mapped);
    }

    /// What a client that does not answer an eviction has, as far as is known, if that is less than it is charged.
    pub fn unanswered(&self, now: Time) -> Option<u64> {
        let is_silent = self.eviction.as_ref().is_some_and(|eviction| eviction.progress + SILENT <= now);
        let has = self.verified().unwrap_or(self.report.mapped);
        (is_silent && has < self.charge).then_some(has)
    }

    /// Charges no more than its allowance and what it has. Should it map more after all, that fails or is evicted.
    pub fn charge_as_known(&mut self, now: Time) {
        self.steps.clear();
        self.steps.push_back((self.seq, self.allowance));
        let before = std::mem::replace(&mut self.charge, self.allowance.max(self.report.mapped));
        if self.charge < before {
            self.frees.record_drop(now, before);
        }
    }

    /// The fewest and the most bytes that it can have mapped at this moment.
    ///
    /// Fewer bytes in doubt than `ignored` are not counted: the context is larger than was measured rather than that.
    pub fn extent(&self, ignored: u64) -> (u64, u64) {
        let present = self.frees.present();
        let least = match self.eviction {
            Some(_) => self.report.mapped.min(self.allowance.max(self.report.pinned)),
            None => self.report.mapped,
        };
        // One that has all it needs maps nothing, whatever it may.
        let grows = self.report.demand > self.report.mapped || self.eviction.is_some();
        let most = if grows { self.charge } else { self.report.mapped };
        let unverified = Some(self.unverified()).filter(|bytes| *bytes > ignored).unwrap_or(0);
        let most = most.max(self.claimed.0).saturating_add(unverified);
        (least.saturating_add(present), most.saturating_add(present))
    }

    /// What it needs on the GPU, as far as it was ever seen to have it there; all that it reports, where nothing is measured.
    pub fn seen_to_need(&self) -> u64 {
        self.found.map_or(self.report.demand, |_| self.report.demand.min(self.seen))
    }

    /// Bytes that it has on the GPU, as far as is known: what is on its way out is there still.
    pub fn in_use(&self) -> u64 {
        let bytes = if self.eviction.is_some() { self.charge } else { self.report.mapped };
        bytes.saturating_add(self.frees.present())
    }

    /// Bytes that it may map and has no need for.
    pub fn ahead(&self) -> u64 {
        self.allowance.saturating_sub(self.report.demand.max(self.report.mapped))
    }

    /// Whether an allowance was ever sent.
    pub fn is_new(&self) -> bool {
        self.seq == 0
    }

    /// Bytes that an eviction could take beyond those that are on their way.
    pub fn evictable(&self) -> u64 {
        self.allowance.saturating_sub(self.report.pinned)
    }

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
