//! Least attained service, in levels: clients that have used the least GPU time run first, which shortens mean completion time when
//! run times are unknown and heavy-tailed (a multi-level feedback queue; compare Tiresias, NSDI 2019).
//!
//! **Queue.** A client's level is the power of four of the GPU time that it has used (`progress`). Lower levels go first. Within a level
//! the order is that of entering it, and a client whose memory need not move precedes one whose memory must: clients that do not fit
//! together run one after another, each until its level ends, instead of swapping each other out every turn. Time is divided by
//! job, not by user. Groups whose rule gives them a share have that share; all other clients are one owner beside them (`fair_queue`).
//!
//! **Turns.** A holder continues while no client of a lower level waits; otherwise it has the shortest turn that pays for what moves.
//!
//! **Ageing.** A client that has waited [`PATIENCE`] times as long as it would if all waiting clients took turns precedes all others for
//! one turn. However many wait, at most one in so many turns is such a turn. GPUs are kept for a client that wants several while it
//! waits for the last of them, so it waits no longer than if all took turns.
//!
//! **Eviction.** Memory of the client that will run last goes first: of waiting clients, from the back of the queue; an idle client is
//! taken to stay idle for as long again as it has been.

use super::{Policy, Runner, SHORTEST_TURN, Waiter, fcfs::Fcfs, progress};
use crate::{
    api::{AntiThrash, Settings, Time},
    fairness::Precedence,
    policy::utilization::MEASURED,
};
use std::time::Duration;

/// How many times as long somebody waits at most as if all took turns.
const PATIENCE: u32 = 8;
/// Longer than everything: times of one level are before those of the next.
const LEVEL: Duration = Duration::from_secs(1 << 32);
/// By how many times what moving takes somebody may be passed by those who need not move.
const MOVES: u32 = 5;

#[derive(Debug)]
pub(super) struct Adaptive;

impl Policy for Adaptive {
    fn turn(&self, settings: &Settings, holder: &Runner, first: &Waiter) -> Duration {
        if first.precedence != Precedence::Equal || !holder.peer {
            return Fcfs.turn(settings, holder, first); // as rules say
        }
        let is_auto = settings.anti_thrash == AntiThrash::Auto;
        let least = match (is_auto, first.evicts) {
            (false, _) => settings.time_quantum,
            (true, true) => first.least(),
            (true, false) if first.holders_measured => SHORTEST_TURN,
            (true, false) => MEASURED.min(settings.time_quantum),
        };
        let turn = if holder.aged || first.aged {
            turn_of_all(settings, first)
        } else if first.rank < holder.rank {
            least
        } else {
            holder.waited.saturating_add(progress::rest_of_level(holder.had))
        };
        // Other parties have their part in whole turns.
        let others =
            holder.others_after.map(|after| turn_of_all(settings, first).max(holder.waited.saturating_add(after)));
        turn.min(others.unwrap_or(Duration::MAX)).max(least)
    }

    fn place(&self, settings: &Settings, _: Time, waiter: &Waiter) -> Time {
        if settings.anti_thrash == AntiThrash::Auto && waiter.unmeasured && !waiter.evicts {
            return Time::ZERO; // a moment tells whether it can run beside others
        }
        let moves = waiter.moving.saturating_mul(MOVES).min(LEVEL / 2);
        waiter.entered.saturating_add(moves).saturating_add(LEVEL * progress::level(waiter.had))
    }

    fn key_among_owners(&self, served: Time, _: Time, joined: Time) -> Time {
        served.max(joined)
    }

    fn patience(&self, settings: &Settings, waiter: &Waiter) -> Option<Duration> {
        let all = turn_of_all(settings, waiter).saturating_mul(waiter.waiters.max(1));
        Some(if waiter.several { all } else { all.saturating_mul(PATIENCE) })
    }

    fn users_take_turns(&self) -> bool {
        false
    }

    fn grace(&self, settings: &Settings, moving: Duration) -> Duration {
        Fcfs.grace(settings, moving)
    }

    fn rests(&self, settings: &Settings, idle: Duration, before: Option<u32>) -> Duration {
        before.map_or(idle, |before| settings.time_quantum.saturating_mul(before))
    }

    fn keeps_for_the_next(&self) -> bool {
        true
    }
}

/// How long a turn would be if all who wait took turns.
fn turn_of_all(settings: &Settings, waiter: &Waiter) -> Duration {
    let share = match settings.max_wait {
        Duration::ZERO => Duration::MAX,
        most => most / waiter.waiters.max(1),
    };
    settings.time_quantum.min(share).max(waiter.least())
}
