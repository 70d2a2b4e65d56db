//! Who stands before whom: parties take turns (users, or groups of whom a rule says how much time they have), and among a
//! party's clients the policy decides.
//!
//! Whoever was served while another party waited has had something of the others' time: its next request stands as far back
//! as its party's share of the GPU takes to come to that much, by the weights of those who wanted it. What it took to bring
//! its memory in, while nobody could run, counts as well. A user with ten clients so gets no more turns than one with a
//! single client, and one that has just come waits for nobody twice. All places are times of one clock, and a request has one
//! place in all the lines that it stands in.

use super::{
    api::*,
    locks::{Hold, Unit},
    machine::{Machine, Place},
    policy::{Policy, Waiter},
    shares::Party,
};
use std::collections::BTreeSet;
use std::time::Duration;

/// By what somebody who is served owes others something.
#[derive(Debug, Clone, Copy, Default)]
struct Debt {
    own: u32,
    others: u32,
}

impl Debt {
    /// What is owed for that time.
    fn of(self, time: Duration) -> Duration {
        scaled(time, self.others.into(), self.own.into())
    }

    /// After how long as much is owed as that, with the time itself.
    fn until_as_much(self, time: Duration) -> Duration {
        scaled(time, self.own.into(), u128::from(self.own) + u128::from(self.others))
    }
}

fn scaled(time: Duration, by: u128, of: u128) -> Duration {
    let nanos = time.as_nanos().saturating_mul(by) / of.max(1);
    Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
}

impl Machine {
    /// Where a new request stands among those of its party.
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
        let class = self.class(client, wants);
        let served = |party| wants.iter().filter_map(move |id| self.gpus.get(id)?.served.get(&party).copied()).max();
        let served = self.party(client).and_then(served).unwrap_or_default();
        Place { class, at: served.max(at), rank: at, number }
    }

    /// That client had the lock, and others waited for so much of the time.
    pub(super) fn has_been_served(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        let Some(party) = self.party(client) else { return };
        let served = self.served_until(party, id, hold, waited);
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.served.retain(|_, until| *until > now);
        let Some((until, _)) = served else { return };
        let before = gpu.served.entry(party).or_default();
        *before = until.max(*before);
        let in_line: Vec<Unit> = gpu.line.iter().map(|(_, unit)| *unit).collect();
        for unit in in_line {
            if self.party_of(unit) == Some(party) {
                self.put_back(unit);
            }
        }
    }

    /// Until when a party has been served, if a client of its had the lock and others waited for so much of the time; and
    /// what it owes the others then. None where nobody's time was taken.
    fn served_until(&self, party: Party, id: GpuId, hold: &Hold, waited: Duration) -> Option<(Time, Debt)> {
        let gpu = self.gpus.get(&id)?;
        let waiting = gpu.line.iter().filter_map(|(_, unit)| self.party_of(*unit));
        let others: BTreeSet<Party> =
            waiting.filter(|other| *other != party && self.are_peers(*other, party)).collect();
        let weights = others.into_iter().map(|other| self.weight(other)).fold(0u32, u32::saturating_add);
        let debt = Debt { own: self.weight(party), others: weights };
        if weights == 0 {
            return None;
        }
        let waited = waited + hold.moved;
        let begun = hold.since.saturating_sub(hold.moved).max(hold.served_until);
        Some((begun.saturating_add(waited).saturating_add(debt.of(waited)), debt))
    }

    /// Until when the client's party had been served when it was granted that GPU: what it had while the others had no use
    /// for theirs is not owed to them.
    pub(super) fn served_before(&mut self, client: ClientId, id: GpuId) -> Time {
        let Some(party) = self.party(client) else { return Time::ZERO };
        self.pass_over(id, party);
        let Some(gpu) = self.gpus.get(&id) else { return Time::ZERO };
        let mut waiting = gpu.line.iter().filter_map(|(_, unit)| self.party_of(*unit)).chain(gpu.cut_short);
        let wanted = waiting.any(|other| other != party);
        gpu.served.get(&party).copied().filter(|_| wanted).unwrap_or_default()
    }

    /// Where all who want a GPU have been served for long to come, since those are gone to whom they owed it, that time is
    /// passed over. A time quantum of it is left, since turns do not end to the moment.
    fn pass_over(&mut self, id: GpuId, granted: Party) {
        let until = self.now.saturating_add(self.settings.time_quantum);
        let Some(gpu) = self.gpus.get(&id) else { return };
        let served = |party: Party| gpu.served.get(&party).copied().unwrap_or_default();
        let waiting = gpu.line.iter().filter_map(|(_, unit)| self.party_of(*unit));
        let least = waiting.chain([granted]).map(served).min().unwrap_or_default();
        let ahead = least.saturating_sub(until);
        let Some(gpu) = self.gpus.get_mut(&id).filter(|_| !ahead.is_zero()) else { return };
        gpu.served.values_mut().for_each(|until| *until = until.saturating_sub(ahead));
        for unit in gpu.line.iter().map(|(_, unit)| *unit).collect::<Vec<_>>() {
            self.put_back(unit);
        }
    }

    /// Until when a holder would stand before that request if it gave the lock back: to take it away sooner would cost a
    /// drain, and it would be granted at once again. None where the other goes first.
    pub(super) fn stands_first_until(&self, holder: ClientId, id: GpuId, other: Unit) -> Option<Time> {
        let hold = self.seat(holder, id)?.hold.as_ref().filter(|h| matches!(h.unit, Unit::Solo(_)))?;
        let (party, place) = (self.party(holder)?, self.requests.get(&other)?.place);
        let waited = hold.waited(self.now);
        let waiter = Waiter { burst: self.seat(holder, id)?.bursts.expected_after(waited), ..self.waiter(holder, id) };
        let arrives = self.policy.place(&self.settings, self.now, &waiter);
        // As long as it goes on, its arrival comes as fast as time does.
        let ahead = if self.party_of(other) == Some(party) {
            place.rank.checked_sub(arrives)?
        } else {
            let (until, debt) = self.served_until(party, id, hold, waited).unwrap_or_default();
            // Of every moment of it, it owes something to each of the others.
            place.at.checked_sub(arrives)?.min(debt.until_as_much(place.at.checked_sub(until)?))
        };
        (!ahead.is_zero()).then(|| self.now.saturating_add(ahead))
    }

    /// A gang is taken for its first member's party.
    fn party_of(&self, unit: Unit) -> Option<Party> {
        let client = self.requests.get(&unit)?.wants.keys().next()?;
        self.party(*client)
    }

    /// Where a request belongs now.
    pub(super) fn place_now(&self, unit: Unit) -> Option<Place> {
        let request = self.requests.get(&unit)?;
        let Place { rank, number, .. } = request.place;
        let places = request.wants.iter().map(|(client, gpus)| self.place(*client, gpus, (rank, number)));
        // A gang is of the last class that one of it is of, and as late as the one that has had most.
        let place = places.reduce(|a, b| Place { class: a.class.max(b.class), at: a.at.max(b.at), ..a })?;
        let at = self.goes_on_since(unit).map_or(place.at, |since| since.min(place.at));
        Some(Place { at, ..place })
    }

    /// Moves a request that stands in line to where it belongs now.
    pub(super) fn put_back(&mut self, unit: Unit) {
        let Some(request) = self.requests.get(&unit).filter(|request| request.parked.is_none()) else { return };
        let Some(place) = self.place_now(unit).filter(|place| *place != request.place) else { return };
        self.leave_line(unit);
        if let Some(request) = self.requests.get_mut(&unit) {
            request.place = place;
        }
        self.join(unit);
    }
}
