//! The order of a GPU's queue: weighted fair queueing with virtual finish times (Demers, Keshav and Shenker, "Analysis and
//! Simulation of a Fair Queueing Algorithm", SIGCOMM 1989), between owners of turns ([`ShareOwner`]: users, or groups whose rule gives
//! them a share). Among the clients of one owner the policy decides.
//!
//! An owner that held the lock while others waited has used some of their time. Its *finish tag* is the time at which it will
//! have waited that off: the time it used, scaled by the weights of the waiting owners over its own weight. Its next request is
//! queued by that tag. Time in which no client could run because the owner's memory was being moved in counts as used. So a user
//! with ten clients gets no more turns than a user with one, and a newcomer does not wait for others to catch up with it.
//!
//! Tags are times on the machine's clock. A request has the same [`QueueKey`] in the queue of each GPU that it wants.

use crate::{
    api::*,
    fairness::share::ShareOwner,
    lock::{Entity, Hold, QueueKey, Request},
    machine::Machine,
    policy::{Runner, Waiter},
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
    pub(crate) fn rank(&self, client: ClientId, wants: &GpuSet, arrival: Time) -> (Time, Option<Time>) {
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
        let several = wants.len() > 1 || self.lock.entity(client).gang().is_some();
        let waiter = Waiter { several, ..waiter };
        let patience = self.policy().patience(&self.settings, &waiter);
        let at = self.policy().place(&self.settings, arrival, &waiter);
        (at, patience.map(|patience| arrival.saturating_add(patience)))
    }

    /// Since when the party of one that asks now has waited there. Where no rule divides the time there is but one that counts.
    pub(crate) fn joined(&self, client: ClientId, wants: &GpuSet) -> Time {
        if self.policy().users_take_turns() || !self.has_classes() {
            return Time::ZERO;
        }
        let owner = self.owner(client);
        let lines = wants.iter().flat_map(|id| self.lock.queue(*id));
        let peers = lines.filter(|(_, entity)| self.owner_of(*entity) == owner);
        peers.map(|(key, _)| key.joined).min().unwrap_or(self.now)
    }

    /// Those who wait of whom all stand where their party does, and among themselves by their ranks: that key is kept.
    fn owners_with_one_key(&self, id: GpuId) -> BTreeSet<ShareOwner> {
        let policy_knows = !self.policy().users_take_turns() && self.has_classes();
        let queue = policy_knows.then(|| self.lock.queue(id)).into_iter().flatten();
        queue.filter_map(|(_, entity)| self.owner_of(entity)).collect()
    }

    /// The policy is another: what it says of places holds for all who wait, and nobody owes anything by what it was.
    pub(crate) fn rerank_all(&mut self) {
        self.gpus.values_mut().for_each(|gpu| gpu.finish_tags.clear());
        for entity in self.lock.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            let Some(request) = self.lock.request(entity) else { continue };
            let Some((client, wants)) = request.wants.first_key_value() else { continue };
            let arrival = request.since.values().min().copied().unwrap_or(self.now);
            let (rank, ages) = self.rank(*client, wants, arrival);
            let is_in_line = request.blocked.is_none();
            if is_in_line {
                self.dequeue(entity);
            }
            if let Some(request) = self.lock.request_mut(entity) {
                (request.key.rank, request.ages, request.aged) = (rank, ages, false);
            }
            if is_in_line {
                self.enqueue(entity);
            }
        }
    }

    /// Who has waited for long enough goes before all others of its party.
    pub(crate) fn age(&mut self, entity: Entity) {
        let is_due = |request: &Request| !request.aged && request.ages.is_some_and(|at| at <= self.now);
        if !self.lock.request(entity).is_some_and(is_due) {
            return;
        }
        self.dequeue(entity);
        if let Some(request) = self.lock.request_mut(entity) {
            request.key.rank = Time::ZERO;
            request.aged = true;
        }
    }

    fn waiter(&self, client: ClientId, id: GpuId) -> Waiter {
        let (Some(attachment), Some(gpu)) = (self.attachment(client, id), self.gpus.get(&id)) else {
            return Waiter::default();
        };
        let lacking =
            self.need(client, id).saturating_sub(gpu.ledger.account(client).map_or(0, |account| account.allowance));
        let hold = self.lock.hold(client, id);
        let held = hold.map_or(Duration::ZERO, |hold| self.now.saturating_sub(hold.since));
        let (had, entered) = attachment.progress.after(self.now, held);
        Waiter {
            burst: attachment.bursts.expected(),
            moving: self.moving_both_ways(id, lacking, &[client]),
            evicts: lacking > gpu.free(&self.settings),
            unmeasured: hold.is_none() && attachment.utilization.is_open(),
            waiters: self.lock.queue_length(id) + 1,
            had,
            entered,
            ..Waiter::default()
        }
    }

    /// What a holder is to who waits.
    pub(crate) fn runner(&self, client: ClientId, id: GpuId, hold: &Hold, first: Option<Entity>) -> Runner {
        let waiter = self.waiter(client, id);
        Runner {
            rank: self.policy().place(&self.settings, self.now, &waiter),
            had: waiter.had,
            waited: hold.waited(self.now),
            aged: hold.aged,
            peer: first.is_none_or(|first| self.owner_of(first) == self.owner(client)),
            others_after: self.others_after(client, id, hold),
        }
    }

    /// How much longer a holder can run until its party will have had more than another one that waits. None where the policy
    /// has parties take turns by ending each of theirs, or nobody else waits.
    fn others_after(&self, client: ClientId, id: GpuId, hold: &Hold) -> Option<Duration> {
        if self.policy().users_take_turns() || !self.has_classes() {
            return None;
        }
        let owner = self.owner(client)?;
        let is_other = |entity: Entity| {
            let other = self.lock.first_client(entity).filter(|other| self.owner(*other) != Some(owner));
            other.is_some_and(|other| self.are_peers(other, client))
        };
        let (key, _) = self.lock.queue(id).find(|(_, entity)| is_other(*entity))?;
        let (until, debt) = self.finish_tag(client, owner, id, hold, hold.waited(self.now))?;
        Some(debt.until_as_much(key.at.saturating_sub(until)))
    }

    /// Where a request stands in line now.
    fn queue_key(&self, client: ClientId, wants: &GpuSet, before: QueueKey) -> QueueKey {
        let class = self.class(client, wants);
        let served = wants.iter().map(|id| self.latest_finish_tag(client, *id)).max().unwrap_or_default();
        QueueKey { class, at: self.policy().key_among_owners(served, before.rank, before.joined), ..before }
    }

    /// That client had the lock, and others waited for so much of the time.
    pub(crate) fn charge_service(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        let Some(owner) = self.owner(client) else { return };
        let served: Vec<(ShareOwner, Time)> = self
            .owners(client)
            .filter_map(|as_whom| Some((as_whom, self.finish_tag(client, as_whom, id, hold, waited)?.0)))
            .collect();
        let (now, waiting) = (self.now, self.owners_with_one_key(id));
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.finish_tags.retain(|owner, until| *until > now || waiting.contains(owner));
        if served.is_empty() {
            return;
        }
        for (as_whom, until) in served {
            let before = gpu.finish_tags.entry(as_whom).or_default();
            *before = until.max(*before);
        }
        for entity in self.lock.queued(id) {
            if self.owner_of(entity) == Some(owner) {
                self.requeue(entity);
            }
        }
    }

    /// Until when a client has been served as its party, or as itself, if it had the lock and others waited for so much of the
    /// time; and what it owes the others then. None where nobody's time was taken.
    fn finish_tag(
        &self,
        client: ClientId,
        as_whom: ShareOwner,
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
        let before = if as_whom == ShareOwner::Client(client) { hold.own_finish_tag } else { hold.finish_tag };
        let begun = hold.since.saturating_sub(hold.moved).max(before);
        Some((begun.saturating_add(waited).saturating_add(debt.of(waited)), debt))
    }

    /// What those who wait there, and share it with that client, count for together: other parties, each for no more than
    /// those of it who wait. For the client as itself its fellows are others, too.
    fn weights_of_others(&self, client: ClientId, as_whom: ShareOwner, id: GpuId) -> u32 {
        let own = self.owner(client);
        let mut others: BTreeMap<ShareOwner, u32> = BTreeMap::new();
        for waiting in self.lock.waiting_on(id) {
            let Some(owner) = self.owner(waiting) else { continue };
            let is_self = if own == Some(as_whom) { own == Some(owner) } else { waiting == client };
            if !is_self && self.are_peers(waiting, client) {
                let weight = others.entry(owner).or_default();
                *weight = weight.saturating_add(self.weight_of(waiting)).min(self.weight_on(owner, id));
            }
        }
        others.into_values().fold(0, u32::saturating_add)
    }

    /// Until when the client's party, and the client itself, had been served when it was granted that GPU: what they had while
    /// the others had no use for theirs is not owed to them.
    pub(crate) fn finish_tags_before(&mut self, client: ClientId, id: GpuId) -> (Time, Time) {
        let Some(owner) = self.owner(client) else { return Default::default() };
        self.advance_virtual_time(id, client);
        let Some(gpu) = self.gpus.get(&id) else { return Default::default() };
        let waiting = || self.lock.waiting_on(id).chain(self.lock.preempted(id));
        let served = |as_whom: ShareOwner, is_wanted: bool| {
            gpu.finish_tags.get(&as_whom).copied().filter(|_| is_wanted).unwrap_or_default()
        };
        let by_others = waiting().any(|other| self.owner(other).is_some_and(|other| other != owner));
        let by_anybody = waiting().any(|other| other != client);
        (served(owner, by_others), served(ShareOwner::Client(client), by_anybody))
    }

    /// Where all who want a GPU have been served for long to come, since those are gone to whom they owed it, that time is
    /// passed over. A time quantum of it is left, since turns do not end to the moment.
    fn advance_virtual_time(&mut self, id: GpuId, granted: ClientId) {
        let until = self.now.saturating_add(self.settings.time_quantum);
        let served = self.lock.waiting_on(id).chain([granted]).map(|client| self.latest_finish_tag(client, id));
        let least = served.min().unwrap_or_default();
        let ahead = least.saturating_sub(until);
        let Some(gpu) = self.gpus.get_mut(&id).filter(|_| !ahead.is_zero()) else { return };
        gpu.finish_tags.values_mut().for_each(|until| *until = until.saturating_sub(ahead));
        for entity in self.lock.queued(id) {
            self.requeue(entity);
        }
    }

    /// Until when a holder would stand before that request if it gave the lock back: to take it away sooner would cost a
    /// drain, and it would be granted at once again. None where the other goes first.
    pub(crate) fn precedes_until(&self, holder: ClientId, id: GpuId, other: Entity) -> Option<Time> {
        let hold = self.lock.hold(holder, id).filter(|hold| matches!(hold.entity, Entity::Solo(_)))?;
        let (owner, key) = (self.owner(holder)?, self.lock.request(other)?.key);
        let waited = hold.waited(self.now);
        let waiter =
            Waiter { burst: self.attachment(holder, id)?.bursts.expected_after(waited), ..self.waiter(holder, id) };
        let is_same_owner = self.owner_of(other) == Some(owner);
        if is_same_owner && self.others_after(holder, id, hold) == Some(Duration::ZERO) {
            return None;
        }
        let served = |as_whom: ShareOwner| self.gpus.get(&id)?.finish_tags.get(&as_whom).copied();
        let arrives = self.policy().place(&self.settings, self.now, &waiter);
        let arrival = match is_same_owner {
            true => arrives,
            false => self.policy().key_among_owners(Time::ZERO, arrives, Time::ZERO),
        };
        // Those of a party have been served alike, but for one that claims less.
        let own =
            || self.lock.first_client(other).and_then(|client| served(ShareOwner::Client(client))).unwrap_or_default();
        let stands = if is_same_owner { key.rank.max(own()) } else { key.at };
        // As long as it goes on, its arrival comes as fast as time does.
        let mut ahead = stands.checked_sub(arrival);
        for as_whom in self.owners(holder) {
            let before = match self.finish_tag(holder, as_whom, id, hold, waited) {
                // Of every moment of it, it owes something to each of the others.
                Some((until, debt)) => stands.checked_sub(until).map(|left| debt.until_as_much(left)),
                None if is_same_owner => (stands > served(as_whom).unwrap_or_default()).then_some(Duration::MAX),
                None => None,
            };
            ahead = ahead.min(before);
        }
        let is_lighter = self.owners(holder).any(|as_whom| as_whom != owner);
        let by_rank = key.rank.checked_sub(arrives).filter(|_| is_same_owner && !is_lighter);
        let ahead = ahead.max(by_rank)?;
        (!ahead.is_zero()).then(|| self.now.saturating_add(ahead))
    }

    /// The share of an owner that is a client by itself.
    pub(crate) fn client_share(&self, client: ClientId) -> Share {
        let default = Share::default();
        self.rules.env(client).map_or(default, |limits| Share {
            weight: limits.weight.unwrap_or(default.weight),
            max: limits.time_max,
            ..default
        })
    }

    /// The owners as which a client takes turns: that of its group or user, and itself where its environment sets a lower weight.
    pub(crate) fn owners(&self, client: ClientId) -> impl Iterator<Item = ShareOwner> {
        let owner = self.owner(client);
        let own = self.rules.env(client).and_then(|limits| limits.weight);
        let is_lower = |own: &u16| owner.is_some_and(|owner| *own < self.share(owner).weight);
        owner.into_iter().chain(own.filter(is_lower).map(|_| ShareOwner::Client(client)))
    }

    /// The weight of a client when time is divided, of its owner's.
    pub(crate) fn weight_of(&self, client: ClientId) -> u32 {
        self.owners(client).map(|owner| self.weight(owner)).min().unwrap_or(0)
    }

    /// The virtual time until which a client has been served there.
    pub(crate) fn latest_finish_tag(&self, client: ClientId, id: GpuId) -> Time {
        let Some(gpu) = self.gpus.get(&id) else { return Time::ZERO };
        self.owners(client).filter_map(|owner| gpu.finish_tags.get(&owner).copied()).max().unwrap_or_default()
    }

    fn owner_of(&self, entity: Entity) -> Option<ShareOwner> {
        self.owner(self.lock.first_client(entity)?)
    }

    /// Where a request belongs now.
    pub(crate) fn current_key(&self, entity: Entity) -> Option<QueueKey> {
        let request = self.lock.request(entity)?;
        let places = request.wants.iter().map(|(client, gpus)| self.queue_key(*client, gpus, request.key));
        // A gang is of the last class that one of it is of, and as late as the one that has had most.
        let key = places.reduce(|a, b| QueueKey { class: a.class.max(b.class), at: a.at.max(b.at), ..a })?;
        let at = self.goes_on_since(entity).map_or(key.at, |since| since.min(key.at));
        Some(QueueKey { at, ..key })
    }

    /// Moves a request that stands in line to where it belongs now.
    pub(crate) fn requeue(&mut self, entity: Entity) {
        let Some(request) = self.lock.request(entity).filter(|request| request.blocked.is_none()) else { return };
        let Some(key) = self.current_key(entity).filter(|key| *key != request.key) else { return };
        self.dequeue(entity);
        if let Some(request) = self.lock.request_mut(entity) {
            request.key = key;
        }
        self.enqueue(entity);
    }
}
