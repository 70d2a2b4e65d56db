//! One client's account on a GPU: its allowance, its charge, its reports, and the part of them that measurements
//! confirm.
//!
//! An account's *charge* is the most that its client can have mapped at this moment, whatever messages are in flight.

use super::verification::UnverifiedFrees;
use crate::api::{Found, MemoryReport, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// No report counts for more bytes than this (16 TiB), so that sums of absurd reports cannot overflow.
const MOST: u64 = 1 << 44;
/// The size of an eviction's steps: memory freed by one step is passed on while the next is still being copied. Copies
/// of chunks of 64 MiB and more run at full speed; a step is several of them.
const STEP: u64 = 256 << 20;
/// A report above the measured value is believed if it exceeds it by no more than one part in `SLACK_PART`, and by no
/// more than `SLACK`: a chunk may just have been mapped. Where nothing was measured nothing is added, or many clients
/// that have no memory would add up.
const SLACK_PART: u64 = 16;
const SLACK: u64 = 64 << 20;
/// The granularity of GPU memory: measurements may be lower than reports by this much.
const ROUNDING: u64 = 2 << 20;
/// How long a client that reconnects with memory waits for a measurement. After that it is allowed only what is free.
const UNMEASURED: Duration = Duration::from_secs(3);
/// An eviction without progress for this long counts as unanswered.
const SILENT: Duration = Duration::from_secs(1);
/// An eviction has no more steps than this.
const MOST_STEPS: u64 = 32;

/// An eviction that was requested and not yet confirmed.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Eviction {
    /// The allowance that completes it.
    pub seq: u32,
    pub since: Time,
    /// When it was requested, or bytes last left.
    pub progress: Time,
    /// Reported bytes when it was requested.
    mapped: u64,
    swapped: u64,
}

/// The bytes that left in a confirmed eviction, and how long it took.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Evicted {
    pub bytes: u64,
    /// The bytes whose contents were stored in host memory. Constant and unchanged chunks are not.
    pub contents: u64,
    pub time: Duration,
}

/// The bytes that one client may have on one GPU, and the bytes that it reports.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Account {
    pub allowance: u64,
    pub charge: u64,
    /// The newest report, as far as it is believed.
    pub report: MemoryReport,
    /// The mapped and the pinned bytes that the client reported, believed or not.
    claimed: (u64, u64),
    /// The most that the client was last measured to have mapped. `None`: it was never measured, and is believed.
    found: Option<u64>,
    /// The most that the client was ever measured to have mapped.
    seen: u64,
    /// When the client first reported memory.
    reported: Option<Time>,
    /// It has been measured since then, or the measurement timed out.
    is_checked: bool,
    /// Mapped and pinned bytes that the last measurement refuted: they are not worth another one.
    refuted: (u64, u64),
    pub eviction: Option<Eviction>,
    pub frees: UnverifiedFrees,
    seq: u32,
    /// Allowances that the client may still be acting on, newest last. Each is smaller than the one before it, because
    /// an earlier and smaller one never decides how much can be mapped.
    steps: VecDeque<(u32, u64)>,
    lapsed: Option<Lapsed>,
}

/// The allowance of a client that did not answer for long. The client is no longer charged for it, but may still act on
/// it when it continues, until it acknowledges a newer one.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Lapsed {
    /// The allowance to acknowledge.
    seq: u32,
    bytes: u64,
    /// When it reported again for the first time. Its earlier claims say nothing about the memory that it maps now.
    spoke: Option<Time>,
}

