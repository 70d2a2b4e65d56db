//! The bank of one GPU's bytes: what each client may have there ([`Account`]), and the sums over all of them ([`Bank`]).
//! Who is to get or to lose bytes is decided elsewhere.
//!
//! An account's *charge* is the most that its client can have mapped at this moment, whatever messages are still on
//! their way. Σ charge ≤ capacity is what makes a promise of bytes safe.

use super::{
    api::{ClientId, MemoryReport, Time, UserId},
    doubt::Doubt,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

/// No report counts for more bytes than this (16 TiB), so that sums of absurd reports cannot overflow.
const MOST: u64 = 1 << 44;
/// An eviction is asked for in steps, so that what is freed can be passed on while the rest is still being copied.
/// Chunks from 64 MiB on reach full speed; a step is some of them.
const STEP: u64 = 256 << 20;
const MOST_STEPS: u64 = 32;

/// An eviction that was asked for and not yet confirmed.
#[derive(Debug, Clone)]
pub(super) struct Eviction {
    pub seq: u32,
    pub since: Time,
    /// When it was asked for, or bytes last left.
    pub progress: Time,
    mapped: u64,
    swapped: u64,
}

/// What left in an eviction that was confirmed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Evicted {
    pub bytes: u64,
    /// Those of them whose contents are in the host now: what holds one value throughout need not be.
    pub contents: u64,
    pub time: Duration,
}

/// What one client may have on one GPU, and says it has.
#[derive(Debug, Clone, Default)]
pub(super) struct Account {
    pub allowance: u64,
    pub charge: u64,
    pub report: MemoryReport,
    pub eviction: Option<Eviction>,
    pub doubt: Doubt,
    seq: u32,
    /// Allowances that the client may still be acting on, newest last: every one is smaller than the one before it,
    /// because an earlier and smaller one never decides what can be mapped.
    steps: VecDeque<(u32, u64)>,
    /// Its share of the bank's sums.
    sums: Sums,
}

/// How an account's charge divides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Sums {
    charge: u64,
    /// Cannot leave: pinned, or the process is stopped, or it holds the lock and cannot drain.
    fixed: u64,
    /// On its way out.
    coming: u64,
    /// Could be evicted now, which is not so for a holder's bytes.
    evictable: u64,
    doubted: u64,
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
        report.mapped = report.mapped.min(MOST).max(report.pinned);
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
        self.charge = self.steps.front().map_or(0, |(_, b)| *b).max(self.allowance).max(report.mapped);
        if self.charge < before {
            self.doubt.fell(now, before);
        }
        let done = self.eviction.take_if(|e| e.seq <= report.ack)?;
        let bytes = done.mapped.saturating_sub(report.mapped);
        let contents = report.swapped.saturating_sub(done.swapped).min(bytes);
        Some(Evicted { bytes, contents, time: now.saturating_sub(done.since) })
    }

    /// Whether an allowance was ever sent.
    pub fn is_new(&self) -> bool {
        self.seq == 0
    }

    /// Bytes that an eviction could take beyond those that are on their way.
    pub fn movable(&self) -> u64 {
        self.allowance.saturating_sub(self.report.pinned)
    }

    fn divide(&self, stays: bool, idle_since: Option<Time>) -> Sums {
        let movable = if stays { 0 } else { self.movable() };
        let coming = if stays || self.eviction.is_none() {
            0
        } else {
            self.charge.saturating_sub(self.allowance.max(self.report.pinned))
        };
        let present = self.doubt.present();
        Sums {
            charge: self.charge.saturating_add(present),
            fixed: self.charge.saturating_sub(movable).saturating_sub(coming).saturating_add(present),
            coming,
            evictable: if idle_since.is_some() { movable } else { 0 },
            doubted: self.doubted(),
            last_run: idle_since.filter(|_| movable > 0),
        }
    }

    pub fn fixed(&self) -> u64 {
        self.sums.fixed
    }
}

/// The sums over all accounts of one GPU.
#[derive(Debug, Default)]
pub(super) struct Bank {
    pub charged: u64,
    pub fixed: u64,
    pub coming: u64,
    pub evictable: u64,
    /// In doubt, by the users whose clients say that it is gone.
    pub doubted: BTreeMap<UserId, u64>,
    /// Those with evictable bytes, least recently run first.
    pub lru: BTreeSet<(Time, ClientId)>,
    /// `fixed` fell since this was last cleared: who could not be served may be served now.
    pub loosened: bool,
}

impl Bank {
    /// Brings the sums up to date with an account. `stays`: nothing of it can leave now. `idle_since` is when it last
    /// ran, `None` for a holder.
    pub fn enter(
        &mut self,
        (client, user): (ClientId, UserId),
        account: &mut Account,
        stays: bool,
        idle_since: Option<Time>,
    ) {
        let new = account.divide(stays, idle_since);
        self.replace((client, user), account.sums, new);
        account.sums = new;
    }

    pub fn leave(&mut self, client: (ClientId, UserId), account: &Account) {
        self.replace(client, account.sums, Sums::default());
    }

    fn replace(&mut self, (client, user): (ClientId, UserId), old: Sums, new: Sums) {
        if old == new {
            return;
        }
        self.charged = self.charged + new.charge - old.charge;
        self.fixed = self.fixed + new.fixed - old.fixed;
        self.coming = self.coming + new.coming - old.coming;
        self.evictable = self.evictable + new.evictable - old.evictable;
        if old.doubted != new.doubted {
            let doubted = self.doubted.entry(user).or_default();
            *doubted = *doubted + new.doubted - old.doubted;
            self.doubted.retain(|_, bytes| *bytes > 0);
        }
        self.loosened |= new.fixed < old.fixed;
        if let Some(at) = old.last_run {
            self.lru.remove(&(at, client));
        }
        if let Some(at) = new.last_run {
            self.lru.insert((at, client));
        }
    }
}
