//! First come, first served, modified by the anti-thrash mode.
//!
//! **Turns.** In `on`, every turn is the full time quantum, as in the original nvshare. In `auto`,
//! the turn depends on the cost of changing the holder.
//!
//! If memory must move, the turn is twice the waiter's expected burst. Multiples of the time of the
//! move bound it ([`Waiter::moving_turn`]). If no memory must move, the only cost is a drain, and
//! fairness decides. A holder then keeps the GPU for a quarter longer than the waiter is expected
//! to need. Two clients with equal bursts thus finish their bursts (two half-busy jobs overlap
//! perfectly), and a short burst soon ends a long turn. The rule amounts to least attained service.
//! Burst lengths are heavy-tailed, so the GPU time that a client has used since its last idle time
//! predicts the GPU time that it still needs. It predicts little while neither client has ended a
//! burst: two clients that began together would alternate, and both would end their bursts late. So
//! once their bursts are known to be long, one of them has [`FIRST_TURN`].
//!
//! A client of a higher class (`fairness::Class`) does not wait for the turn to end. A client of a
//! lower class waits until the holder runs out of work. With many waiting clients, `auto` shortens
//! turns so that the last client waits no longer than `max-wait`. Two lower bounds remain: 20 ms,
//! and five times the time of the move ([`Waiter::shortest_turn`]).
//!
//! **Queue.** The clients of one tenant are ordered by arrival. In `auto`, the rank is the arrival
//! plus the expected time (the burst, and moving memory both ways), rounded down to a power of
//! four. Short bursts precede long ones, and clients with equal bursts keep their order. Ageing is
//! built in: a client never precedes a client that arrived more than a time quantum before it. The
//! time to move memory counts, so a client whose memory is on the GPU is served first.

use super::{Holder, Policy, SHORTEST_TURN, Waiter};
use crate::{
    api::{AntiThrash, Settings, Time},
    policy::Precedence,
    policy::utilization::MEASURED,
};
use std::time::Duration;

/// The GPU time that a client in its first burst has before its turn ends, if the waiting client is in
/// its first burst too and has had at least [`LONG`]. Clients with shorter bursts never wait for it.
const FIRST_TURN: Duration = Duration::from_secs(10);
/// The GPU time from which a first burst counts as long. A server's first answer is shorter.
const LONG: Duration = Duration::from_millis(500);

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
            // A shorter turn would measure nothing. The measurement may show that the clients can
            // run together.
            MEASURED.min(settings.time_quantum)
        } else if first.unmeasured {
            SHORTEST_TURN
        } else {
            let are_first = holder.is_first_burst && first.is_first_burst && first.burst >= LONG;
            let rest = if are_first { FIRST_TURN.saturating_sub(holder.burst) } else { Duration::ZERO };
            a_little_more(first.burst).max(rest).max(SHORTEST_TURN).min(settings.time_quantum)
        };
        quantum.min(settings.turn_within_max_wait(first.waiters)).max(first.shortest_turn())
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

    fn evicts_by_queue(&self) -> bool {
        false
    }
}

/// Adds a quarter, because the bursts of one program vary by about that much.
fn a_little_more(burst: Duration) -> Duration {
    burst.saturating_add(burst / 4)
}

/// `length` rounded down to a power of four milliseconds, at least 1 ms.
fn rounded(length: Duration) -> Duration {
    let mut rounded = 1u64;
    while rounded < 1 << 30 && u128::from(rounded) * 4 <= length.as_millis() {
        rounded *= 4;
    }
    Duration::from_millis(rounded)
}
