//! Least attained service, in levels: clients that have used the least GPU time run first. This
//! order shortens mean completion time when run times are unknown and heavy-tailed. The queue is a
//! multi-level feedback queue (compare Tiresias, NSDI 2019).
//!
//! **Queue.** A client's level is the base-4 logarithm of the GPU time that it has attained
//! (`progress`). Lower levels are served first. Within a level, clients are ordered by the time
//! when they entered the level. A client whose memory need not move precedes a client whose memory
//! must move. Clients that do not fit together therefore run one after another, each until its
//! level ends, instead of evicting each other every turn. Time is divided by job, not by tenant. A
//! group whose rule sets a share has that share; all other clients together are one more owner
//! (`fairness`).
//!
//! **Turns.** A holder continues while no client of a lower level waits. Otherwise its turn is just
//! long enough to justify the moves of memory.
//!
//! **Ageing.** An aged client precedes all others for one turn. The turn is just long enough to
//! justify moving its memory, so that clients of lower levels lose little time. The reference is
//! the wait that the client would have if all waiting clients took turns. In `auto`, a client ages
//! when its wait exceeds the reference by `max-wait`. In the other modes, an aged client's turn is
//! the time quantum, so a client ages only after [`AGEING_FACTOR`] times the reference. The same
//! applies if `max-wait` is 0. A client that wants several GPUs ages after the reference itself,
//! because the GPUs are kept for it while it waits for the last of them.
//!
//! **Eviction.** The memory of the client that will run last is evicted first. Waiting clients are
//! evicted from the back of the queue. An idle client is expected to stay idle for as long again as
//! it has already been idle.

use super::{Holder, Policy, SHORTEST_TURN, Waiter, fcfs::Fcfs, progress};
use crate::{
    api::{AntiThrash, Settings, Time},
    policy::Precedence,
    policy::utilization::MEASURED,
};
use std::time::Duration;

/// The ageing factor if `max-wait` does not bound waits. A client then waits at most this multiple
/// of the wait that it would have if all clients took turns.
const AGEING_FACTOR: u32 = 8;
/// A time longer than any stay on a level, so that all ranks of a level precede all ranks of the
/// next.
const LEVEL: Duration = Duration::from_secs(1 << 32);
/// The minimum turn of an aged client, regardless of its memory size.
const SHORTEST_AGED_TURN: Duration = Duration::from_secs(1);
/// The penalty for moving memory. If a client's memory must move, the client's rank is as if it had
/// entered its level later: by this multiple of the time of the move.
const MOVES: u32 = 5;

#[derive(Debug)]
pub(super) struct Adaptive;

impl Policy for Adaptive {
    fn turn(&self, settings: &Settings, holder: &Holder, first: &Waiter) -> Duration {
        if first.precedence != Precedence::Equal || !holder.same_owner {
            return Fcfs.turn(settings, holder, first); // the rules of both owners decide
        }
        let is_auto = settings.anti_thrash == AntiThrash::Auto;
        let least = match (is_auto, first.evicts) {
            (false, _) => settings.time_quantum,
            (true, true) => first.shortest_turn(),
            (true, false) if first.holders_measured => SHORTEST_TURN,
            (true, false) => MEASURED.min(settings.time_quantum),
        };
        let turn = if holder.aged || first.aged {
            // The client's own memory must be moved in during the turn.
            holder.fills.saturating_mul(MOVES).max(SHORTEST_AGED_TURN).min(turn_of_all(settings, first))
        } else if first.rank < holder.rank {
            least
        } else {
            holder.waited.saturating_add(progress::rest_of_level(holder.attained))
        };
        // Other owners receive their part in whole turns.
        let others =
            holder.other_owner_after.map(|after| turn_of_all(settings, first).max(holder.waited.saturating_add(after)));
        turn.min(others.unwrap_or(Duration::MAX)).max(least)
    }

    fn rank(&self, settings: &Settings, _: Time, waiter: &Waiter) -> Time {
        if settings.anti_thrash == AntiThrash::Auto && waiter.unmeasured && !waiter.evicts {
            return Time::ZERO; // a short turn measures whether the client can run beside others
        }
        let moves = waiter.moving.saturating_mul(MOVES).min(LEVEL / 2);
        waiter.level_since.saturating_add(moves).saturating_add(LEVEL * progress::level(waiter.attained))
    }

    fn key_among_owners(&self, served: Time, _: Time, joined: Time) -> Time {
        served.max(joined)
    }

    fn ages_after(&self, settings: &Settings, waiter: &Waiter) -> Option<Duration> {
        let all = turn_of_all(settings, waiter).saturating_mul(waiter.waiters.max(1));
        Some(match (settings.anti_thrash, settings.max_wait) {
            _ if waiter.several => all,
            (AntiThrash::Auto, wait) if !wait.is_zero() => all.saturating_add(wait),
            _ => all.saturating_mul(AGEING_FACTOR),
        })
    }

    fn tenants_take_turns(&self) -> bool {
        false
    }

    fn evicts_by_queue(&self) -> bool {
        true
    }
}

/// The length of a turn if all waiting clients took turns.
fn turn_of_all(settings: &Settings, waiter: &Waiter) -> Duration {
    settings.time_quantum.min(settings.turn_within_max_wait(waiter.waiters)).max(waiter.shortest_turn())
}
