//! Policies decide the length of a turn, the order of one owner's requests, and the order of
//! eviction. The decisions of the trait [`Policy`] depend on [`Waiter`] and [`Holder`]. The time for
//! which a contended holder may stay idle is the same under every policy ([`grace`]).
//!
//! - `fcfs`: first come, first served, modified by the anti-thrash mode.
//! - `adaptive`: least attained service: clients that have used the least GPU time run first.
//! - `history`: the lengths of a client's bursts.
//! - `progress`: the GPU time that a client has attained.
//! - `utilization`: the part of the time in which a client keeps the GPU busy.

mod adaptive;
mod fcfs;
mod history;
mod progress;
pub(crate) mod utilization;

pub(crate) use history::History;

use crate::api::{PolicyName, Settings, Time};
use std::fmt::Debug;
use std::time::Duration;

/// The shortest turn in `auto`. On an H200, strict turns of 20 ms cost about 5 % of throughput, and
/// turns of 50 ms about 1 %.
pub(crate) const SHORTEST_TURN: Duration = Duration::from_millis(20);
/// The grace if a hand-over does not move memory: longer than the gaps between launches of a busy
/// program.
pub(crate) const SHORTEST_GRACE: Duration = Duration::from_millis(1);
/// The length of a turn if memory must move, in multiples of the time of the move. The first is the
/// minimum, so that the GPU works most of the time. In `auto`, a turn lasts the second multiple,
/// and up to the third if the waiting client needs a long time.
const MOVES_PER_TURN: (u32, u32, u32) = (5, 10, 15);
/// Lower bounds of turns of the second and third multiple, so that long bursts finish if little
/// memory moves.
const SHORTEST_MOVING_TURN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(5));

/// The precedence of a waiting request over a holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Precedence {
    /// The request does not wait for the turn to end. In `auto`, it does not wait for the holder to
    /// drain either.
    Before,
    /// The request waits only for a short turn to end. Either its owner is below its minimum and
    /// the holder's owner is not, or both owners are interactive and the request's owner has used
    /// no more than its share.
    BelowMinimum,
    #[default]
    Equal,
    /// The request waits until the holder runs out of work or the holder's owner has used its
    /// minimum.
    After,
}

/// A waiting request, as policies see it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Waiter {
    /// The request's precedence over the holder, by the rules of both.
    pub precedence: Precedence,
    /// The expected time until the client runs out of work.
    pub burst: Duration,
    /// None of the request's clients has ended a burst on the GPU.
    pub is_first_burst: bool,
    /// The time to move the request's missing bytes out and back in. For the first request in the
    /// queue, only bytes that holders must give up are counted.
    pub moving: Duration,
    /// The time to move all of the request's missing bytes out and back in. A turn that ends before
    /// these bytes have arrived is wasted.
    pub arrives: Duration,
    /// Whether bytes must leave the GPU before the request can be granted.
    pub evicts: bool,
    /// Whether the client's utilization is unknown and a short turn would measure it. The next
    /// field tells whether the utilization of all holders is known.
    pub unmeasured: bool,
    pub holders_measured: bool,
    /// The number of requests in the queue, including this request.
    pub waiters: u32,
    /// The GPU time that the client has attained, minus the time that it left to other clients. The
    /// next field is the time when the client reached its level.
    pub attained: Duration,
    pub level_since: Time,
    /// The request's rank. The next field tells whether the request has aged.
    pub rank: Time,
    pub aged: bool,
    /// The request wants several GPUs, or waits with other members of a gang.
    pub several: bool,
}

impl Waiter {
    /// The shortest turn of a holder that is worth the hand-over to this request.
    fn shortest_turn(&self) -> Duration {
        let moves = if self.evicts { self.arrives.saturating_mul(MOVES_PER_TURN.0) } else { Duration::ZERO };
        moves.max(SHORTEST_TURN)
    }

