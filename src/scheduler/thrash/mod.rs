//! Tells when programs that run at the same moment push each other's memory off a GPU: one [`Detector`] a GPU, fed with
//! samples, in whatever time its caller has. What follows from it is in `traffic`.
//!
//! Thrashing is more demand than there is room for, and memory that moves both ways at the same time, for seconds. Each
//! alone is nothing wrong: memory that is never touched need not move, and programs copy both ways for reasons of their
//! own. Where the driver counts page faults, those decide, and what moves both ways only has to agree; where it does not,
//! more has to move. Where neither is known, nothing is claimed.

use crate::api::{Time, Traffic};
use std::time::Duration;

/// For how much longer there must have been signs of it than none before it is said, and none than signs before it is over.
/// Longer than the scheduler's own largest moves: an H200's memory is exchanged in three seconds.
const SUSTAINED: Duration = Duration::from_secs(4);
/// A sample stands for the time since the one before, if that is no longer ago: else nobody looked, since there was nothing
/// to see.
const STANDS_FOR: Duration = Duration::from_secs(3);
/// Who hears nothing that tells for so long claims nothing.
const SILENCE: Duration = Duration::from_secs(10);

/// In the direction that carries less: the part of what the link can carry from which it counts where faults are unknown,
/// and below which nothing does. Random faults move whole blocks, 64 KiB to 2 MiB, so that even slow thrashing keeps the link
/// busy: an H200's brings in 14 of 44 GiB/s at best, and its first limit is 1.4 GiB/s.
const BEGINS_AT: u64 = 32;
const ENDS_AT: u64 = 100;
/// What comes in pushes as much out, so one direction has no less than this part of the other. Copies one way show up in
/// the other as well, by the link's own packets: about a twentieth.
const BALANCE: u64 = 4;
/// Faults a second from which they count, and below which they do not. One brings in 4 KiB to 2 MiB.
const FAULTS: (u64, u64) = (1000, 250);

/// How long programs are then kept apart before they are tried together again: the first time, twice as long whenever it
/// began again soon, and at most. At first each of two has a turn of the default length.
const APART: (Duration, Duration) = (Duration::from_secs(60), Duration::from_secs(3600));
/// It began again soon if they had been together for less than this, or than they had been kept apart.
const SOON: Duration = Duration::from_secs(600);
/// While the scheduler has memory moved itself, what moves says nothing, for as long as it takes to move so many times what
/// the GPU holds: out and in, at half of the speed. At least for [`SUSTAINED`].
const EXCUSED: u64 = 4;

/// What was seen of a GPU.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sample {
    pub at: Time,
    pub traffic: Traffic,
    /// Bytes that those need together who run there at the same moment; 0 where nobody runs beside another.
    pub demand: u64,
    /// Bytes that there are for them.
    pub capacity: u64,
    /// Bytes a second that the link can carry each way.
    pub link: u64,
    /// The scheduler has memory moved there now.
    pub is_ordered: bool,
    /// Who is kept apart there takes turns; else nobody is, and it goes on.
    pub can_be_ended: bool,
}

/// What there is to say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    Begins,
    Ends,
}

/// How much a sample looks like it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Sign {
    /// It is none.
    None,
    /// It goes on, if it had begun.
    Weak,
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
    /// `None`: nothing is known.
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

    /// Bytes a second that move each way at the same time, if that is known.
    fn both_ways(&self) -> Option<u64> {
        let (to_gpu, from_gpu) = (self.traffic.to_gpu?, self.traffic.from_gpu?);
        let (less, more) = (to_gpu.min(from_gpu), to_gpu.max(from_gpu));
        Some(if less >= more / BALANCE { less } else { 0 })
    }

    /// How long it takes at most for the scheduler to move what it wants moved.
    fn longest_move(&self) -> Duration {
        let bytes = u128::from(self.capacity) * u128::from(EXCUSED);
        let millis = bytes * 1000 / u128::from(self.link.max(1));
        Duration::from_millis(u64::try_from(millis).unwrap_or(u64::MAX)).max(SUSTAINED)
    }
}

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub struct Detector {
    thrashes: bool,
    /// Signs less none, between 0 and [`SUSTAINED`].
    score: Duration,
    last: Option<Time>,
    /// When something was last known.
    known: Time,
    /// Since when the scheduler has had memory moved.
    ordered: Option<Time>,
    /// For how long they were last to be kept apart, and until when.
    apart: Duration,
    until: Time,
}

impl Detector {
    /// Takes a sample. Those from before the last one say nothing.
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

    /// Time has passed; see [`Self::deadline`].
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

    pub fn thrashes(&self) -> bool {
        self.thrashes
    }

    /// Whether nobody is to run beside another there, where turns can be taken.
    pub fn keeps_apart(&self, now: Time) -> bool {
        self.thrashes || now < self.until
    }

    /// When to look again, if no sample comes.
    pub fn deadline(&self, now: Time) -> Option<Time> {
        if self.thrashes {
            return Some(self.known.saturating_add(SILENCE));
        }
        Some(self.until).filter(|until| now < *until)
    }
}
