//! The order of queues, and what holders are to waiting clients: what policy, shares and memory say together.

use crate::{
    api::*,
    fairness::{Precedence, ShareOwner, Shares},
    lock::{Blocked, Entity, Hold, QueueKey, Request},
    machine::Machine,
    policy::{self, Waiter},
};
use std::collections::BTreeSet;
use std::time::Duration;

impl Machine {
    pub(crate) fn shares(&self) -> Shares<'_> {
        let Self { now, settings, rules, lock, fairness, .. } = self;
        Shares { now: *now, settings, rules, lock, state: fairness }
    }

    /// Where a request that came then stands among those of its party, and when it goes before all of them.
    pub(crate) fn rank(&self, client: ClientId, wants: &GpuSet, arrival: Time) -> (Time, Option<Time>) {
        let waiters = wants.iter().map(|gpu| self.waiter(client, *gpu));
        let waiter = waiters.reduce(|a, b| Waiter {
            burst: a.burst.max(b.burst),
            moving: a.moving.max(b.moving),
            evicts: a.evicts || b.evicts,
            waiters: a.waiters.max(b.waiters),
            attained: a.attained.max(b.attained),
            level_since: a.level_since.max(b.level_since),
            ..a
        });
        let Some(waiter) = waiter else { return (arrival, None) };
        let several = wants.len() > 1 || self.lock.entity(client).gang().is_some();
        let waiter = Waiter { several, ..waiter };
        let ages_after = self.policy().ages_after(&self.settings, &waiter);
        let at = self.policy().rank(&self.settings, arrival, &waiter);
        (at, ages_after.map(|after| arrival.saturating_add(after)))
    }

    /// Since when the party of one that asks now has waited there. Where no rule divides the time there is but one that counts.
    pub(crate) fn joined(&self, client: ClientId, wants: &GpuSet) -> Time {
        if self.policy().users_take_turns() || !self.shares().have_classes() {
            return Time::ZERO;
        }
        let owner = self.shares().owner(client);
        let lines = wants.iter().flat_map(|id| self.lock.queue(*id));
        let peers = lines.filter(|(_, entity)| self.owner_of(*entity) == owner);
        peers.map(|(key, _)| key.joined).min().unwrap_or(self.now)
    }

    /// Those who wait of whom all stand where their party does, and among themselves by their ranks: that key is kept.
    fn owners_with_one_key(&self, id: GpuId) -> BTreeSet<ShareOwner> {
        let policy_knows = !self.policy().users_take_turns() && self.shares().have_classes();
        let queue = policy_knows.then(|| self.lock.queue(id)).into_iter().flatten();
        queue.filter_map(|(_, entity)| self.owner_of(entity)).collect()
    }

    /// The policy is another: what it says of places holds for all who wait, and nobody owes anything by what it was.
    pub(crate) fn rerank_all(&mut self) {
        self.fairness.clear_finish_tags();
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
        let (Some(history), Some(gpu)) = (self.histories.of(client, id), self.memory.get(&id)) else {
            return Waiter::default();
        };
        let lacking =
            self.need(client, id).saturating_sub(gpu.ledger.account(client).map_or(0, |account| account.allowance));
        let hold = self.lock.hold(client, id);
        let held = hold.map_or(Duration::ZERO, |hold| self.now.saturating_sub(hold.since));
        let (attained, level_since) = history.progress.after(self.now, held);
        Waiter {
            burst: history.bursts.expected(),
            moving: self.moving_both_ways(id, lacking, &[client]),
            evicts: lacking > gpu.free(&self.settings),
            unmeasured: hold.is_none() && history.utilization.is_open(),
            waiters: self.lock.queue_length(id) + 1,
            attained,
            level_since,
            ..Waiter::default()
        }
    }

    /// What a holder is to who waits.
    pub(crate) fn policy_holder(
        &self,
        client: ClientId,
        id: GpuId,
        hold: &Hold,
        first: Option<Entity>,
    ) -> policy::Holder {
        let waiter = self.waiter(client, id);
        policy::Holder {
            rank: self.policy().rank(&self.settings, self.now, &waiter),
            attained: waiter.attained,
            waited: hold.waited(self.now),
            aged: hold.aged,
            same_owner: first.is_none_or(|first| self.owner_of(first) == self.shares().owner(client)),
            other_owner_after: self.other_owner_after(client, id, hold),
        }
    }

    /// How much longer a holder can run until its party will have had more than another one that waits. None where the policy
    /// has parties take turns by ending each of theirs, or nobody else waits.
    fn other_owner_after(&self, client: ClientId, id: GpuId, hold: &Hold) -> Option<Duration> {
        if self.policy().users_take_turns() || !self.shares().have_classes() {
            return None;
        }
        let owner = self.shares().owner(client)?;
        let is_other = |entity: Entity| {
            let other = self.lock.first_client(entity).filter(|other| self.shares().owner(*other) != Some(owner));
            other.is_some_and(|other| self.shares().are_peers(other, client))
        };
        let (key, _) = self.lock.queue(id).find(|(_, entity)| is_other(*entity))?;
        let (until, debt) = self.shares().finish_tag(client, owner, id, hold, hold.waited(self.now))?;
        Some(debt.service_until(key.at.saturating_sub(until)))
    }

    /// Where a request stands in line now.
    fn queue_key(&self, client: ClientId, wants: &GpuSet, before: QueueKey) -> QueueKey {
        let class = self.shares().class(client, wants);
        let served = wants.iter().map(|id| self.shares().latest_finish_tag(client, *id)).max().unwrap_or_default();
        QueueKey { class, at: self.policy().key_among_owners(served, before.rank, before.joined), ..before }
    }

    /// A client had the lock, and others waited for so much of the time: its owners' finish tags rise, and their requests move back.
    pub(crate) fn charge_service(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        let shares = self.shares();
        let Some(owner) = shares.owner(client) else { return };
        let tag = |as_whom| Some((as_whom, shares.finish_tag(client, as_whom, id, hold, waited)?.0));
        let tags: Vec<(ShareOwner, Time)> = shares.owners(client).filter_map(tag).collect();
        let (is_charged, keep) = (!tags.is_empty(), self.owners_with_one_key(id));
        self.fairness.set_finish_tags(self.now, id, &keep, tags);
        for entity in self.lock.queued(id).into_iter().filter(|_| is_charged) {
            if self.owner_of(entity) == Some(owner) {
                self.requeue(entity);
            }
        }
    }

    /// The finish tags with which a client is granted a GPU: its owner's, and its own.
    pub(crate) fn finish_tags_before(&mut self, client: ClientId, id: GpuId) -> (Time, Time) {
        let ahead = self.shares().virtual_time_lead(id, client);
        if !ahead.is_zero() {
            self.fairness.advance_virtual_time(id, ahead);
            self.lock.queued(id).into_iter().for_each(|entity| self.requeue(entity));
        }
        self.shares().finish_tags_before(client, id)
    }

    /// Until when a holder would stand before that request if it gave the lock back: to take it away sooner would cost a
    /// drain, and it would be granted at once again. None where the other goes first.
    pub(crate) fn precedes_until(&self, holder: ClientId, id: GpuId, other: Entity) -> Option<Time> {
        let hold = self.lock.hold(holder, id).filter(|hold| matches!(hold.entity, Entity::Solo(_)))?;
        let (owner, key) = (self.shares().owner(holder)?, self.lock.request(other)?.key);
        let waited = hold.waited(self.now);
        let waiter =
            Waiter { burst: self.histories.of(holder, id)?.bursts.expected_after(waited), ..self.waiter(holder, id) };
        let is_same_owner = self.owner_of(other) == Some(owner);
        if is_same_owner && self.other_owner_after(holder, id, hold) == Some(Duration::ZERO) {
            return None;
        }
        let served = |as_whom: ShareOwner| self.shares().tag_of(as_whom, id);
        let arrives = self.policy().rank(&self.settings, self.now, &waiter);
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
        for as_whom in self.shares().owners(holder) {
            let before = match self.shares().finish_tag(holder, as_whom, id, hold, waited) {
                // Of every moment of it, it owes something to each of the others.
                Some((until, debt)) => stands.checked_sub(until).map(|left| debt.service_until(left)),
                None if is_same_owner => (stands > served(as_whom).unwrap_or_default()).then_some(Duration::MAX),
                None => None,
            };
            ahead = ahead.min(before);
        }
        let is_lighter = self.shares().owners(holder).any(|as_whom| as_whom != owner);
        let by_rank = key.rank.checked_sub(arrives).filter(|_| is_same_owner && !is_lighter);
        let ahead = ahead.max(by_rank)?;
        (!ahead.is_zero()).then(|| self.now.saturating_add(ahead))
    }

    fn owner_of(&self, entity: Entity) -> Option<ShareOwner> {
        self.shares().owner(self.lock.first_client(entity)?)
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

    /// Whether a holder that drains keeps that waiter from nothing: in `auto`, one who waits for no turn to end does not wait
    /// for the work that is queued either, if its memory has room beside. The GPU shares itself out for that long.
    pub(crate) fn makes_way(&self, holder: ClientId, hold: &Hold, waiter: Entity) -> bool {
        let is_auto = self.settings.anti_thrash == AntiThrash::Auto;
        is_auto && hold.revoked.is_some() && self.shares().precedence(waiter, holder) == Precedence::Before
    }

    /// Whether a request that wants other GPUs as well waits here for one of a better tier, which may be long: it would keep
    /// the others from everybody meanwhile.
    pub(crate) fn waits_behind(&self, entity: Entity, id: GpuId) -> bool {
        let Some(request) = self.lock.request(entity).filter(|_| self.shares().have_classes()) else { return false };
        let tier = request.key.class.tier;
        let several = request.wants.values().flatten().any(|other| *other != id);
        let waits = || self.lock.queue(id).next().is_some_and(|(key, _)| key.class.tier < tier);
        let is_better = |(holder, hold): (ClientId, &Hold)| {
            !hold.is_bypassed() && hold.entity != entity && self.shares().class_of_holder(holder).tier < tier
        };
        several && (waits() || (self.lock.holds_on(id).any(is_better) && !self.is_admissible(entity, id)))
    }

    /// Takes those out of that line who only keep other GPUs from others, as one of a better tier waits there.
    pub(crate) fn defer_behind(&mut self, id: GpuId) {
        if !self.shares().have_classes() {
            return;
        }
        let queue = self.lock.queue(id).map(|(_, entity)| entity);
        let behind: Vec<Entity> = queue.skip(1).filter(|entity| self.waits_behind(*entity, id)).collect();
        behind.into_iter().for_each(|entity| self.block(entity, Blocked::Behind(id)));
    }

    /// Rules are others: everybody who waits stands where it belongs by them.
    pub(crate) fn requeue_all(&mut self) {
        for entity in self.lock.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            self.requeue(entity);
            let blocked = self.lock.request(entity).and_then(|request| request.blocked);
            let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.is_delayed(entity);
            if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
                self.enqueue(entity);
            }
        }
        self.fairness.forget_usage(self.now, self.settings.time_period);
        self.effects.touch_all(self.memory.keys().copied());
    }

    /// Puts requests whose class depends on what they have had where they belong now. Returns when to look again.
    pub(crate) fn reclassify(&mut self, id: GpuId) -> Option<Time> {
        if !self.shares().are_watched() {
            return None;
        }
        let is_watched = |entity: &Entity| self.lock.clients_of(*entity).any(|client| self.shares().is_watched(client));
        let queue: Vec<Entity> = self.lock.queued(id).into_iter().filter(is_watched).collect();
        for entity in queue {
            match self.shares().request_capped_until(entity) {
                Some(until) => self.block(entity, Blocked::Until(until)),
                None => self.requeue(entity),
            }
        }
        self.lock.first(id)?;
        self.shares().class_changes_at(id)
    }
}
