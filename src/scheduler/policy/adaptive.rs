//! Who has had least goes first, so that on average jobs end soon: how long they will run is not known, but most that are short
//! have had little when they end, and who has had much usually needs as much again.
//!
//! **QueueKey in line.** A client's level is the power of four of the GPU time that it has had (`progress`). Lower levels go first.
//! Within a level goes first who came to it first, and memory that need not move before memory that must: several that cannot be
//! there at once run one after another, each until its level ends, and do not swap each other out in turns. So jobs count, not
//! whose they are: a user with ten has more of a GPU than a user with one. Only groups to which a rule gives a part of the time
//! have that part; all others are one party beside them (`order`).
//!
//! **Turns.** A holder goes on while nobody of a lower level waits, and else has the shortest turn that pays for what moves.
//!
//! **Ageing.** Who has waited for [`PATIENCE`] times as long as it would if all who wait took turns goes before all others, for
//! one turn. However many wait, no more than one in so many turns is one of those. Who wants several GPUs at once has them kept
//! for it while it waits for the last, so it waits no longer than if all took turns.
//!
//! **Memory** leaves from those first who will run last: of those who wait, from the last in line; who does not wait is taken to
//! rest for as long again as it has.

use super::{Policy, Runner, SHORTEST_TURN, Waiter, fcfs::Fcfs, progress};
use crate::{
    api::{AntiThrash, Settings, Time},
    fairness::share::Precedence,
    lock::corun::MEASURED,
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
