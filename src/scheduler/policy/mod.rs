//! How long a turn lasts, how long a contended holder may be idle, which of a party's clients stands before which, and whose
//! memory leaves first: all judgement is here. One trait ([`Policy`]), with a file for each answer to it; what they decide from
//! is here, and what is known of a client's past: its bursts here, its GPU time in `progress`.
//!
//! - `fcfs`: first come, first served, as the anti-thrash mode modifies it.
//! - `adaptive`: who has had least goes first.

mod adaptive;
mod fcfs;
mod history;
mod progress;
pub(crate) mod utilization;

pub(crate) use history::Histories;

use crate::api::{PolicyName, Settings, Time};
use crate::fairness::Precedence;
use std::fmt::Debug;
use std::time::Duration;

/// The shortest turn in `auto`: strict turns of 20 ms cost about 5 % of throughput on an H200, of 50 ms about 1 %.
pub(crate) const SHORTEST_TURN: Duration = Duration::from_millis(20);
/// Grace where a hand-over is free: longer than the gaps between launches of a busy program.
pub(crate) const SHORTEST_GRACE: Duration = Duration::from_millis(1);
/// A turn is no shorter than so many times what moving for the next one takes.
const MOVES_PER_TURN: u32 = 5;

/// What a policy decides from.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Waiter {
    /// What it is to the holder, by the rules that both have.
    pub precedence: Precedence,
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
    /// GPU time that it has had, beyond what it left to others; and since when it is at the level of that.
    pub had: Duration,
    pub entered: Time,
    /// Where it stands, and whether because it has waited for so long.
    pub rank: Time,
    pub aged: bool,
    /// It waits for several GPUs, or with others of a gang.
    pub several: bool,
}

impl Waiter {
    /// No turn is shorter: a hand-over costs too much.
    fn least(&self) -> Duration {
        let moves = if self.evicts { self.arrives.saturating_mul(MOVES_PER_TURN) } else { Duration::ZERO };
        moves.max(SHORTEST_TURN)
    }
}

/// What a policy decides from, of who has the GPU.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Runner {
    /// Where it would stand if it asked now.
    pub rank: Time,
    /// GPU time that it has had, this turn included, and for how much of this turn somebody has waited.
    pub had: Duration,
    pub waited: Duration,
    /// It has the GPU because it had waited for so long.
    pub aged: bool,
    /// It takes turns with who waits as two of one party.
    pub peer: bool,
    /// After how much more of it another party is to have the GPU, if one waits that shares it.
    pub others_after: Option<Duration>,
}

/// The decisions that one policy takes differently from another.
pub(crate) trait Policy: Debug + Sync {
    /// How long a holder keeps the lock once that waiter waits.
    fn turn(&self, settings: &Settings, holder: &Runner, first: &Waiter) -> Duration;
    /// The waiter's place in line among those of its party: the smaller, the earlier.
    fn place(&self, settings: &Settings, arrival: Time, waiter: &Waiter) -> Time;
    /// And among all parties, if its own has had its share until then, and has waited since.
    fn key_among_owners(&self, served: Time, rank: Time, joined: Time) -> Time;
    /// After how long it goes before all others of its party. None: its place sees to it.
    fn patience(&self, settings: &Settings, waiter: &Waiter) -> Option<Duration>;
    /// Whether users take turns as wholes, however many clients they have.
    fn users_take_turns(&self) -> bool;
    /// How long a contended holder may be idle before it gives the lock back, if that moves for so long.
    fn grace(&self, settings: &Settings, moving: Duration) -> Duration;
    /// For how long somebody who has not run for that long is taken not to run, where so many go before it; None: it does
    /// not wait. The longer, the sooner its memory leaves.
    fn rests(&self, settings: &Settings, idle: Duration, before: Option<u32>) -> Duration;
    /// Whether that depends on who goes before it.
    fn keeps_for_the_next(&self) -> bool;
}

pub(crate) fn named(name: PolicyName) -> &'static dyn Policy {
    match name {
        PolicyName::Fcfs => &fcfs::Fcfs,
        PolicyName::Adaptive => &adaptive::Adaptive,
    }
}