    /// The least and greatest length of a turn in `auto` if memory must move for this request. The
    /// time quantum and `max-wait` then bound the turn.
    ///
    /// The least length is ten times the time of the move, so that the move costs little. If this
    /// request is expected to run long, the turn lasts up to fifteen times that time, so that fewer
    /// bursts are interrupted. Turns are not longer even for two clients that always have work,
    /// because the scheduler cannot distinguish a computation from a server that always has
    /// requests and whose users wait. A holder with weight 0 is the exception: by its rule, no user
    /// waits for its results.
    fn moving_turn(&self, holder: &Holder) -> (Duration, Duration) {
        let (_, least, most) = MOVES_PER_TURN;
        let worth = |moves, least: Duration| holder.exchange.saturating_mul(moves).max(least);
        // After all bytes have arrived, the hand-over costs no more than a hand-over without a
        // move.
        let least = if self.evicts { worth(least, SHORTEST_MOVING_TURN.0) } else { SHORTEST_TURN };
        if holder.batch { (Duration::MAX, Duration::MAX) } else { (least, worth(most, SHORTEST_MOVING_TURN.1)) }
    }
}

/// A holder, as policies see it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Holder {
    /// The rank that the holder would have if it requested the GPU now.
    pub rank: Time,
    /// The GPU time that the holder has attained, including this turn. `waited` is the contended
    /// part of this turn.
    pub attained: Duration,
    pub waited: Duration,
    /// The expected length of the holder's burst, which is at least its GPU time before this turn.
    /// The next field tells whether the holder has not ended a burst on the GPU yet.
    pub burst: Duration,
    pub is_first_burst: bool,
    /// The time to move out and back in the bytes that the first waiting request lacked when it
    /// became the first.
    pub exchange: Duration,
    /// The time to move all of the holder's memory out and back in.
    pub fills: Duration,
    /// No user waits for the holder's results: by its rule, it runs only while no other client
    /// wants the GPU.
    pub batch: bool,
    /// The holder was granted the GPU because it had aged.
    pub aged: bool,
    /// The first waiting request has the same owner.
    pub same_owner: bool,
    /// How much longer the holder can run until another waiting owner should have the GPU. `None`:
    /// no other owner waits, or only the length of turns decides.
    pub other_owner_after: Option<Duration>,
}

/// The decisions in which policies differ.
pub(crate) trait Policy: Debug + Sync {
    /// How long a holder keeps the lock while `first` waits.
    fn turn(&self, settings: &Settings, holder: &Holder, first: &Waiter) -> Duration;
    /// The rank, among the requests of its owner, of a request that arrives at `arrival`. The
    /// smallest rank is served first.
    fn rank(&self, settings: &Settings, arrival: Time, waiter: &Waiter) -> Time;
    /// The key of a request among the requests of all owners, from the finish tag of the request's
    /// owner (`served`), the request's rank, and the time when the owner began to wait (`joined`).
    fn key_among_owners(&self, served: Time, rank: Time, joined: Time) -> Time;
    /// The time after which a waiting request precedes all other requests of its owner. `None`:
    /// never, because the rank already bounds the wait.
    fn ages_after(&self, settings: &Settings, waiter: &Waiter) -> Option<Duration>;
    /// Whether tenants take turns regardless of their number of clients. If not, all clients
    /// without a share are one owner.
    fn tenants_take_turns(&self) -> bool;
    /// Whether the order of eviction depends on the queue: memory of the client with the longest
    /// expected idle time is evicted first. If not, memory of the least recently run client is
    /// evicted first.
    fn evicts_by_queue(&self) -> bool;
}

/// How long a contended holder may be idle before it releases the lock, under every policy. This is
/// the cost of a move (ski rental): `moving` is the time for which the hand-over moves memory. A client
/// that can predict its own pauses releases the lock sooner.
pub(crate) fn grace(settings: &Settings, moving: Duration) -> Duration {
    moving.min(settings.time_quantum).max(SHORTEST_GRACE)
}

pub(crate) fn named(name: PolicyName) -> &'static dyn Policy {
    match name {
        PolicyName::Fcfs => &fcfs::Fcfs,
        PolicyName::Adaptive => &adaptive::Adaptive,
    }
}
