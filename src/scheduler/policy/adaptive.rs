//! Least attained service, in levels: clients that have used the least GPU time run first, which shortens mean
//! completion time when run times are unknown and heavy-tailed (a multi-level feedback queue; compare Tiresias, NSDI
//! 2019).
//!
//! **Queue.** A client's level is the base-4 logarithm of the GPU time that it has attained (`progress`). Lower levels
//! go first. Within a level the order is that in which clients entered it, and a client whose memory need not move
//! precedes a client whose memory must: clients that do not fit together run one after another, each until its level
//! ends, instead of swapping each other out every turn. Time is divided by job, not by tenant. Groups whose rule gives
//! them a share have that share; all other clients are one owner beside them (`fairness`).
//!
//! **Turns.** A holder continues while no client of a lower level waits; otherwise it has the shortest turn that pays
//! for the moves of memory.
//!
//! **Ageing.** In `auto`, a client that has waited for `max-wait` longer than it would if all waiting clients took
//! turns precedes all others for one turn: the shortest that is worth moving its memory, so that little time is lost
//! for clients of lower levels. In the other modes, where that turn is the time quantum, and where `max-wait` is 0, it
//! precedes them after [`AGEING_FACTOR`] times the wait that it would have if all took turns. GPUs are kept for a
//! client that wants several while it waits for the last of them, so it waits no longer than if all took turns.
//!
//! **Eviction.** Memory of the client that will run last is evicted first: of waiting clients, from the back of the
//! queue; an idle client is expected to stay idle for as long again as it has been.

use super::{Holder, Policy, SHORTEST_TURN, Waiter, fcfs::Fcfs, progress};
use crate::{
    api::{AntiThrash, Settings, Time},
    policy::Precedence,
    policy::utilization::MEASURED,
};
use std::time::Duration;

/// The ageing factor where `max-wait` does not bound waits: a client waits at most this multiple of its wait if all
/// clients took turns.
const AGEING_FACTOR: u32 = 8;
/// Longer than any time on a level, so that ranks of one level precede ranks of the next.
const LEVEL: Duration = Duration::from_secs(1 << 32);
/// The minimum turn of a client that has aged, whatever its size.
const SHORTEST_AGED_TURN: Duration = Duration::from_secs(1);
/// A client whose memory must move ranks, within its level, as if it had entered that level later by this many times
/// the time of the move.
const MOVES: u32 = 5;

#[derive(Debug)]
pub(super) struct Adaptive;

impl Policy for Adaptive {
    fn turn(&self, settings: &Settings, holder: &Holder, first: &Waiter) -> Duration {
        if first.precedence != Precedence::Equal || !holder.same_owner {
            return Fcfs.turn(settings, holder, first); // by their rules
        }
        let is_auto = settings.anti_thrash == AntiThrash::Auto;
        let least = match (is_auto, first.evicts) {
            (false, _) => settings.time_quantum,
            (true, true) => first.shortest_turn(),
            (true, false) if first.holders_measured => SHORTEST_TURN,
            (true, false) => MEASURED.min(settings.time_quantum),
        };
        let turn = if holder.aged || first.aged {
            // The client's own memory has to be moved in during the turn.
            holder.fills.saturating_mul(MOVES).max(SHORTEST_AGED_TURN).min(turn_of_all(settings, first))
        } else if first.rank < holder.rank {
            least
        } else {
            holder.waited.saturating_add(progress::rest_of_level(holder.attained))
        };
        // Other owners get their part in whole turns.
        let others =
            holder.other_owner_after.map(|after| turn_of_all(settings, first).max(holder.waited.saturating_add(after)));
        turn.min(others.unwrap_or(Duration::MAX)).max(least)
    }

    fn rank(&self, settings: &Settings, _: Time, waiter: &Waiter) -> Time {
        if settings.anti_thrash == AntiThrash::Auto && waiter.unmeasured && !waiter.evicts {
            return Time::ZERO; // a short turn tells whether it can run beside others
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

    fn grace(&self, settings: &Settings, moving: Duration) -> Duration {
        Fcfs.grace(settings, moving)
    }

    fn expected_idle(&self, settings: &Settings, idle: Duration, before: Option<u32>) -> Duration {
        before.map_or(idle, |before| settings.time_quantum.saturating_mul(before))
    }

    fn evicts_by_queue(&self) -> bool {
        true
    }
}

/// The length of a turn if all waiting clients took turns.
fn turn_of_all(settings: &Settings, waiter: &Waiter) -> Duration {
    let share = match settings.max_wait {
        Duration::ZERO => Duration::MAX,
        most => most / waiter.waiters.max(1),
    };
    settings.time_quantum.min(share).max(waiter.shortest_turn())
}
