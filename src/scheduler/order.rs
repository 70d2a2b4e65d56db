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
use std::collections::BTreeMap;
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
        let served = wants.iter().map(|id| self.has_been_served_until(client, *id)).max().unwrap_or_default();
        Place { class, at: served.max(at), rank: at, number }
    }

    /// That client had the lock, and others waited for so much of the time.
    pub(super) fn has_been_served(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        let Some(party) = self.party(client) else { return };
        let served: Vec<(Party, Time)> = self
            .parties(client)
            .filter_map(|as_whom| Some((as_whom, self.served_until(client, as_whom, id, hold, waited)?.0)))
            .collect();
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.served.retain(|_, until| *until > now);
        if served.is_empty() {
            return;
        }
        for (as_whom, until) in served {
            let before = gpu.served.entry(as_whom).or_default();
            *before = until.max(*before);
        }
        let in_line: Vec<Unit> = gpu.line.iter().map(|(_, unit)| *unit).collect();
        for unit in in_line {
            if self.party_of(unit) == Some(party) {
                self.put_back(unit);
            }
        }
    }

    /// Until when a client has been served as its party, or as itself, if it had the lock and others waited for so much of the
    /// time; and what it owes the others then. None where nobody's time was taken.
    fn served_until(
        &self,
        client: ClientId,
        as_whom: Party,
        id: GpuId,
        hold: &Hold,
        waited: Duration,
    ) -> Option<(Time, Debt)> {
        let weights = self.weights_of_others(client, as_whom, id);
        let debt = Debt { own: self.weight(as_whom), others: weights };
        if weights == 0 {
            return None;
        }
        let waited = waited + hold.moved;
        let before = if as_whom == Party::Client(client) { hold.own_served_until } else { hold.served_until };
        let begun = hold.since.saturating_sub(hold.moved).max(before);
        Some((begun.saturating_add(waited).saturating_add(debt.of(waited)), debt))
    }

    /// What those who wait there, and share it with that client, count for together: other parties, each for no more than
    /// those of it who wait. For the client as itself its fellows are others, too.
    fn weights_of_others(&self, client: ClientId, as_whom: Party, id: GpuId) -> u32 {
        let own = self.party(client);
        let mut others: BTreeMap<Party, u32> = BTreeMap::new();
        let line = self.gpus.get(&id).into_iter().flat_map(|gpu| &gpu.line);
        for waiting in line.filter_map(|(_, unit)| self.first_of(*unit)) {
            let Some(party) = self.party(waiting) else { continue };
            let is_self = if own == Some(as_whom) { own == Some(party) } else { waiting == client };
            if !is_self && self.are_peers(waiting, client) {
                let weight = others.entry(party).or_default();
                *weight = weight.saturating_add(self.weight_of(waiting)).min(self.weight(party));
            }
        }
        others.into_values().fold(0, u32::saturating_add)
    }

    /// Until when the client's party, and the client itself, had been served when it was granted that GPU: what they had while
    /// the others had no use for theirs is not owed to them.
    pub(super) fn served_before(&mut self, client: ClientId, id: GpuId) -> (Time, Time) {
        let Some(party) = self.party(client) else { return Default::default() };
        self.pass_over(id, client);
        let Some(gpu) = self.gpus.get(&id) else { return Default::default() };
        let waiting = || gpu.line.iter().filter_map(|(_, unit)| self.first_of(*unit)).chain(gpu.cut_short);
        let served = |as_whom: Party, is_wanted: bool| {
            gpu.served.get(&as_whom).copied().filter(|_| is_wanted).unwrap_or_default()
        };
        let by_others = waiting().any(|other| self.party(other).is_some_and(|other| other != party));
        let by_anybody = waiting().any(|other| other != client);
        (served(party, by_others), served(Party::Client(client), by_anybody))
    }

    /// Where all who want a GPU have been served for long to come, since those are gone to whom they owed it, that time is
    /// passed over. A time quantum of it is left, since turns do not end to the moment.
    fn pass_over(&mut self, id: GpuId, granted: ClientId) {
        let until = self.now.saturating_add(self.settings.time_quantum);
        let Some(gpu) = self.gpus.get(&id) else { return };
        let waiting = gpu.line.iter().filter_map(|(_, unit)| self.first_of(*unit));
        let served = waiting.chain([granted]).map(|client| self.has_been_served_until(client, id));
        let least = served.min().unwrap_or_default();
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
        let served = |as_whom: Party| self.gpus.get(&id)?.served.get(&as_whom).copied();
        let is_fellow = self.party_of(other) == Some(party);
        // Those of a party have been served alike, but for one that claims less.
        let own = || self.first_of(other).and_then(|client| served(Party::Client(client))).unwrap_or_default();
        let stands = if is_fellow { place.rank.max(own()) } else { place.at };
        // As long as it goes on, its arrival comes as fast as time does.
        let mut ahead = stands.checked_sub(arrives);
        for as_whom in self.parties(holder) {
            let before = match self.served_until(holder, as_whom, id, hold, waited) {
                // Of every moment of it, it owes something to each of the others.
                Some((until, debt)) => stands.checked_sub(until).map(|left| debt.until_as_much(left)),
                None if is_fellow => (stands > served(as_whom).unwrap_or_default()).then_some(Duration::MAX),
                None => None,
            };
            ahead = ahead.min(before);
        }
        let is_lighter = self.parties(holder).any(|as_whom| as_whom != party);
        let by_rank = place.rank.checked_sub(arrives).filter(|_| is_fellow && !is_lighter);
        let ahead = ahead.max(by_rank)?;
        (!ahead.is_zero()).then(|| self.now.saturating_add(ahead))
    }

    /// A gang is taken for its first member.
    fn first_of(&self, unit: Unit) -> Option<ClientId> {
        self.requests.get(&unit)?.wants.keys().next().copied()
    }

    fn party_of(&self, unit: Unit) -> Option<Party> {
        self.party(self.first_of(unit)?)
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
