//! Who stands before whom: users take turns, and among a user's clients the policy decides.
//!
//! Whoever was served while another user waited has had something of the others' time: its next request stands as far back
//! as its user's share of the GPU takes to come to that much. A user with ten clients so gets no more turns than one with a
//! single client, and one that has just come waits for nobody twice. All places are times of one clock, and a request has one
//! place in all the lines that it stands in.

use super::{
    api::*,
    locks::Unit,
    machine::{Machine, Place},
    policy::{Policy, Waiter},
};
use std::collections::BTreeSet;
use std::time::Duration;

impl Machine {
    /// Where a new request stands among those of its user.
    pub(super) fn rank(&mut self, client: ClientId, wants: &GpuSet) -> (Time, u64) {
        let waiters = wants.iter().map(|gpu| self.waiter(client, *gpu));
        let waiter = waiters.reduce(|a, b| Waiter {
            burst: a.burst.max(b.burst),
            moving: a.moving.max(b.moving),
            evicts: a.evicts || b.evicts,
            ..a
        });
        let Some(waiter) = waiter else { return (self.now, 0) };
        let at = self.policy.place(&self.settings, self.now, &waiter);
        (at, self.count())
    }

    fn waiter(&self, client: ClientId, id: GpuId) -> Waiter {
        let (Some(seat), Some(gpu)) = (self.seat(client, id), self.gpus.get(&id)) else { return Waiter::default() };
        let lacking = self.need(client, id).saturating_sub(seat.account.allowance);
        Waiter {
            burst: seat.bursts.expected(),
            moving: self.moving_both_ways(id, lacking, &[client]),
            evicts: lacking > gpu.free(&self.settings),
            ..Waiter::default()
        }
    }

    /// Where a request of that rank stands in line.
    pub(super) fn place(&self, client: ClientId, wants: &GpuSet, (at, number): (Time, u64)) -> Place {
        let Some(user) = self.clients.get(&client).map(|c| c.user) else { return (at, at, number) };
        let served = wants.iter().filter_map(|id| self.gpus.get(id)?.served.get(&user).copied()).max();
        (served.unwrap_or_default().max(at), at, number)
    }

    /// That client had the lock since then, and others waited for so much of the time.
    pub(super) fn has_been_served(&mut self, client: ClientId, id: GpuId, since: Time, waited: Duration) {
        let Some(user) = self.clients.get(&client).map(|c| c.user) else { return };
        let served = self.served_until(user, id, since, waited);
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.served.retain(|_, until| *until > now);
        let Some((until, _)) = served else { return };
        gpu.served.insert(user, until);
        let in_line: Vec<Unit> = gpu.line.iter().map(|(_, unit)| *unit).collect();
        for unit in in_line {
            if self.user_of(unit) == Some(user) {
                self.put_back(unit);
            }
        }
    }

    /// Until when a user has been served, if a client of its had the lock since then and others waited for so much of the
    /// time; and how many other users wait. None where nobody's time was taken.
    fn served_until(&self, user: UserId, id: GpuId, since: Time, waited: Duration) -> Option<(Time, u32)> {
        let gpu = self.gpus.get(&id)?;
        let waiting = gpu.line.iter().filter_map(|(_, unit)| self.user_of(*unit));
        let others = waiting.filter(|other| *other != user).collect::<BTreeSet<_>>().len() as u32;
        if others == 0 {
            return None;
        }
        let before = gpu.served.get(&user).copied().filter(|until| *until > self.now).unwrap_or_default();
        let share = before.max(since).saturating_add(waited.saturating_mul(others + 1));
        // What it had while the others had no use for theirs is not owed to them.
        Some((share.min(self.now.saturating_add(waited.saturating_mul(others))), others))
    }

    /// Until when a holder would stand before that request if it gave the lock back: to take it away sooner would cost a
    /// drain, and it would be granted at once again. None where the other goes first.
    pub(super) fn stands_first_until(&self, holder: ClientId, id: GpuId, other: Unit) -> Option<Time> {
        let hold = self.seat(holder, id)?.hold.as_ref().filter(|h| matches!(h.unit, Unit::Solo(_)))?;
        let (user, place) = (self.clients.get(&holder)?.user, self.requests.get(&other)?.place);
        let waited = hold.waited(self.now);
        let waiter = Waiter { burst: self.seat(holder, id)?.bursts.expected_after(waited), ..self.waiter(holder, id) };
        let arrives = self.policy.place(&self.settings, self.now, &waiter);
        // As long as it goes on, its arrival comes as fast as time does.
        let ahead = if self.user_of(other) == Some(user) {
            place.1.checked_sub(arrives)?
        } else {
            let (until, others) = self.served_until(user, id, hold.since, waited).unwrap_or_default();
            // Every moment of it is a moment that it owes to each of the others.
            place.0.checked_sub(arrives)?.min(place.0.checked_sub(until)? / (others + 1))
        };
        (!ahead.is_zero()).then(|| self.now.saturating_add(ahead))
    }

    /// A gang is taken for its first member's user.
    fn user_of(&self, unit: Unit) -> Option<UserId> {
        let client = self.requests.get(&unit)?.wants.keys().next()?;
        self.clients.get(client).map(|c| c.user)
    }

    /// Moves a request that stands in line to where it belongs now.
    fn put_back(&mut self, unit: Unit) {
        let Some(request) = self.requests.get(&unit) else { return };
        let (_, at, number) = request.place;
        let places = request.wants.iter().map(|(client, gpus)| self.place(*client, gpus, (at, number)));
        let Some(place) = places.max().filter(|place| *place != request.place) else { return };
        self.leave_line(unit);
        if let Some(request) = self.requests.get_mut(&unit) {
            request.place = place;
        }
        self.join(unit);
    }
}
