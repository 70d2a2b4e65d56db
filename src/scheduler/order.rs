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
    locks::{Hold, Request, Unit},
    machine::{Machine, Place},
    policy::{Runner, Waiter},
    shares::Party,
};
use std::collections::{BTreeMap, BTreeSet};
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
    /// Where a request that came then stands among those of its party, and when it goes before all of them.
    pub(super) fn rank(&self, client: ClientId, wants: &GpuSet, arrival: Time) -> (Time, Option<Time>) {
        let waiters = wants.iter().map(|gpu| self.waiter(client, *gpu));
        let waiter = waiters.reduce(|a, b| Waiter {
            burst: a.burst.max(b.burst),
            moving: a.moving.max(b.moving),
            evicts: a.evicts || b.evicts,
            waiters: a.waiters.max(b.waiters),
            had: a.had.max(b.had),
            entered: a.entered.max(b.entered),
            ..a
        });
        let Some(waiter) = waiter else { return (arrival, None) };
        let several = wants.len() > 1 || self.unit(client).gang().is_some();
        let waiter = Waiter { several, ..waiter };
        let patience = self.policy().patience(&self.settings, &waiter);
        let at = self.policy().place(&self.settings, arrival, &waiter);
        (at, patience.map(|patience| arrival.saturating_add(patience)))
    }

    /// Since when the party of one that asks now has waited there. Where no rule divides the time there is but one that counts.
    pub(super) fn joined(&self, client: ClientId, wants: &GpuSet) -> Time {
        if self.policy().users_take_turns() || !self.has_classes() {
            return Time::ZERO;
        }
        let party = self.party(client);
        let lines = wants.iter().filter_map(|id| self.gpus.get(id)).flat_map(|gpu| &gpu.line);
        let fellows = lines.filter(|(_, unit)| self.party_of(*unit) == party);
        fellows.map(|(place, _)| place.joined).min().unwrap_or(self.now)
    }

    /// Those who wait of whom all stand where their party does, and among themselves by their ranks: that place is kept.
    fn parties_with_one_place(&self, id: GpuId) -> BTreeSet<Party> {
        let policy_knows = !self.policy().users_take_turns() && self.has_classes();
        let line = self.gpus.get(&id).filter(|_| policy_knows).into_iter().flat_map(|gpu| &gpu.line);
        line.filter_map(|(_, unit)| self.party_of(*unit)).collect()
    }

    /// The policy is another: what it says of places holds for all who wait, and nobody owes anything by what it was.
    pub(super) fn rank_anew(&mut self) {
        self.gpus.values_mut().for_each(|gpu| gpu.served.clear());
        for unit in self.requests.keys().copied().collect::<Vec<_>>() {
            let Some(request) = self.requests.get(&unit) else { continue };
            let Some((client, wants)) = request.wants.first_key_value() else { continue };
            let arrival = request.since.values().min().copied().unwrap_or(self.now);
            let (rank, ages) = self.rank(*client, wants, arrival);
            let is_in_line = request.parked.is_none();
            if is_in_line {
                self.leave_line(unit);
            }
            if let Some(request) = self.requests.get_mut(&unit) {
                (request.place.rank, request.ages, request.aged) = (rank, ages, false);
            }
            if is_in_line {
                self.join(unit);
            }
        }
    }

    /// Who has waited for long enough goes before all others of its party.
    pub(super) fn age(&mut self, unit: Unit) {
        let is_due = |request: &Request| !request.aged && request.ages.is_some_and(|at| at <= self.now);
        if !self.requests.get(&unit).is_some_and(is_due) {
            return;
        }
        self.leave_line(unit);
        if let Some(request) = self.requests.get_mut(&unit) {
            request.place.rank = Time::ZERO;
            request.aged = true;
        }
    }

    fn waiter(&self, client: ClientId, id: GpuId) -> Waiter {
        let (Some(seat), Some(gpu)) = (self.seat(client, id), self.gpus.get(&id)) else { return Waiter::default() };
        let lacking =
            self.need(client, id).saturating_sub(gpu.ledger.account(client).map_or(0, |account| account.allowance));
        let held = seat.hold.as_ref().map_or(Duration::ZERO, |hold| self.now.saturating_sub(hold.since));
        let (had, entered) = seat.progress.after(self.now, held);
        Waiter {
            burst: seat.bursts.expected(),
            moving: self.moving_both_ways(id, lacking, &[client]),
            evicts: lacking > gpu.free(&self.settings),
            unmeasured: seat.hold.is_none() && seat.fullness.is_open(),
            waiters: gpu.line.len() as u32 + 1,
            had,
            entered,
            ..Waiter::default()
        }
    }

    /// What a holder is to who waits.
    pub(super) fn runner(&self, client: ClientId, id: GpuId, hold: &Hold, first: Option<Unit>) -> Runner {
        let waiter = self.waiter(client, id);
        Runner {
            rank: self.policy().place(&self.settings, self.now, &waiter),
            had: waiter.had,
            waited: hold.waited(self.now),
            aged: hold.aged,
            fellow: first.is_none_or(|first| self.party_of(first) == self.party(client)),
            others_after: self.others_after(client, id, hold),
        }
    }

    /// How much longer a holder can run until its party will have had more than another one that waits. None where the policy
    /// has parties take turns by ending each of theirs, or nobody else waits.
    fn others_after(&self, client: ClientId, id: GpuId, hold: &Hold) -> Option<Duration> {
        if self.policy().users_take_turns() || !self.has_classes() {
            return None;
        }
        let party = self.party(client)?;
        let is_other = |unit: Unit| {
            let other = self.first_of(unit).filter(|other| self.party(*other) != Some(party));
            other.is_some_and(|other| self.are_peers(other, client))
        };
        let (place, _) = self.gpus.get(&id)?.line.iter().find(|(_, unit)| is_other(*unit))?;
        let (until, debt) = self.served_until(client, party, id, hold, hold.waited(self.now))?;
        Some(debt.until_as_much(place.at.saturating_sub(until)))
    }

    /// Where a request stands in line now.
    fn place(&self, client: ClientId, wants: &GpuSet, before: Place) -> Place {
        let class = self.class(client, wants);
        let served = wants.iter().map(|id| self.has_been_served_until(client, *id)).max().unwrap_or_default();
        Place { class, at: self.policy().place_among_parties(served, before.rank, before.joined), ..before }
    }

    /// That client had the lock, and others waited for so much of the time.
    pub(super) fn has_been_served(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        let Some(party) = self.party(client) else { return };
        let served: Vec<(Party, Time)> = self
            .parties(client)
            .filter_map(|as_whom| Some((as_whom, self.served_until(client, as_whom, id, hold, waited)?.0)))
            .collect();
        let (now, waiting) = (self.now, self.parties_with_one_place(id));
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.served.retain(|party, until| *until > now || waiting.contains(party));
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
        if weights == 0 {
            return None;
        }
        let debt = Debt { own: self.weight_on(as_whom, id), others: weights };
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
                *weight = weight.saturating_add(self.weight_of(waiting)).min(self.weight_on(party, id));
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
        let is_fellow = self.party_of(other) == Some(party);
        if is_fellow && self.others_after(holder, id, hold) == Some(Duration::ZERO) {
            return None;
        }
        let served = |as_whom: Party| self.gpus.get(&id)?.served.get(&as_whom).copied();
        let arrives = self.policy().place(&self.settings, self.now, &waiter);
        let arrival = match is_fellow {
            true => arrives,
            false => self.policy().place_among_parties(Time::ZERO, arrives, Time::ZERO),
        };
        // Those of a party have been served alike, but for one that claims less.
        let own = || self.first_of(other).and_then(|client| served(Party::Client(client))).unwrap_or_default();
        let stands = if is_fellow { place.rank.max(own()) } else { place.at };
        // As long as it goes on, its arrival comes as fast as time does.
        let mut ahead = stands.checked_sub(arrival);
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
        let places = request.wants.iter().map(|(client, gpus)| self.place(*client, gpus, request.place));
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
