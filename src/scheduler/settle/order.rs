//! The order of queues, and the precedence of waiting clients over holders, from policy, shares and memory together.

use crate::{
    api::*,
    fairness::{ShareOwner, Shares},
    gpu::{Access, Hold},
    machine::Machine,
    policy::{self, Precedence, Waiter},
    queue::{Blocked, Entity, QueueKey, Request},
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl Machine {
    /// The fairness state at this moment.
    pub(crate) fn shares(&self) -> Shares<'_> {
        let Self { now, settings, rules, gpus, queues, fairness, .. } = self;
        Shares { now: *now, settings, rules, gpus, queues, state: fairness }
    }

    /// The rank of a request that arrives at `arrival` among the requests of its owner, and when its age puts it before
    /// all of them. `None`: never.
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
        let several = wants.len() > 1 || self.queues.entity(client).gang().is_some();
        let waiter = Waiter { several, ..waiter };
        let ages_after = self.policy().ages_after(&self.settings, &waiter);
        let at = self.policy().rank(&self.settings, arrival, &waiter);
        (at, ages_after.map(|after| arrival.saturating_add(after)))
    }

    /// Since when the owner of a request that arrives now has waited for these GPUs; 0 where no rule divides the time,
    /// so that there is only one owner.
    pub(crate) fn joined(&self, client: ClientId, wants: &GpuSet) -> Time {
        if self.policy().tenants_take_turns() || !self.shares().have_classes() {
            return Time::ZERO;
        }
        let Some(owner) = self.shares().owner(client) else { return self.now };
        let peers = wants.iter().flat_map(|id| self.queues.queued_of(*id, owner));
        peers.filter_map(|entity| Some(self.queues.request(entity)?.key.joined)).min().unwrap_or(self.now)
    }

    /// Owners with queued requests, where the policy orders the requests of one owner by rank alone: their finish tags
    /// are kept even in the past, as the key that those requests share.
    fn owners_with_one_key(&self, id: GpuId) -> BTreeSet<ShareOwner> {
        let is_by_rank = !self.policy().tenants_take_turns() && self.shares().have_classes();
        is_by_rank.then(|| self.queues.owners_waiting(id)).into_iter().flatten().collect()
    }

    /// Ranks all requests anew after a change of the policy. Finish tags of the former policy are forgotten.
    pub(crate) fn rerank_all(&mut self) {
        self.fairness.clear_finish_tags();
        for entity in self.queues.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            let Some(request) = self.queues.request(entity) else { continue };
            let Some((client, wants)) = request.wants.first_key_value() else { continue };
            let arrival = request.since.values().min().copied().unwrap_or(self.now);
            let (rank, ages) = self.rank(*client, wants, arrival);
            let is_queued = request.blocked.is_none();
            if is_queued {
                self.dequeue(entity);
            }
            if let Some(request) = self.queues.request_mut(entity) {
                (request.key.rank, request.ages, request.aged) = (rank, ages, false);
            }
            if is_queued {
                self.enqueue(entity);
            }
        }
    }

    /// Puts a request that has waited long enough before all other requests of its owner.
    pub(crate) fn age(&mut self, entity: Entity) {
        let is_due = |request: &Request| !request.aged && request.ages.is_some_and(|at| at <= self.now);
        if !self.queues.request(entity).is_some_and(is_due) {
            return;
        }
        self.dequeue(entity);
        if let Some(request) = self.queues.request_mut(entity) {
            request.key.rank = Time::ZERO;
            request.aged = true;
        }
    }

    /// A client that waits for a GPU or holds it, as the policy sees it.
    fn waiter(&self, client: ClientId, id: GpuId) -> Waiter {
        let (Some(history), Some(gpu)) = (self.history(client, id), self.gpus.get(id)) else {
            return Waiter::default();
        };
        let lacking = self.need(client, id).saturating_sub(gpu.account(client).map_or(0, |account| account.allowance));
        let hold = self.gpus.hold(client, id);
        let held = hold.map_or(Duration::ZERO, |hold| self.now.saturating_sub(hold.since));
        let (attained, level_since) = history.progress.after(self.now, held);
        Waiter {
            burst: history.bursts.expected(),
            moving: gpu.moving_both_ways(lacking, &[client]),
            evicts: lacking > gpu.free(&self.settings),
            unmeasured: hold.is_none() && history.utilization.is_open(),
            waiters: self.queues.queue_length(id) + 1,
            attained,
            level_since,
            ..Waiter::default()
        }
    }

    /// A holder as the policy sees it while `first` waits.
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
            exchange: hold.exchange.map_or(Duration::ZERO, |(_, exchange)| exchange),
            fills: self.gpus.get(id).map_or(Duration::ZERO, |gpu| gpu.rates.both_ways(self.need(client, id), None)),
            batch: self.shares().share_of(client).weight == 0,
            waited: hold.waited(self.now),
            aged: hold.aged,
            same_owner: first.is_none_or(|first| self.owner_of(first) == self.shares().owner(client)),
            other_owner_after: self.other_owner_after(client, id, hold),
        }
    }

    /// How much longer a holder can run until its owner has used more than another owner that waits. `None`: no other
    /// owner waits, or the policy leaves that to the length of turns.
    fn other_owner_after(&self, client: ClientId, id: GpuId, hold: &Hold) -> Option<Duration> {
        if self.policy().tenants_take_turns() || !self.shares().have_classes() {
            return None;
        }
        let owner = self.shares().owner(client)?;
        let is_other = |entity: Entity| {
            let other = self.queues.first_client(entity).filter(|other| self.shares().owner(*other) != Some(owner));
            other.is_some_and(|other| self.shares().are_peers(other, client))
        };
        let (key, _) = self.queues.queue(id).find(|(_, entity)| is_other(*entity))?;
        let (until, weights) = self.shares().finish_tag(client, owner, id, hold, hold.waited(self.now))?;
        Some(weights.service_until(key.at.saturating_sub(until)))
    }

    /// The key that one client's part of a request has now.
    fn queue_key(&self, client: ClientId, wants: &GpuSet, before: QueueKey) -> QueueKey {
        let class = self.shares().class(client, wants);
        let owner = self.shares().owner(client);
        let tags = |id: &GpuId| [owner.and_then(|owner| self.shares().tag_of(owner, *id)), self.own_tag(client, *id)];
        let served = wants.iter().flat_map(tags).flatten().max().unwrap_or_default();
        QueueKey { class, at: self.policy().key_among_owners(served, before.rank, before.joined), ..before }
    }

    /// The finish tag of a client whose environment sets a lower weight, as far as it holds the client back. Where the policy
    /// orders the clients of one owner by rank, they share a key, and the tag counts until that time has come: after that,
    /// the client would stay behind every client without a tag of its own.
    fn own_tag(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let own = self.shares().owners(client).find(|owner| *owner == ShareOwner::Client(client))?;
        let tag = self.shares().tag_of(own, id)?;
        (self.policy().tenants_take_turns() || tag > self.now).then_some(tag)
    }

    /// When the position of a request changes by itself, since a client's own finish tag no longer holds it back.
    pub(crate) fn position_changes_at(&self, entity: Entity) -> Option<Time> {
        if self.policy().tenants_take_turns() {
            return None;
        }
        let wants =
            self.queues.request(entity)?.wants.iter().flat_map(|(client, gpus)| gpus.iter().map(|id| (*client, *id)));
        wants.filter_map(|(client, id)| self.own_tag(client, id)).min()
    }

    /// Requeues a client's request after a change of its owner.
    pub(crate) fn owner_changed(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        let is_queued = self.queues.request(entity).is_some_and(|request| request.blocked.is_none());
        if is_queued {
            self.dequeue(entity);
            self.join_queues(entity);
        }
    }

    /// Whether the queue by owners matches the requests of the clients, and no request precedes the request that it
    /// stands behind: for assertions.
    pub(crate) fn owners_are_current(&self, id: GpuId) -> bool {
        let mut owners: BTreeMap<ShareOwner, BTreeSet<Entity>> = BTreeMap::new();
        for entity in self.queues.queued(id) {
            if let Some(owner) = self.owner_of(entity) {
                owners.entry(owner).or_default().insert(entity);
            }
        }
        self.queues.owners_waiting(id).eq(owners.keys().copied())
            && owners.iter().all(|(owner, all)| self.queues.queued_of(id, *owner).collect::<BTreeSet<_>>() == *all)
            && self.queues.queue(id).all(|(key, entity)| self.queues.request(entity).is_some_and(|own| own.key == *key))
            && self.whole_queue(id).first().copied() == self.queues.first(id)
    }

    /// Charges a client's owners for a hold that ended, `waited` of it contended: their finish tags rise, and their
    /// requests move back.
    pub(crate) fn charge_service(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        debug_assert!(self.owners_are_current(id));
        let shares = self.shares();
        let Some(owner) = shares.owner(client) else { return };
        let tag = |owner| Some((owner, shares.finish_tag(client, owner, id, hold, waited)?.0));
        let tags: Vec<(ShareOwner, Time)> = shares.owners(client).filter_map(tag).collect();
        let (is_charged, keep) = (!tags.is_empty(), self.owners_with_one_key(id));
        self.fairness.set_finish_tags(self.now, id, &keep, tags);
        if is_charged {
            let mut own: Vec<Entity> = self.queues.first_of(id, owner).collect();
            own.sort_unstable_by_key(|entity| self.queues.request(*entity).map(|request| request.key));
            own.into_iter().for_each(|entity| self.requeue(entity));
        }
    }

    /// The finish tags of a client that is granted a GPU: its owner's, and its own. Advances virtual time first.
    pub(crate) fn finish_tags_before(&mut self, client: ClientId, id: GpuId) -> (Time, Time) {
        let ahead = self.shares().virtual_time_lead(id, client);
        if !ahead.is_zero() {
            self.fairness.advance_virtual_time(id, ahead);
            let queue: Vec<Entity> = self.queues.queue(id).map(|(_, entity)| entity).collect();
            queue.into_iter().for_each(|entity| self.requeue(entity));
        }
        self.shares().finish_tags_before(client, id)
    }

    /// Until when a holder would precede a waiting request if it released the lock and requested it again. Revoking it
    /// sooner would only cost a drain, since it would be granted again immediately. `None`: the request goes first.
    pub(crate) fn precedes_until(&self, holder: ClientId, id: GpuId, other: Entity) -> Option<Time> {
        let hold = self.gpus.hold(holder, id).filter(|hold| matches!(hold.entity, Entity::Solo(_)))?;
        let (owner, key) = (self.shares().owner(holder)?, self.queues.request(other)?.key);
        let waited = hold.waited(self.now);
        let waiter =
            Waiter { burst: self.history(holder, id)?.bursts.expected_after(waited), ..self.waiter(holder, id) };
        let is_same_owner = self.owner_of(other) == Some(owner);
        if key.has_turn.0 {
            return None;
        }
        if is_same_owner && self.other_owner_after(holder, id, hold) == Some(Duration::ZERO) {
            return None;
        }
        let tag = |owner: ShareOwner| self.shares().tag_of(owner, id);
        let arrives = self.policy().rank(&self.settings, self.now, &waiter);
        let arrival = match is_same_owner {
            true => arrives,
            false => self.policy().key_among_owners(Time::ZERO, arrives, Time::ZERO),
        };
        // Clients of one owner have the same finish tag, unless one has a lower weight of its own.
        let own_tag =
            || self.queues.first_client(other).and_then(|client| self.own_tag(client, id)).unwrap_or_default();
        let other_at = if is_same_owner { key.rank.max(own_tag()) } else { key.at };
        // While the holder keeps running, its arrival would advance as fast as time does.
        let mut ahead = other_at.checked_sub(arrival);
        for charged in self.shares().owners(holder) {
            let before = match self.shares().finish_tag(holder, charged, id, hold, waited) {
                // Its tag advances faster than time, by the weight of the waiting owners.
                Some((until, weights)) => other_at.checked_sub(until).map(|left| weights.service_until(left)),
                None if is_same_owner => (other_at > tag(charged).unwrap_or_default()).then_some(Duration::MAX),
                None => None,
            };
            ahead = ahead.min(before);
        }
        let is_lighter = self.shares().owners(holder).any(|charged| charged != owner);
        let by_rank = key.rank.checked_sub(arrives).filter(|_| is_same_owner && !is_lighter);
        let ahead = ahead.max(by_rank)?;
        (!ahead.is_zero()).then(|| self.now.saturating_add(ahead))
    }

    /// The owner of a request's turns.
    pub(crate) fn owner_of(&self, entity: Entity) -> Option<ShareOwner> {
        self.shares().owner(self.queues.first_client(entity)?)
    }

    /// The key of a request as of now.
    pub(crate) fn current_key(&self, entity: Entity) -> Option<QueueKey> {
        let request = self.queues.request(entity)?;
        let keys = request.wants.iter().map(|(client, gpus)| self.queue_key(*client, gpus, request.key));
        // A gang has the last of its members' classes and the latest of their times.
        let key = keys.reduce(|a, b| QueueKey { class: a.class.max(b.class), at: a.at.max(b.at), ..a })?;
        Some(QueueKey { has_turn: Reverse(self.has_turn(entity)), ..key })
    }

    /// All requests in the queue of a GPU, in the order in which they would be served if nothing changed.
    pub(crate) fn whole_queue(&self, id: GpuId) -> Vec<Entity> {
        let behind =
            self.queues.behind_first(id).filter_map(|(first, entity)| Some((self.key_behind(first, entity)?, entity)));
        let mut queue: Vec<_> = self.queues.queue(id).map(|(key, entity)| (*key, entity)).chain(behind).collect();
        queue.sort_unstable();
        queue.into_iter().map(|(_, entity)| entity).collect()
    }

    /// The key of a request that stands behind another request of its owner, whose key is `first`. That key may still
    /// count service until a time that has passed, which is forgotten elsewhere.
    pub(crate) fn key_behind(&self, first: &QueueKey, entity: Entity) -> Option<QueueKey> {
        self.current_key(entity).map(|key| QueueKey { at: key.at.max(first.at), ..key })
    }

    /// Moves a queued request to its present position.
    pub(crate) fn requeue(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity).filter(|request| request.blocked.is_none()) else { return };
        let Some(key) = self.current_key(entity).filter(|key| *key != request.key) else { return };
        self.dequeue(entity);
        if let Some(request) = self.queues.request_mut(entity) {
            request.key = key;
        }
        self.enqueue(entity);
    }

    /// Whether a request is admitted beside a holder that drains: in `auto`, a request that does not wait for turns to
    /// end does not wait for queued work either, if its memory fits beside the holder's. The GPU time-slices the two
    /// until the drain ends.
    pub(crate) fn admits_while_draining(&self, holder: ClientId, hold: &Hold, waiter: Entity) -> bool {
        let is_auto = self.settings.anti_thrash == AntiThrash::Auto;
        is_auto && hold.revoked.is_some() && self.shares().precedence(waiter, holder) == Precedence::Before
    }

    /// Whether a request that also wants other GPUs has to wait here for a request or holder of a better tier. That may
    /// take long, and until then the request would block the other GPUs for all other clients.
    pub(crate) fn waits_behind(&self, entity: Entity, id: GpuId) -> bool {
        let Some(request) = self.queues.request(entity).filter(|_| self.shares().have_classes()) else { return false };
        if self.access(id) == Access::Gone {
            return false;
        }
        let tier = request.key.class.tier;
        let several = request.wants.values().flatten().any(|other| *other != id);
        let waits = || self.queues.queue(id).next().is_some_and(|(key, _)| key.class.tier < tier);
        let is_better = |(holder, hold): (ClientId, &Hold)| {
            !hold.is_bypassed() && hold.entity != entity && self.shares().class_of_holder(holder).tier < tier
        };
        several && (waits() || (self.gpus.holds_on(id).any(is_better) && !self.is_admissible(entity, id)))
    }

    /// Takes requests out of a queue that would only block other GPUs, since one of a better tier waits here.
    pub(crate) fn defer_behind(&mut self, id: GpuId) {
        if !self.shares().have_classes() {
            return;
        }
        let queue = self.queues.queue(id).map(|(_, entity)| entity);
        let behind: Vec<Entity> = queue.skip(1).filter(|entity| self.waits_behind(*entity, id)).collect();
        behind.into_iter().for_each(|entity| self.block(entity, Blocked::Behind(id)));
    }

    /// Moves all requests to their present positions after a change of rules.
    pub(crate) fn requeue_all(&mut self) {
        for entity in self.queues.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            self.requeue(entity);
            let blocked = self.queues.request(entity).and_then(|request| request.blocked);
            let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.is_delayed(entity);
            if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
                self.enqueue(entity);
            }
        }
        self.fairness.forget_usage(self.now, self.settings.time_period);
        self.effects.touch_all(self.gpus.ids());
    }

    /// Moves requests whose class depends on usage to their present positions. Returns when to look again.
    pub(crate) fn reclassify(&mut self, id: GpuId) -> Option<Time> {
        if !self.shares().are_watched() {
            return None;
        }
        let is_watched =
            |entity: &Entity| self.queues.clients_of(*entity).any(|client| self.shares().is_watched(client));
        let queue: Vec<Entity> = self.queues.queued(id).filter(is_watched).collect();
        for entity in queue {
            match self.shares().request_capped_until(entity) {
                Some(until) => self.block(entity, Blocked::Until(until)),
                None => self.requeue(entity),
            }
        }
        self.queues.first(id)?;
        self.shares().class_changes_at(id)
    }
}
