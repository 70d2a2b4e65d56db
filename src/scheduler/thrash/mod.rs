//! Detects thrashing: programs that run at the same time and push each other's memory off a GPU. One [`Detector`] per
//! GPU is fed with samples, in the time of its caller. `settle::traffic` acts on the result.
//!
//! Thrashing is more demand than there is room for, together with memory that moves both ways at the same time, for
//! seconds. Neither alone is a problem: memory that is never touched need not move, and programs copy both ways for
//! reasons of their own. Where the driver counts page faults, they decide, and traffic both ways only has to agree;
//! where it does not, more traffic is needed. Where neither is known, nothing is detected.

use crate::api::{Time, Traffic};
use std::time::Duration;

/// By how much the time with signs must exceed the time without them before thrashing is reported, and the reverse
/// before it is reported as over. Longer than the scheduler's own largest moves: an H200's memory is exchanged in three
/// seconds.
const SUSTAINED: Duration = Duration::from_secs(4);
/// A sample stands for the time since the one before, if that is no longer ago than this. Otherwise the GPU was not
/// sampled, since there was nothing to see.
const STANDS_FOR: Duration = Duration::from_secs(3);
/// Without a conclusive sample for this long, thrashing is no longer reported.
const SILENCE: Duration = Duration::from_secs(10);

/// The traffic in the direction that carries less, as a part of what the link can carry: at least one in `BEGINS_AT` is
/// a sign where faults are unknown, and less than one in `ENDS_AT` never is. Random faults move whole blocks, 64 KiB to
/// 2 MiB, so even slow thrashing keeps the link busy: an H200's brings in 14 of 44 GiB/s at best, and its first limit
/// is 1.4 GiB/s.
const BEGINS_AT: u64 = 32;
const ENDS_AT: u64 = 100;
/// Memory that comes in pushes as much out, so each direction has at least this part of the other (a quarter). Copies
/// one way show up in the other direction as well, by the link's own packets: about a twentieth.
const BALANCE: u64 = 4;
/// Faults per second from which on they are a sign, and below which they are none. One brings in 4 KiB to 2 MiB.
const FAULTS: (u64, u64) = (1000, 250);

/// How long programs that thrashed take turns before they may run together again: the first time, and at most; it
/// doubles whenever thrashing begins again soon. The first gives each of two a turn of the default length.
const APART: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));
/// It began again soon if they had run together for less than this, or than they had taken turns before.
const SOON: Duration = Duration::from_secs(600);
/// Traffic while the scheduler itself moves memory is no sign, for the time that it takes to move this many times the
/// memory of the GPU (out and in, at half speed), and at least for [`SUSTAINED`].
const EXCUSED: u64 = 4;

/// A sample of one GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    pub at: Time,
    pub traffic: Traffic,
    /// Bytes that the clients need together that run at the same time; 0 where none runs beside another.
    pub demand: u64,
    /// Bytes that are there for them.
    pub capacity: u64,
    /// Bytes per second that the link can carry in each direction.
    pub link: u64,
    /// The scheduler is moving memory there itself.
    pub is_ordered: bool,
    /// Clients that are kept apart take turns (mode `auto`). Otherwise they go on as before.
    pub can_be_ended: bool,
}

/// A change of the detector's verdict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Clients thrash from now on.
    Begins,
    /// Clients thrash no longer.
    Ends,
}

/// How much a sample looks like thrashing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sign {
    /// Not at all.
    None,
    /// Thrashing goes on, if it had begun.
    Weak,
    /// Thrashing.
    Strong,
}

impl Sign {
    fn of(value: u64, (begins, ends): (u64, u64)) -> Self {
        match value {
            value if value >= begins => Self::Strong,
            value if value >= ends => Self::Weak,
            _ => Self::None,
        }
    }
}

impl Sample {
    /// The sign that the sample is; `None`: nothing is known.
    fn sign(&self) -> Option<Sign> {
        if self.demand <= self.capacity {
            return Some(Sign::None);
        }
        let least = self.link / ENDS_AT;
        let by_faults = self.traffic.faults.map(|faults| Sign::of(faults, FAULTS));
        match (by_faults, self.both_ways()) {
            (Some(faults), Some(rate)) => Some(faults.min(Sign::of(rate, (least, least)))),
            (Some(faults), None) => Some(faults),
            (None, Some(rate)) => Some(Sign::of(rate, (self.link / BEGINS_AT, least))),
            (None, None) => None,
        }
    }

