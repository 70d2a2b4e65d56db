//! The order of queues, and the precedence of waiting clients over holders. Both follow from
//! policy, shares and memory together.

use super::Model;
use crate::{
    api::*,
    fairness::{ShareOwner, Shares},
    gpu::Hold,
    policy::{self, Waiter},
    queue::{Entity, QueueKey},
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

impl<'a> Model<'a> {
    /// The fairness state now.
    pub fn shares(&self) -> Shares<'a> {
        let Self { now, settings, rules, clients, gpus, queues, fairness, .. } = *self;
        Shares { now, settings, rules, clients, gpus, queues, state: fairness }
    }

    /// The rank, among its owner's requests, of a request that arrives at `arrival`, and the time
    /// when the request ages and precedes all of them. `None`: the request never ages.
    pub fn rank(&self, client: ClientId, wants: &GpuSet, arrival: Time) -> (Time, Option<Time>) {
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
        let ages_after = self.policy().ages_after(self.settings, &waiter);
        let at = self.policy().rank(self.settings, arrival, &waiter);
        (at, ages_after.map(|after| arrival.saturating_add(after)))
    }

    /// When the owner of a request that arrives now began to wait for these GPUs. 0 if the policy
    /// ignores this time, or if no rule divides the GPU's time, because then there is only one
    /// owner.
    pub fn joined(&self, client: ClientId, wants: &GpuSet) -> Time {
        if self.policy().tenants_take_turns() || !self.rules.have_classes() {
            return Time::ZERO;
        }
        let Some(owner) = self.shares().owner(client) else { return self.now };
        let peers = wants.iter().flat_map(|id| self.queues.queued_of(*id, owner));
        peers.filter_map(|entity| Some(self.queues.request(entity)?.key.joined)).min().unwrap_or(self.now)
    }

    /// The owners with queued requests, if the policy orders the requests of one owner by rank
    /// alone; empty otherwise. The finish tags of these owners are kept even after they have
    /// passed, because all requests of an owner have the owner's tag as their key.
    pub fn owners_with_one_key(&self, id: GpuId) -> BTreeSet<ShareOwner> {
        let is_by_rank = !self.policy().tenants_take_turns() && self.rules.have_classes();
        is_by_rank.then(|| self.queues.owners_waiting(id)).into_iter().flatten().collect()
    }

    /// The policy's view of a client that waits for a GPU or holds it.
    pub fn waiter(&self, client: ClientId, id: GpuId) -> Waiter {
        let (Some(history), Some(gpu)) = (self.gpus.history(client, id), self.gpus.get(id)) else {
            return Waiter::default();
        };
        let lacking = self.need(client, id).saturating_sub(gpu.account(client).map_or(0, |account| account.allowance));
        let hold = self.gpus.hold(client, id);
        let held = hold.map_or(Duration::ZERO, |hold| self.now.saturating_sub(hold.since));
        let (attained, level_since) = history.progress.after(self.now, held);
        Waiter {
            burst: history.bursts.expected(),
            moving: gpu.moving_both_ways(lacking, &[client]),
            evicts: lacking > gpu.free(self.settings),
            unmeasured: hold.is_none() && history.utilization.is_open(),
            waiters: self.queues.queue_length(id) + 1,
            attained,
            level_since,
            ..Waiter::default()
        }
    }

    /// The policy's view of a holder while `first` waits.
    pub fn policy_holder(&self, client: ClientId, id: GpuId, hold: &Hold, first: Option<Entity>) -> policy::Holder {
        let waiter = self.waiter(client, id);
        policy::Holder {
            rank: self.policy().rank(self.settings, self.now, &waiter),
            attained: waiter.attained,
            exchange: hold.exchange.map_or(Duration::ZERO, |(_, exchange)| exchange),
            fills: self.gpus.get(id).map_or(Duration::ZERO, |gpu| gpu.rates.both_ways(self.need(client, id), None)),
            batch: self.shares().share_of(client).weight == 0,
            waited: hold.waited(self.now),
            burst: waiter.burst,
            is_first_burst: self.gpus.history(client, id).is_some_and(|history| history.bursts.is_first()),
            aged: hold.aged,
            same_owner: first.is_none_or(|first| self.owner_of(first) == self.shares().owner(client)),
            other_owner_after: self.other_owner_after(client, id, hold),
        }
    }

    /// How much longer a holder can run until its owner has used more than another waiting owner.
    /// `None`: no other owner waits, or the policy relies on the length of turns alone.
    pub fn other_owner_after(&self, client: ClientId, id: GpuId, hold: &Hold) -> Option<Duration> {
        if self.policy().tenants_take_turns() || !self.rules.have_classes() {
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

    /// The current key of one client's part of a request.
    pub fn queue_key(&self, client: ClientId, wants: &GpuSet, before: QueueKey) -> QueueKey {
        let class = self.shares().class(client, wants);
        let owner = self.shares().owner(client);
        let tags =
            |id: &GpuId| [owner.and_then(|owner| self.fairness.finish_tag(owner, *id)), self.own_tag(client, *id)];
        let served = wants.iter().flat_map(tags).flatten().max().unwrap_or_default();
        QueueKey { class, at: self.policy().key_among_owners(served, before.rank, before.joined), ..before }
    }

    /// The own finish tag of a client whose environment sets a lower weight, while the tag delays
    /// the client. If the policy orders the clients of one owner by rank, those clients share a
    /// key, and the tag counts only while it is in the future. A past tag would keep the client
    /// behind all clients without a tag of their own.
    pub fn own_tag(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let tag = self.fairness.finish_tag(self.shares().own_owner(client)?, id)?;
        (self.policy().tenants_take_turns() || tag > self.now).then_some(tag)
    }

    /// When a request's position changes without an event, because a client's own finish tag no
    /// longer delays it.
    pub fn position_changes_at(&self, entity: Entity) -> Option<Time> {
        if self.policy().tenants_take_turns() {
            return None;
        }
        let wants =
            self.queues.request(entity)?.wants.iter().flat_map(|(client, gpus)| gpus.iter().map(|id| (*client, *id)));
        wants.filter_map(|(client, id)| self.own_tag(client, id)).min()
    }

    /// For assertions: whether the queue by owners matches the clients' requests, and no request
    /// precedes the first request of its owner.
    pub fn owners_are_current(&self, id: GpuId) -> bool {
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

    /// The time before which a new request of the holder would precede the waiting request. A
    /// revoke before that time would only cost a drain, because the holder would be granted the
    /// lock again immediately. `None`: the waiting request precedes the holder.
    pub fn precedes_until(&self, holder: ClientId, id: GpuId, other: Entity) -> Option<Time> {
        let hold = self.gpus.hold(holder, id).filter(|hold| matches!(hold.entity, Entity::Solo(_)))?;
        let (owner, key) = (self.shares().owner(holder)?, self.queues.request(other)?.key);
        let waited = hold.waited(self.now);
        let waiter =
            Waiter { burst: self.gpus.history(holder, id)?.bursts.expected_after(waited), ..self.waiter(holder, id) };
        let is_same_owner = self.owner_of(other) == Some(owner);
        if key.has_turn.0 {
            return None;
        }
        if is_same_owner && self.other_owner_after(holder, id, hold) == Some(Duration::ZERO) {
            return None;
        }
        let tag = |owner: ShareOwner| self.fairness.finish_tag(owner, id);
        let arrives = self.policy().rank(self.settings, self.now, &waiter);
        let arrival = match is_same_owner {
            true => arrives,
            false => self.policy().key_among_owners(Time::ZERO, arrives, Time::ZERO),
        };
        // Clients of one owner have the same finish tag, except clients with a lower weight of
        // their own.
        let own_tag =
            || self.queues.first_client(other).and_then(|client| self.own_tag(client, id)).unwrap_or_default();
        let other_at = if is_same_owner { key.rank.max(own_tag()) } else { key.at };
        // Each second for which the holder keeps running would delay its new request by a second.
        let mut ahead = other_at.checked_sub(arrival);
        for charged in self.shares().owners(holder) {
            let before = match self.shares().finish_tag(holder, charged, id, hold, waited) {
                // The holder's tag advances faster than time, in proportion to the weights of the
                // waiting owners.
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
    pub fn owner_of(&self, entity: Entity) -> Option<ShareOwner> {
        self.shares().owner(self.queues.first_client(entity)?)
    }

    /// The current key of a request.
    pub fn current_key(&self, entity: Entity) -> Option<QueueKey> {
        let request = self.queues.request(entity)?;
        let keys = request.wants.iter().map(|(client, gpus)| self.queue_key(*client, gpus, request.key));
        // A gang has the worst class and the latest time of its members.
        let key = keys.reduce(|a, b| QueueKey { class: a.class.max(b.class), at: a.at.max(b.at), ..a })?;
        Some(QueueKey { has_turn: Reverse(self.has_turn(entity)), ..key })
    }

    /// All requests in the queue of a GPU, in their order of service if nothing changes.
    pub fn whole_queue(&self, id: GpuId) -> Vec<Entity> {
        let behind =
            self.queues.behind_first(id).filter_map(|(first, entity)| Some((self.key_behind(first, entity)?, entity)));
        let mut queue: Vec<_> = self.queues.queue(id).map(|(key, entity)| (*key, entity)).chain(behind).collect();
        queue.sort_unstable();
        queue.into_iter().map(|(_, entity)| entity).collect()
    }

    /// The key of a request that stands behind another request of its owner. `first` is the key of
    /// that other request, and may include a finish tag that has passed and was forgotten
    /// elsewhere.
    pub fn key_behind(&self, first: &QueueKey, entity: Entity) -> Option<QueueKey> {
        self.current_key(entity).map(|key| QueueKey { at: key.at.max(first.at), ..key })
    }

    /// Whether a request's position among the requests of its owner follows from its rank alone:
    /// the client wants one GPU, is in no gang, and has no limits from its environment. Always
    /// false with anti-thrash `off`, because requests then do not wait for each other's turns.
    pub fn is_by_rank(&self, entity: Entity) -> bool {
        let Entity::Solo(client) = entity else { return false };
        self.settings.anti_thrash != AntiThrash::Off
            && self.rules.env(client).is_none()
            && self.queues.gang_peers(client).next().is_none()
            && self.queues.wants(client).is_some_and(|gpus| gpus.len() == 1)
    }

    /// Queued requests whose class depends on usage.
    pub fn watched_requests(&self, id: GpuId) -> Vec<Entity> {
        if !self.shares().are_watched() {
            return Vec::new();
        }
        let is_watched =
            |entity: &Entity| self.queues.clients_of(*entity).any(|client| self.shares().is_watched(client));
        self.queues.queued(id).filter(is_watched).collect()
    }

    /// An owner's requests in the queue of a GPU, in their order.
    pub fn own_requests(&self, id: GpuId, owner: ShareOwner) -> Vec<Entity> {
        let mut own: Vec<Entity> = self.queues.first_of(id, owner).collect();
        own.sort_unstable_by_key(|entity| self.queues.request(*entity).map(|request| request.key));
        own
    }

    /// When the class of the requests in a queue changes without an event.
    pub fn class_changes_at(&self, id: GpuId) -> Option<Time> {
        if !self.shares().are_watched() {
            return None;
        }
        self.queues.first(id)?;
        self.shares().class_changes_at(id)
    }

    /// The finish tags that a client's owners reach by a hold that ended. `waited` is the part of
    /// the hold in which other clients waited.
    pub fn finish_tags(&self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) -> Vec<(ShareOwner, Time)> {
        debug_assert!(self.owners_are_current(id));
        let shares = self.shares();
        let tag = |owner| Some((owner, shares.finish_tag(client, owner, id, hold, waited)?.0));
        shares.owners(client).filter_map(tag).collect()
    }
}
