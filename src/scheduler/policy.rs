//! How long a turn lasts, how long a contended holder may be idle, and which of a user's clients stands before which: all
//! judgement is here.
//!
//! **Turns.** `on` gives everybody the full time quantum, as the original does. `auto` asks what a change of holder
//! costs. Where bytes must move it costs seconds, so the turn is the time quantum, and no less than some times what the move
//! takes. Where nothing must move it costs a drain, and what is left to decide is fairness: a holder keeps the GPU for twice what the waiter is expected to need.
//! Between equals that lets each run its phase to the end (two half-busy jobs then overlap perfectly); against a short
//! burst it ends a long turn soon. This is least-attained-service: what a client used up since it last ran out of work
//! is the best guess of what it still needs, because run times of bursts are heavy-tailed.
//!
//! Whom a rule lets go first (`shares`) waits for no turn to end, or for a short one; whom it lets go last waits until the
//! other has no work.
//!
//! Where so many wait that the last would wait too long, `auto` divides what it may wait among them.
//!
//! **Place in line**, among the clients of one user. Arrival order, except in `auto`, where a waiter's place is its arrival plus the *class* of what it
//! is going to take (its burst, and the moving of its bytes both ways), a class being a power of four. Short bursts so
//! pass long ones, equals stay in order of arrival, and ageing is built in: nobody is passed by one who came more
//! than a time quantum later. Moving counts, so one whose bytes are on the GPU goes before one whose bytes are not.
//!
//! **Grace** is what a move would cost: the longest that it can be right to wait idle. A client that knows its own pauses
//! waits less.

use super::{
    api::{AntiThrash, Settings, Time},
    shares::Standing,
    together::MEASURED,
};
use std::time::Duration;

/// The shortest turn in `auto`: strict turns of 20 ms cost about 5 % of throughput on an H200, of 50 ms about 1 %.
pub(super) const SHORTEST_TURN: Duration = Duration::from_millis(20);
/// Grace where a hand-over is free: longer than the gaps between launches of a busy program.
pub(super) const SHORTEST_GRACE: Duration = Duration::from_millis(1);
/// What a client's burst is taken to be before one was seen.
const FIRST_BURST: Duration = Duration::from_millis(50);
/// Bytes per second before an eviction was measured, where nothing is known of the link: half of what copies to registered
/// memory reach [H200].
pub(super) const FIRST_RATE: u64 = 24 << 30;
/// Bytes per second at which memory comes back then: what copies from registered memory reach [H200, PCIe 5].
pub(super) const RATE_BACK: u64 = 48 << 30;
/// A turn is no shorter than so many times what moving for the next one takes.
const MOVES_PER_TURN: u32 = 5;

/// The rate of evictions after another one was measured. What makes one slow (host memory that is made first, a busy
/// processor) says little of the next.
pub(super) fn smoothed(rate: u64, measured: u64) -> u64 {
    if measured > rate { rate / 2 + measured / 2 } else { rate / 4 * 3 + measured / 4 }
}

/// What a policy decides from.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Waiter {
    /// What it is to the holder, by the rules that both have.
    pub standing: Standing,
    /// How long it is expected to run until it has no work.
    pub burst: Duration,
    /// How long moving the bytes it lacks takes, both ways.
    pub moving: Duration,
    /// The same for all that it lacks, whoever gives it: a turn that ends sooner is for nothing.
    pub arrives: Duration,
    /// Whether bytes must leave the GPU before it can run.
    pub evicts: bool,
    /// How full it keeps the GPU was never seen: a short turn tells. And whether that is known of those who have it now.
    pub unmeasured: bool,
    pub holders_measured: bool,
    /// How many wait, itself included.
    pub waiters: u32,
}

impl Waiter {
    /// No turn is shorter: a hand-over costs too much.
    fn least(&self) -> Duration {
        let moves = if self.evicts { self.arrives.saturating_mul(MOVES_PER_TURN) } else { Duration::ZERO };
        moves.max(SHORTEST_TURN)
    }
}