    /// Bytes per second that move in both directions at the same time; `None`: unknown.
    fn both_ways(&self) -> Option<u64> {
        let (to_gpu, from_gpu) = (self.traffic.to_gpu?, self.traffic.from_gpu?);
        let (less, more) = (to_gpu.min(from_gpu), to_gpu.max(from_gpu));
        Some(if less >= more / BALANCE { less } else { 0 })
    }

    /// The longest time that moves of the scheduler itself take.
    fn longest_move(&self) -> Duration {
        let bytes = u128::from(self.capacity) * u128::from(EXCUSED);
        let millis = bytes * 1000 / u128::from(self.link.max(1));
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)).max(SUSTAINED)
    }
}

/// The detector of one GPU.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Detector {
    thrashes: bool,
    /// Time with signs less time without, between 0 and [`SUSTAINED`].
    score: Duration,
    last: Option<Time>,
    /// The time of the last conclusive sample.
    known: Time,
    /// Since when the scheduler has been moving memory.
    ordered: Option<Time>,
    /// For how long clients are to take turns, and until when.
    apart: Duration,
    until: Time,
}

impl Detector {
    /// Takes a sample. A sample that is older than the last one changes nothing.
    pub fn sample(&mut self, sample: &Sample) -> Option<Change> {
        let passed = self.last.map_or(Duration::ZERO, |last| sample.at.saturating_sub(last));
        let stands_for = if passed <= STANDS_FOR { passed } else { Duration::ZERO };
        self.score = self.score.saturating_sub(passed - stands_for);
        self.last = Some(sample.at.max(self.last.unwrap_or_default()));
        let since = sample.is_ordered.then(|| self.ordered.unwrap_or(sample.at));
        self.ordered = since;
        let is_excused = since.is_some_and(|since| sample.at.saturating_sub(since) < sample.longest_move());
        let Some(sign) = sample.sign().filter(|sign| *sign == Sign::None || !is_excused) else {
            return self.look(sample.at);
        };
        self.known = self.known.max(sample.at);
        let goes_on = if self.thrashes { Sign::Weak } else { Sign::Strong };
        self.score = match sign >= goes_on {
            true => (self.score + stands_for).min(SUSTAINED),
            false => self.score.saturating_sub(stands_for),
        };
        match self.thrashes {
            false if self.score == SUSTAINED => Some(self.begins(sample)),
            true if self.score.is_zero() => Some(self.ends()),
            _ => None,
        }
    }

    /// Looks again at the time of [`Self::deadline`].
    pub fn look(&mut self, now: Time) -> Option<Change> {
        let is_silent = self.thrashes && self.known.saturating_add(SILENCE) <= now;
        is_silent.then(|| self.ends())
    }

    fn begins(&mut self, sample: &Sample) -> Change {
        let (first, longest) = APART;
        let soon = self.until.saturating_add(self.apart.max(SOON));
        let is_again = !self.apart.is_zero() && sample.at < soon && sample.can_be_ended;
        self.apart = if is_again { (self.apart * 2).min(longest) } else { first };
        self.until = sample.at.saturating_add(self.apart);
        self.thrashes = true;
        Change::Begins
    }

    fn ends(&mut self) -> Change {
        self.thrashes = false;
        self.score = Duration::ZERO;
        Change::Ends
    }

    /// Whether clients thrash.
    pub fn thrashes(&self) -> bool {
        self.thrashes
    }

    /// Whether clients are to take turns on the GPU, in mode `auto`.
    pub fn keeps_apart(&self, now: Time) -> bool {
        self.thrashes || now < self.until
    }

    /// When to look again if no sample comes.
    pub fn deadline(&self, now: Time) -> Option<Time> {
        if self.thrashes {
            return Some(self.known.saturating_add(SILENCE));
        }
        Some(self.until).filter(|until| now < *until)
    }
}
