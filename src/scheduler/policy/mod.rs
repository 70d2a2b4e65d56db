//! Policies: the length of a turn, the time that a contended holder may stay idle, the order of requests of one owner,
//! and the order of eviction. [`Policy`] is the trait; its decisions depend on [`Waiter`] and [`Holder`].
//!
//! - `fcfs`: first come, first served, as modified by the anti-thrash mode.
//! - `adaptive`: least attained service: clients that have used the least GPU time run first.
//! - `history`: the lengths of a client's bursts. `progress`: the GPU time that it has attained. `utilization`: how
//!   much of the time it keeps the GPU busy.

mod adaptive;
mod fcfs;
mod history;
mod progress;
pub(crate) mod utilization;

pub(crate) use history::History;

use crate::api::{PolicyName, Settings, Time};
use std::fmt::Debug;
use std::time::Duration;

/// The shortest turn in `auto`: strict turns of 20 ms cost about 5 % of throughput on an H200, of 50 ms about 1 %.
pub(crate) const SHORTEST_TURN: Duration = Duration::from_millis(20);
/// The grace where a hand-over moves no memory: longer than the gaps between launches of a busy program.
pub(crate) const SHORTEST_GRACE: Duration = Duration::from_millis(1);
/// Where memory must move, a turn lasts at least the first of these multiples of the time to move it, so that the GPU
/// works most of the time; in `auto`, it lasts the second, and up to the third if the waiting client needs long.
const MOVES_PER_TURN: (u32, u32, u32) = (5, 10, 15);
/// Lower bounds of the second and the third: where little memory moves, long bursts are not cut short.
const SHORTEST_MOVING_TURN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// The precedence of a waiting request over a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Precedence {
    /// The request does not wait for the turn to end, nor, in `auto`, for the holder to drain.
    Before,
    /// The request waits only for a short turn to end: its owner is below its minimum and the holder's is not, or both
    /// are interactive and the request's owner has used no more than its share.
    BelowMinimum,
    #[default]
    Equal,
    /// The request waits until the holder has no work, or is no longer below its minimum.
    After,
}

/// A waiting request, as policies see it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Waiter {
    /// Its precedence over the holder by the rules of both.
    pub precedence: Precedence,
    /// The expected time until it has no work.
    pub burst: Duration,
    /// The time to move the bytes that it lacks out and back in. For the first request in the queue, only bytes that
    /// have to come from holders are counted.
    pub moving: Duration,
    /// The time to move all bytes that it lacks out and back in. A turn that ends before they have arrived is wasted.
    pub arrives: Duration,
    /// Whether bytes must leave the GPU before it can run.
    pub evicts: bool,
    /// Its utilization is unknown, and a short turn would measure it; and whether the utilization of all holders is
    /// known.
    pub unmeasured: bool,
    pub holders_measured: bool,
    /// The number of requests in the queue, itself included.
    pub waiters: u32,
    /// The GPU time that it has attained, minus the time that it left to others, and since when it has been on that
    /// level.
    pub attained: Duration,
    pub level_since: Time,
    /// Its rank, and whether it precedes others because it has aged.
    pub rank: Time,
    pub aged: bool,
    /// It waits for several GPUs, or with other members of a gang.
    pub several: bool,
}

impl Waiter {
    /// The shortest turn of a holder that is worth the hand-over to this request.
    fn shortest_turn(&self) -> Duration {
        let moves = if self.evicts { self.arrives.saturating_mul(MOVES_PER_TURN.0) } else { Duration::ZERO };
        moves.max(SHORTEST_TURN)
    }

    /// The least and the most that a turn lasts in `auto`, before the time quantum and `max-wait` bound it, if memory
    /// has to move for this request: ten times the time of the move, so that it costs little, and up to fifteen times
    /// if this request is expected to need long, so that fewer bursts are cut short. It is no longer even if both
    /// clients always have work, since a computation cannot be distinguished from a server that always has requests,
    /// whose users wait. A holder with weight 0 is the exception: its rule says that no user waits.
    fn moving_turn(&self, holder: &Holder) -> (Duration, Duration) {
        let (_, least, most) = MOVES_PER_TURN;
        let worth = |moves, least: Duration| holder.exchange.saturating_mul(moves).max(least);
        // Once all bytes have arrived, the hand-over costs no more than a hand-over without a move.
        let least = if self.evicts { worth(least, SHORTEST_MOVING_TURN.0) } else { SHORTEST_TURN };
        if holder.batch { (Duration::MAX, Duration::MAX) } else { (least, worth(most, SHORTEST_MOVING_TURN.1)) }
    }
}

/// A holder, as policies see it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Holder {
    /// The rank that it would have if it requested the GPU now.
    pub rank: Time,
    /// The GPU time that it has attained, this turn included, and the part of this turn in which other clients waited.
    pub attained: Duration,
    pub waited: Duration,
    /// The time to move the bytes that the first waiting request lacked when it became the first, out and back in.
    pub exchange: Duration,
    /// The time to move all of its memory out and back in.
    pub fills: Duration,
    /// No user waits for its results: a rule gives it only time that no other client wants.
    pub batch: bool,
    /// It was granted the GPU because it had aged.
    pub aged: bool,
    /// The first waiting request has the same owner.
    pub same_owner: bool,
    /// How much longer it can run until another waiting owner should have the GPU. `None`: no other owner waits, or
    /// only the length of turns decides.
    pub other_owner_after: Option<Duration>,
}

/// The decisions in which policies differ.
pub(crate) trait Policy: Debug + Sync {
    /// How long a holder keeps the lock while `first` waits.
    fn turn(&self, settings: &Settings, holder: &Holder, first: &Waiter) -> Duration;
    /// The rank of a request that arrives at `arrival` among the requests of its owner: the smallest is served first.
    fn rank(&self, settings: &Settings, arrival: Time, waiter: &Waiter) -> Time;
    /// The key of a request among the requests of all owners, from its owner's finish tag (`served`), its own rank, and
    /// the time since which its owner has been waiting (`joined`).
    fn key_among_owners(&self, served: Time, rank: Time, joined: Time) -> Time;
    /// The time after which a waiting request goes before all other requests of its owner. `None`: never; its rank
    /// already bounds its wait.
    fn ages_after(&self, settings: &Settings, waiter: &Waiter) -> Option<Duration>;
    /// Whether tenants take turns regardless of their number of clients. Otherwise all clients without a share are one
    /// owner.
    fn tenants_take_turns(&self) -> bool;
    /// How long a contended holder may be idle before it releases the lock, if the hand-over moves memory for `moving`.
    fn grace(&self, settings: &Settings, moving: Duration) -> Duration;
    /// How long a client is expected to stay idle that has been idle for `idle` and has `before` requests ahead of its
    /// own (`None`: it is not waiting). The longer, the earlier its memory is evicted.
    fn expected_idle(&self, settings: &Settings, idle: Duration, before: Option<u32>) -> Duration;
    /// Whether [`Self::expected_idle`] depends on the position in the queue.
    fn evicts_by_queue(&self) -> bool;
}

pub(crate) fn named(name: PolicyName) -> &'static dyn Policy {
    match name {
        PolicyName::Fcfs => &fcfs::Fcfs,
        PolicyName::Adaptive => &adaptive::Adaptive,
    }
}
