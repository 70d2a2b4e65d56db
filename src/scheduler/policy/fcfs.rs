//! First come, first served, modified by the anti-thrash mode.
//!
//! **Turns.** In `on` every turn is the full time quantum, as in the original nvshare. In `auto` it depends on the cost
//! of changing the holder. Where memory must move, the turn is a multiple of the time of the move
//! ([`Waiter::moving_turn`]). Where nothing must move it is a drain, and fairness decides: a holder keeps the GPU for a
//! little more than the waiter is expected to need. Equals thus finish their bursts (two half-busy jobs overlap perfectly), and a
//! short burst soon ends a long turn. This is least attained service: what a client has used since it last ran out of
//! work predicts what it still needs, because burst lengths are heavy-tailed. A higher class (`fairness::Class`) does
//! not wait for the turn to end, a lower one waits until the holder has no work. With many waiting clients, `auto`
//! shortens turns so that the last one waits no longer than `max-wait`.
//!
//! **Queue**, among the clients of one tenant: order of arrival. In `auto` the rank is the arrival plus the expected time
//! (the burst, and moving memory both ways), rounded down to a power of four. Short bursts pass long ones, equals keep
//! their order, and ageing is built in: a client is never passed by one that arrived more than a time quantum later.
//! Moving counts, so a client whose memory is on the GPU goes first.
//!
//! **Grace**, the longest time that a holder may keep the lock while idle, is the cost of a move (ski rental). A client
//! that can predict its own pauses waits less.

use super::{Holder, Policy, SHORTEST_GRACE, SHORTEST_TURN, Waiter};
use crate::{
    api::{AntiThrash, Settings, Time},
    policy::Precedence,
    policy::utilization::MEASURED,
};
use std::time::Duration;

#[derive(Debug)]
pub(super) struct Fcfs;

impl Policy for Fcfs {
    fn turn(&self, settings: &Settings, holder: &Holder, first: &Waiter) -> Duration {
        match first.precedence {
            Precedence::Before => return Duration::ZERO,
            Precedence::After => return Duration::MAX,
            Precedence::BelowMinimum => return settings.slice().min(settings.time_quantum).max(first.shortest_turn()),
            Precedence::Equal if settings.anti_thrash != AntiThrash::Auto => return settings.time_quantum,
            Precedence::Equal => {}
        }
        let quantum = if !holder.exchange.is_zero() {
            let (least, most) = first.moving_turn(holder);
            (first.burst * 2).min(most).max(least).min(settings.time_quantum)
        } else if !first.holders_measured {
            MEASURED.min(settings.time_quantum) // a shorter turn would tell nothing, and perhaps both can run
        } else if first.unmeasured {
            SHORTEST_TURN
        } else {
            a_little_more(first.burst).max(SHORTEST_TURN).min(settings.time_quantum)
        };
        let share = match settings.max_wait {
            Duration::ZERO => Duration::MAX,
            most => most / first.waiters.max(1),
        };
        quantum.min(share).max(first.shortest_turn())
    }

    fn rank(&self, settings: &Settings, arrival: Time, waiter: &Waiter) -> Time {
        match settings.anti_thrash {
            AntiThrash::Auto => {
                arrival.saturating_add(rounded(waiter.burst.saturating_add(waiter.moving)).min(settings.time_quantum))
            }
            AntiThrash::On | AntiThrash::Off => arrival,
        }
    }

    fn key_among_owners(&self, served: Time, rank: Time, _: Time) -> Time {
        served.max(rank)
    }

    fn ages_after(&self, _: &Settings, _: &Waiter) -> Option<Duration> {
        None
    }

    fn tenants_take_turns(&self) -> bool {
        true
    }

    fn grace(&self, settings: &Settings, moving: Duration) -> Duration {
        moving.min(settings.time_quantum).max(SHORTEST_GRACE)
    }

    fn expected_idle(&self, _: &Settings, idle: Duration, _: Option<u32>) -> Duration {
        idle
    }

    fn evicts_by_queue(&self) -> bool {
        false
    }
}

/// A quarter more: bursts of one program vary by about this much.
fn a_little_more(burst: Duration) -> Duration {
    burst.saturating_add(burst / 4)
}

/// The largest power of four milliseconds that is not longer than `length`, at least 1 ms.
fn rounded(length: Duration) -> Duration {
    let mut rounded = 1u64;
    while rounded < 1 << 30 && u128::from(rounded) * 4 <= length.as_millis() {
        rounded *= 4;
    }
    Duration::from_millis(rounded)
}
