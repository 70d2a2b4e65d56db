//! First come, first served, as the anti-thrash mode modifies it.
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
//! **QueueKey in line**, among the clients of one user. Arrival order, except in `auto`, where a waiter's place is its arrival plus the *class* of what it
//! is going to take (its burst, and the moving of its bytes both ways), a class being a power of four. Short bursts so
//! pass long ones, equals stay in order of arrival, and ageing is built in: nobody is passed by one who came more
//! than a time quantum later. Moving counts, so one whose bytes are on the GPU goes before one whose bytes are not.
//!
//! **Grace** is what a move would cost: the longest that it can be right to wait idle. A client that knows its own pauses
//! waits less.

use super::{Policy, Runner, SHORTEST_GRACE, SHORTEST_TURN, Waiter};
use crate::{
    api::{AntiThrash, Settings, Time},
    fairness::share::Precedence,
    lock::corun::MEASURED,
};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Fcfs;

impl Policy for Fcfs {
    fn turn(&self, settings: &Settings, _: &Runner, first: &Waiter) -> Duration {
        match first.precedence {
            Precedence::Before => return Duration::ZERO,
            Precedence::After => return Duration::MAX,
            Precedence::BelowMinimum => return settings.slice().min(settings.time_quantum).max(first.least()),
            Precedence::Equal if settings.anti_thrash != AntiThrash::Auto => return settings.time_quantum,
            Precedence::Equal => {}
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

    fn key_among_owners(&self, served: Time, rank: Time, _: Time) -> Time {
        served.max(rank)
    }

    fn patience(&self, _: &Settings, _: &Waiter) -> Option<Duration> {
        None
    }

    fn users_take_turns(&self) -> bool {
        true
    }

    fn grace(&self, settings: &Settings, moving: Duration) -> Duration {
        moving.min(settings.time_quantum).max(SHORTEST_GRACE)
    }

    fn rests(&self, _: &Settings, idle: Duration, _: Option<u32>) -> Duration {
        idle
    }

    fn keeps_for_the_next(&self) -> bool {
        false
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
