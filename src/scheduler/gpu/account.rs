//! One client's account on a GPU: its allowance, its charge, its reported memory, and the part of
//! its reports that measurements confirm.
//!
//! The *allowance* is the number of bytes that the client may map. The *charge* is the most that
//! the client can have mapped at this moment, counting allowances whose messages are still in
//! flight.

use super::verification::UnverifiedFrees;
use crate::api::{Found, MemoryReport, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// The largest value that a report can claim (16 TiB). The cap keeps sums of absurd reports from
/// overflowing.
const MOST: u64 = 1 << 44;
/// The size of one step of an eviction. Memory freed by one step is given to other clients while
/// the next step is still being copied. Copies run at full speed from 64 MiB on, so a step is
/// several chunks of that size.
const STEP: u64 = 256 << 20;
/// A report may exceed the measurement because the client may just have mapped a chunk. The excess
/// is at most one part in `SLACK_PART` of the measured bytes, and at most `SLACK`. A measurement of
/// 0 bytes gets no slack: the slack of many clients without memory would add up.
const SLACK_PART: u64 = 16;
const SLACK: u64 = 64 << 20;
/// The granularity of GPU memory. A measurement may be lower than the report by this much.
const ROUNDING: u64 = 2 << 20;
/// How long a client that reconnects with memory waits for a measurement. After that time, the
/// client's allowance grows only as far as bytes are free, as for a client without memory.
const UNMEASURED: Duration = Duration::from_secs(3);
/// An eviction that frees nothing for this long counts as unanswered.
const SILENT: Duration = Duration::from_secs(1);
/// The maximum number of steps of an eviction.
const MOST_STEPS: u64 = 32;
/// The size of the library's largest chunks (`preload/src/memory/engine.rs`).
const CHUNK: u64 = 64 << 20;

/// An eviction that was requested but is not confirmed yet.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Eviction {
    /// The sequence number of the allowance whose acknowledgement completes the eviction.
    pub seq: u32,
    pub since: Time,
    /// When the eviction was requested or last freed bytes, whichever is later.
    pub progress: Time,
    /// Reported bytes when the eviction was requested.
    mapped: u64,
    swapped: u64,
}

/// The result of a confirmed eviction: the bytes evicted, and how long it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evicted {
    pub bytes: u64,
    /// Evicted bytes whose contents were stored in host memory. Chunks that consist of one repeated
    /// value, and chunks with a valid copy in host memory, are not stored.
    pub contents: u64,
    pub time: Duration,
}

/// One client's allowance on one GPU, and the memory that the client reports.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Account {
    pub allowance: u64,
    pub charge: u64,
    /// The newest report, with the mapped and pinned bytes reduced to the believed values.
    pub report: MemoryReport,
    /// The mapped and the pinned bytes that the newest report claims, believed or not.
    claimed: (u64, u64),
    /// The upper bound of the client's mapped bytes in the client's last measurement. `None`: the
    /// client was never measured, and the scheduler believes its reports.
    found: Option<u64>,
    /// The highest measured value of the client's mapped bytes.
    seen: u64,
    /// When the client first reported memory.
    reported: Option<Time>,
    /// The client was measured after it first reported memory, or the wait for that measurement
    /// timed out.
    is_checked: bool,
    /// The claimed mapped and pinned bytes at the last measurement. Only a claim of more bytes is
    /// worth another measurement.
    refuted: (u64, u64),
    /// Since when the allowance exceeds the measured memory. `None`: the last measurement found memory
    /// for the whole allowance, and the allowance was not raised since.
    unused: Option<Time>,
    /// Bytes that were taken from the allowance since the client last held the lock.
    taken: u64,
    pub eviction: Option<Eviction>,
    pub frees: UnverifiedFrees,
    seq: u32,
    /// Allowances that the client may still be applying, newest last, each smaller than the one
    /// before. A smaller allowance is dropped once a larger one supersedes it, because it no longer
    /// bounds the mapped bytes.
    steps: VecDeque<(u32, u64)>,
    lapsed: Option<Lapsed>,
}

/// An old allowance of a client that was unresponsive. The client is no longer charged for this
/// allowance. When the client continues, it may still apply the allowance until it acknowledges a
/// newer one.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Lapsed {
    /// The `seq` whose acknowledgement ends the lapsed allowance.
    seq: u32,
    bytes: u64,
    /// When the client first reported again. Earlier claims do not describe the memory that the
    /// client maps now.
    spoke: Option<Time>,
}