impl Account {
    /// Sets the allowance to `bytes`. Returns the messages to send: one, or several steps on the way down.
    pub fn set(&mut self, now: Time, bytes: u64) -> Vec<(u32, u64)> {
        // It may have mapped its last allowance without having reported that.
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
            self.eviction = None; // requested and cancelled
        }
        self.seq
    }

    /// Takes a report. Returns what left if it completes an eviction.
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
        // From the reported state the client can go on to any allowance from the acknowledged one on. Steps grow
        // smaller, so the first that remains is the largest.
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

    /// The highest allowance that the client may be acting on, whether or not it is charged for it.
    fn ever_allowed(&self) -> u64 {
        self.lapsed.map_or(0, |lapsed| lapsed.bytes).max(self.allowed())
    }

    /// The mapped and the pinned bytes that are believed. The client may have mapped its allowance since it was last
    /// measured; more counts only once it was measured, and so does pinned memory.
    fn believed(&self) -> (u64, u64) {
        let (mapped, pinned) = self.claimed;
        let verified = self.verified().unwrap_or(MOST);
        let lapsed = self.lapsed.filter(|lapsed| lapsed.spoke.is_some()).map_or(0, |lapsed| lapsed.bytes);
        (mapped.min(verified.max(self.frees.high(self.allowed().max(lapsed)))), pinned.min(verified))
    }

    /// The most that is believed on the strength of the last measurement: the measured bytes, plus a sixteenth (at most
    /// 64 MiB) for chunks mapped since and for rounding. `None`: never measured.
    fn verified(&self) -> Option<u64> {
        self.found.map(|bytes| bytes.saturating_add((bytes / SLACK_PART).min(SLACK)))
    }

    /// Whether the client reports more than is believed.
    pub fn is_disbelieved(&self) -> bool {
        self.claimed.0 > self.report.mapped.saturating_add(ROUNDING)
            || self.claimed.1 > self.report.pinned.saturating_add(ROUNDING)
    }

    /// Whether another measurement could confirm what the client reports.
    pub fn is_worth_measuring(&self) -> bool {
        self.is_disbelieved() && (self.claimed.0 > self.refuted.0 || self.claimed.1 > self.refuted.1)
    }

    /// Whether the client reconnected with memory that has not been measured yet.
    pub fn awaits_measurement(&self) -> bool {
        self.is_new() && self.is_disbelieved() && !self.is_checked
    }

    /// When waiting for that measurement ends; `None`: it is not waited for.
    pub fn measurement_is_late_at(&self) -> Option<Time> {
        self.reported.filter(|_| self.awaits_measurement()).map(|at| at + UNMEASURED)
    }

    /// Ends waiting for a measurement that is late: the report is believed as far as that is possible without one.
    pub fn measurement_is_late(&mut self, now: Time) {
        self.is_checked |= self.measurement_is_late_at().is_some_and(|at| at <= now);
    }

    /// Whether the client reports more than it was measured to have, within what it was allowed.
    pub fn is_overstated(&self) -> bool {
        self.verified().is_some_and(|most| self.report.mapped > most)
    }

    /// The mapped bytes that the client reported, believed or not.
    pub fn claimed(&self) -> u64 {
        self.claimed.0
    }

    /// The client's process is off its GPUs: it has nothing there, whatever it said. `verifies`: that will be measured.
    pub fn is_off(&mut self, verifies: bool) {
        (self.report.mapped, self.report.pinned, self.claimed, self.refuted) = (0, 0, (0, 0), (0, 0));
        (self.allowance, self.charge, self.eviction, self.frees) = (0, 0, None, UnverifiedFrees::default());
        self.steps.clear();
        self.found = verifies.then_some(0);
    }

    /// From now on, believes only what was allowed or measured.
    pub fn distrust(&mut self) {
        self.found.get_or_insert(0);
    }

    /// Takes a measurement that began no earlier than `begun`. `None`: it says nothing about this client.
    pub fn measured(&mut self, begun: Time, found: Option<Found>) {
        let most = self.ever_allowed().max(self.charge);
        self.frees.measured(begun, found.map(|found| found.least), self.charge, most);
        if let Some(found) = found {
            self.found = Some(found.most);
            self.is_checked |= self.claimed.0 > 0;
            self.refuted = self.claimed;
            // An honest client claims nothing that it has not mapped.
            let is_refuted = self.verified().is_some_and(|most| self.claimed.0 > most);
            self.lapsed.take_if(|lapsed| is_refuted && lapsed.spoke.is_some_and(|at| at <= begun));
            self.seen = self.seen.max(found.most.min(self.report.mapped));
        }
        (self.report.mapped, self.report.pinned) = self.believed();
        self.charge = self.allowed().max(self.report.mapped);
    }

    /// The bytes that a client which does not answer an eviction has, as far as is known; `None`: it makes progress, or
    /// has all that it is charged.
    pub fn unanswered(&self, now: Time) -> Option<u64> {
        let is_silent = self.eviction.as_ref().is_some_and(|eviction| eviction.progress + SILENT <= now);
        self.less_than_charged().filter(|_| is_silent)
    }

    /// The bytes that the client has, as far as is known; `None`: all that it is charged.
    pub fn less_than_charged(&self) -> Option<u64> {
        let has = self.verified().unwrap_or(self.report.mapped);
        (has < self.charge).then_some(has)
    }

    /// Lowers the charge to the allowance and the client's known memory. If the client maps more after all, that fails
    /// or is evicted.
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

    /// The fewest and the most bytes that the client can have mapped at this moment.
    ///
    /// Fewer unverified bytes than `ignored` are not counted: they are more likely a context that is larger than was
    /// measured.
    pub fn extent(&self, ignored: u64) -> (u64, u64) {
        let present = self.frees.present();
        let least = match self.eviction {
            Some(_) => self.report.mapped.min(self.allowance.max(self.report.pinned)),
            None => self.report.mapped,
        };
        // A client that has all that it needs maps nothing, whatever its allowance.
        let grows = self.report.demand > self.report.mapped || self.eviction.is_some();
        let most = if grows { self.charge } else { self.report.mapped };
        let unverified = Some(self.unverified()).filter(|bytes| *bytes > ignored).unwrap_or(0);
        let most = most.max(self.claimed.0).saturating_add(unverified);
        (least.saturating_add(present), most.saturating_add(present))
    }

    /// The client's demand as far as it was ever measured on the GPU; all of it where nothing is measured.
    pub fn seen_to_need(&self) -> u64 {
        self.found.map_or(self.report.demand, |_| self.report.demand.min(self.seen))
    }

    /// Bytes that the client has on the GPU, as far as is known, including those being evicted.
    pub fn in_use(&self) -> u64 {
        let bytes = if self.eviction.is_some() { self.charge } else { self.report.mapped };
        bytes.saturating_add(self.frees.present())
    }

    /// Bytes that the client may map beyond its demand.
    pub fn ahead(&self) -> u64 {
        self.allowance.saturating_sub(self.report.demand.max(self.report.mapped))
    }

    /// Whether no allowance was ever sent.
    pub fn is_new(&self) -> bool {
        self.seq == 0
    }

    /// Bytes that a further eviction could take.
    pub fn evictable(&self) -> u64 {
        self.allowance.saturating_sub(self.report.pinned)
    }

    pub fn unverified(&self) -> u64 {
        self.frees.unverified(self.charge)
    }

    /// When an unverified free, or waiting for a measurement, expires. `None`: there is neither.
    pub(crate) fn expires(&self) -> Option<Time> {
        self.frees.expires().into_iter().chain(self.measurement_is_late_at()).min()
    }
}