/// The decisions that another policy (shares, weights) would take differently.
pub(super) trait Policy {
    /// How long a holder keeps the lock once that waiter waits.
    fn turn(&self, settings: &Settings, first: &Waiter) -> Duration;
    /// The waiter's place in line: the smaller, the earlier.
    fn place(&self, settings: &Settings, arrival: Time, waiter: &Waiter) -> Time;
    /// How long a contended holder may be idle before it gives the lock back, if that moves for so long.
    fn grace(&self, settings: &Settings, moving: Duration) -> Duration;
}

/// First come, first served, as the anti-thrash mode modifies it.
#[derive(Debug)]
pub(super) struct Fcfs;

impl Policy for Fcfs {
    fn turn(&self, settings: &Settings, first: &Waiter) -> Duration {
        match first.standing {
            Standing::Before => return Duration::ZERO,
            Standing::After => return Duration::MAX,
            Standing::Owed => return settings.slice().min(settings.time_quantum).max(first.least()),
            Standing::Equal if settings.anti_thrash != AntiThrash::Auto => return settings.time_quantum,
            Standing::Equal => {}
        }
        let quantum = if first.evicts {
            settings.time_quantum
        } else if first.unmeasured && first.holders_measured {
            SHORTEST_TURN // nothing more is to be learned of them, and perhaps both can run
        } else if first.unmeasured {
            MEASURED.min(settings.time_quantum)
        } else {
            (first.burst * 2).max(SHORTEST_TURN).min(settings.time_quantum)
        };
        let share = match settings.max_wait {
            Duration::ZERO => Duration::MAX,
            most => most / first.waiters.max(1),
        };
        quantum.min(share).max(first.least())
    }

    fn place(&self, settings: &Settings, arrival: Time, waiter: &Waiter) -> Time {
        match settings.anti_thrash {
            AntiThrash::Auto => {
                arrival.saturating_add(class(waiter.burst.saturating_add(waiter.moving)).min(settings.time_quantum))
            }
            AntiThrash::On | AntiThrash::Off => arrival,
        }
    }

    fn grace(&self, settings: &Settings, moving: Duration) -> Duration {
        moving.min(settings.time_quantum).max(SHORTEST_GRACE)
    }
}

/// The largest power of four milliseconds that is not longer.
fn class(length: Duration) -> Duration {
    let mut class = 1u64;
    while class < 1 << 30 && u128::from(class) * 4 <= length.as_millis() {
        class *= 4;
    }
    Duration::from_millis(class)
}

/// What is known of how long a client runs on a GPU between two times without work.
#[derive(Debug, Clone, Default)]
pub(super) struct Bursts {
    estimate: Option<Duration>,
    /// Run since it last had no work, over the turns that were cut short.
    attained: Duration,
    busy: Duration,
}

impl Bursts {
    pub fn expected(&self) -> Duration {
        self.expected_after(Duration::ZERO)
    }

    /// What would be expected if a turn of that length were cut short now.
    pub fn expected_after(&self, contended: Duration) -> Duration {
        self.attained.saturating_add(contended).max(self.estimate.unwrap_or(FIRST_BURST))
    }

    /// A turn ended. A holder that nobody waits for keeps the lock through idle times too, so of its uncontended time
    /// no more is counted than one burst.
    pub fn ran(&mut self, contended: Duration, uncontended: Duration, busy: Duration, idle: bool) {
        let usual = self.estimate.unwrap_or(FIRST_BURST);
        self.attained = self.attained.saturating_add(contended).saturating_add(uncontended.min(usual));
        self.busy = self.busy.saturating_add(busy);
        if idle {
            let sample = if self.busy.is_zero() { self.attained } else { self.attained.min(self.busy) };
            self.estimate = Some(self.estimate.map_or(sample, |e| e / 2 + sample / 2));
            self.attained = Duration::ZERO;
            self.busy = Duration::ZERO;
        }
    }
}