impl Account {
    /// Sets the allowance to `bytes`. Returns the messages to send: one, or several steps if the
    /// allowance falls.
    pub fn set(&mut self, now: Time, bytes: u64) -> Vec<(u32, u64)> {
        if bytes > self.allowance {
            self.unused.get_or_insert(now);
        }
        self.taken = self.taken.saturating_add(self.allowance.saturating_sub(bytes));
        // The client may have mapped its whole last allowance without reporting the memory yet.
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
            self.eviction = None; // the eviction was cancelled
        }
        self.seq
    }

    /// Handles a report. Returns the evicted bytes if the report completes an eviction.
    pub fn reported(&mut self, now: Time, mut report: MemoryReport) -> Option<Evicted> {
        report.demand = report.demand.min(MOST);
        report.pinned = report.pinned.min(MOST);
        report.swapped = report.swapped.min(MOST);
        self.claimed = (report.mapped.min(MOST).max(report.pinned), report.pinned);
        if self.claimed.0 > 0 {
            self.reported.get_or_insert(now);
        }
        report.ack = report.ack.min(self.seq).max(self.report.ack);
        self.lapsed.take_if(|lapsed| lapsed.seq <= report.ack);
        if let Some(lapsed) = &mut self.lapsed {
            lapsed.spoke.get_or_insert(now);
        }
        (report.mapped, report.pinned) = self.believed();
        if let Some(eviction) = self.eviction.as_mut().filter(|_| report.mapped < self.report.mapped) {
            eviction.progress = now;
        }
        self.report = report;
        // The client may be applying any allowance from the acknowledged one on. The allowances in
        // `steps` decrease, so the first remaining one is the largest.
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

    /// The highest allowance that the client may be applying.
    fn allowed(&self) -> u64 {
        self.steps.front().map_or(0, |(_, b)| *b).max(self.allowance)
    }

    /// The highest allowance that the client may be applying. Includes a lapsed allowance, for
    /// which the client is not charged.
    fn ever_allowed(&self) -> u64 {
        self.lapsed.map_or(0, |lapsed| lapsed.bytes).max(self.allowed())
    }

    /// The mapped and the pinned bytes that the scheduler believes. Mapped bytes are believed up to
    /// the allowance, because the client may have mapped them after its last measurement. Mapped
    /// bytes beyond the allowance, and pinned bytes, are believed only if they were measured.
    fn believed(&self) -> (u64, u64) {
        let (mapped, pinned) = self.claimed;
        let verified = self.verified().unwrap_or(MOST);
        let lapsed = self.lapsed.filter(|lapsed| lapsed.spoke.is_some()).map_or(0, |lapsed| lapsed.bytes);
        (mapped.min(verified.max(self.frees.high(self.allowed().max(lapsed)))), pinned.min(verified))
    }

    /// The most bytes that the last measurement supports: the measured value plus a sixteenth (at
    /// most 64 MiB). The addition covers rounding and chunks mapped after the measurement. `None`:
    /// the client was never measured.
    fn verified(&self) -> Option<u64> {
        self.found.map(|bytes| bytes.saturating_add((bytes / SLACK_PART).min(SLACK)))
    }

    /// Whether the client claims more than the scheduler believes.
    pub fn is_disbelieved(&self) -> bool {
        self.claimed.0 > self.report.mapped.saturating_add(ROUNDING)
            || self.claimed.1 > self.report.pinned.saturating_add(ROUNDING)
    }

    /// Whether another measurement could confirm the client's report.
    pub fn is_worth_measuring(&self) -> bool {
        self.is_disbelieved() && (self.claimed.0 > self.refuted.0 || self.claimed.1 > self.refuted.1)
    }

    /// Whether the client reconnected with memory that has not been measured yet.
    pub fn awaits_measurement(&self) -> bool {
        self.is_new() && self.is_disbelieved() && !self.is_checked
    }

    /// When the wait for the client's first measurement times out. `None`: the client does not wait
    /// for a measurement.
    pub fn measurement_is_late_at(&self) -> Option<Time> {
        self.reported.filter(|_| self.awaits_measurement()).map(|at| at + UNMEASURED)
    }

    /// Ends the wait for a late measurement. From then on, the report is believed as far as the
    /// allowance covers it.
    pub fn measurement_is_late(&mut self, now: Time) {
        self.is_checked |= self.measurement_is_late_at().is_some_and(|at| at <= now);
    }

    /// Whether the believed report exceeds the measured memory. Within its allowance, a client can
    /// report more than was measured and be believed.
    pub fn is_overstated(&self) -> bool {
        self.verified().is_some_and(|most| self.report.mapped > most)
    }

    /// Since when the client has not used all memory that it is allowed, as far as measurements show.
    pub fn unused_since(&self) -> Option<Time> {
        self.unused.filter(|_| self.verified().is_some_and(|most| most < self.allowance))
    }

    /// The mapped bytes that the client reported, believed or not.
    pub fn claimed(&self) -> u64 {
        self.claimed.0
    }

    /// The most mapped bytes that a measurement has shown.
    pub fn seen(&self) -> u64 {
        self.seen
    }

    /// Records that the client's process is off its GPUs and has no memory on them, whatever the
    /// client reported. `verifies`: the clients of this GPU are measured.
    pub fn is_off(&mut self, verifies: bool) {
        (self.report.mapped, self.report.pinned, self.claimed, self.refuted) = (0, 0, (0, 0), (0, 0));
        self.taken = self.taken.saturating_add(self.allowance);
        (self.allowance, self.charge, self.eviction, self.frees) = (0, 0, None, UnverifiedFrees::default());
        self.steps.clear();
        self.found = verifies.then_some(0);
    }

    /// Handles the end of the client's turn.
    pub fn has_run(&mut self) {
        self.taken = 0;
    }

    /// Bytes in host memory that the client restores before it can use the lock. At most the bytes that
    /// were taken back since its last turn: other bytes are only claimed to be missing, or were missing
    /// in that turn too, so that each turn restores some of them.
    ///
    /// Managed memory may exceed the GPU, and then also the allowance. Such a client runs once the
    /// allowance has no room for a whole chunk.
    pub fn returning(&self) -> u64 {
        let MemoryReport { demand, mapped, swapped, .. } = self.report;
        let room = self.allowance.saturating_sub(mapped);
        let lacks = match demand > self.allowance {
            true if room < CHUNK => 0,
            true => room,
            false => demand.saturating_sub(mapped),
        };
        lacks.min(swapped).min(self.taken)
    }

    /// Makes the account believe only memory that was allowed or measured.
    pub fn distrust(&mut self) {
        self.found.get_or_insert(0);
    }

    /// Handles a measurement that began no earlier than `begun`. `found` is `None` if the
    /// measurement says nothing about this client.
    pub fn measured(&mut self, begun: Time, found: Option<Found>) {
        let most = self.ever_allowed().max(self.charge);
        self.frees.measured(begun, found.map(|found| found.least), self.charge, most);
        if let Some(found) = found {
            self.found = Some(found.most);
            self.is_checked |= self.claimed.0 > 0;
            self.refuted = self.claimed;
            // An honest client claims only memory that it has mapped. So a refuted claim ends the
            // lapsed allowance.
            let is_refuted = self.verified().is_some_and(|most| self.claimed.0 > most);
            self.lapsed.take_if(|lapsed| is_refuted && lapsed.spoke.is_some_and(|at| at <= begun));
            self.seen = self.seen.max(found.most.min(self.report.mapped));
            match self.verified() >= Some(self.allowance) {
                true => drop(self.unused.take_if(|since| *since <= begun)),
                false => drop(self.unused.get_or_insert(begun)),
            }
        }
        (self.report.mapped, self.report.pinned) = self.believed();
        self.charge = self.allowed().max(self.report.mapped);
    }

    /// The known memory, in bytes, of a client that does not answer an eviction. `None`: the
    /// eviction progresses, or the client has all the memory that it is charged for.
    pub fn unanswered(&self, now: Time) -> Option<u64> {
        let is_silent = self.eviction.as_ref().is_some_and(|eviction| eviction.progress + SILENT <= now);
        self.less_than_charged().filter(|_| is_silent)
    }

    /// The client's known memory in bytes. `None`: the client has all the memory that it is charged
    /// for.
    pub fn less_than_charged(&self) -> Option<u64> {
        let has = self.verified().unwrap_or(self.report.mapped);
        (has < self.charge).then_some(has)
    }

    /// Lowers the charge to the allowance or the client's known memory, whichever is larger. If the
    /// client maps more than that, the mapping fails or the memory is evicted.
    pub fn charge_as_known(&mut self, now: Time) {
        self.lapsed = Some(Lapsed { seq: self.seq, bytes: self.ever_allowed(), spoke: None });
        self.steps.clear();
        self.steps.push_back((self.seq, self.allowance));
        (self.report.mapped, self.report.pinned) = self.believed();
        let before = std::mem::replace(&mut self.charge, self.allowance.max(self.report.mapped));
        if self.charge < before {
            self.frees.record_drop(now, before);
        }
    }

    /// The minimum and the maximum of the bytes that the client can have mapped at this moment.
    ///
    /// If the client has at most `ignored` unverified bytes, these bytes do not count: most likely
    /// they belong to a context that is larger than was measured.
    pub fn extent(&self, ignored: u64) -> (u64, u64) {
        let present = self.frees.present();
        let least = match self.eviction {
            Some(_) => self.report.mapped.min(self.allowance.max(self.report.pinned)),
            None => self.report.mapped,
        };
        // A client with all of its needed memory maps no more, even if its allowance is larger.
        let grows = self.report.demand > self.report.mapped || self.eviction.is_some();
        let most = if grows { self.charge } else { self.report.mapped };
        let unverified = Some(self.unverified()).filter(|bytes| *bytes > ignored).unwrap_or(0);
        let most = most.max(self.claimed.0).saturating_add(unverified);
        (least.saturating_add(present), most.saturating_add(present))
    }

    /// The client's demand, but at most its highest measured memory on the GPU. The whole demand if
    /// the client was never measured.
    pub fn seen_to_need(&self) -> u64 {
        self.found.map_or(self.report.demand, |_| self.report.demand.min(self.seen))
    }

    /// The client's known bytes on the GPU, including bytes being evicted.
    pub fn in_use(&self) -> u64 {
        let bytes = if self.eviction.is_some() { self.charge } else { self.report.mapped };
        bytes.saturating_add(self.frees.present())
    }

    /// Bytes that the client may map beyond its demand.
    pub fn ahead(&self) -> u64 {
        self.allowance.saturating_sub(self.report.demand.max(self.report.mapped))
    }

    /// Whether the client was never sent an allowance.
    pub fn is_new(&self) -> bool {
        self.seq == 0
    }

    /// Bytes that another eviction could free.
    pub fn evictable(&self) -> u64 {
        self.allowance.saturating_sub(self.report.pinned)
    }

    pub fn unverified(&self) -> u64 {
        self.frees.unverified(self.charge)
    }

    /// When the next unverified free, or the wait for a measurement, expires. `None`: neither is
    /// pending.
    pub(crate) fn expires(&self) -> Option<Time> {
        self.frees.expires().into_iter().chain(self.measurement_is_late_at()).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    /// An account with an allowance of 10 bytes, all of them mapped and measured.
    fn measured() -> Account {
        let mut account = Account::default();
        account.distrust();
        account.set(at(1), 10);
        assert_eq!(account.unused_since(), Some(at(1)));
        account.reported(at(2), MemoryReport { ack: 1, demand: 10, mapped: 10, ..MemoryReport::default() });
        account.measured(at(3), Some(Found { least: 10, most: 10 }));
        assert_eq!((account.charge, account.unused_since()), (10, None));
        account
    }

    #[test]
    fn memory_is_unused_since_the_first_raise_that_no_measurement_covers() {
        let mut account = measured();
        for (seconds, bytes) in [(4, 10), (5, 8), (6, 20), (7, 30)] {
            account.set(at(seconds), bytes);
        }
        assert_eq!(account.unused_since(), Some(at(6)));
    }

    #[test]
    fn a_lower_charge_leaves_the_difference_unverified() {
        let mut account = measured();
        account.charge_as_known(at(4));
        assert_eq!((account.charge, account.expires()), (10, None), "nothing was freed");
        account.set(at(5), 30);
        account.charge_as_known(at(6));
        assert_eq!((account.charge, account.unverified()), (30, 0), "it may map its allowance");
        account.set(at(7), 4);
        account.charge_as_known(at(8));
        assert_eq!((account.charge, account.unverified()), (10, 20), "it may have mapped the rest");
    }

    #[test]
    fn a_lapsed_allowance_ends_when_a_measurement_refutes_the_claim() {
        let mut account = Account::default();
        account.distrust();
        account.set(at(1), 20);
        account.set(at(2), 0);
        account.charge_as_known(at(3));
        assert_eq!(account.charge, 0);
        account.reported(at(4), MemoryReport { ack: 1, demand: 20, mapped: 15, ..MemoryReport::default() });
        for (begun, charge) in [(3, 15), (5, 0)] {
            account.measured(at(begun), Some(Found { least: 0, most: 0 }));
            assert_eq!(account.charge, charge, "measured at {begun} s");
        }
    }
}
