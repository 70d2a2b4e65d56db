//! One client's account on a GPU: its allowance, its charge, what it reports, and what measurements confirm of that.
//!
//! An account's *charge* is the most that its client can have mapped at this moment, whatever messages are in flight.

use super::verification::UnverifiedFrees;
use crate::api::{Found, MemoryReport, Time};
use std::collections::VecDeque;
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

    pub fn unverified(&self) -> u64 {
        self.frees.unverified(self.charge)
    }

    /// When there is something about it that no measurement is waited for any longer.
    pub(crate) fn expires(&self) -> Option<Time> {
        self.frees.expires().into_iter().chain(self.measurement_is_late_at()).min()
    }
}
