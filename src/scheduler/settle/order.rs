//! Keeps the order of queues up to date: puts requests into the queues, moves them when they age or
//! their owner changes, and charges clients for their service. `model::order` computes the order.

use crate::{
    api::*,
    fairness::ShareOwner,
    gpu::Hold,
    machine::Machine,
    queue::{Blocked, Entity, Request},
};
use std::time::Duration;

impl Machine {
    /// Reranks all requests after a change of the policy. Drops the finish tags of the former
    /// policy.
    pub(crate) fn rerank_all(&mut self) {
        self.fairness.clear_finish_tags();
        for entity in self.queues.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            let Some(request) = self.queues.request(entity) else { continue };
            let Some((client, wants)) = request.wants.first_key_value() else { continue };
            let arrival = request.since.values().min().copied().unwrap_or(self.now);
            let (rank, ages) = self.model().rank(*client, wants, arrival);
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

    /// If a request has waited long enough, puts it before all other requests of its owner.
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

    /// Requeues a client's request after its owner has changed.
    pub(crate) fn owner_changed(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        let is_queued = self.queues.request(entity).is_some_and(|request| request.blocked.is_none());
        if is_queued {
            self.dequeue(entity);
            self.join_queues(entity);
        }
    }

    /// Charges a client's owners for a hold that ended. `waited` is the part of the hold in which
    /// other clients waited. The owners' finish tags rise, and their requests move back in the
    /// queue.
    pub(crate) fn charge_service(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        debug_assert!(self.model().owners_are_current(id));
        let shares = self.model().shares();
        let Some(owner) = shares.owner(client) else { return };
        let tag = |owner| Some((owner, shares.finish_tag(client, owner, id, hold, waited)?.0));
        let tags: Vec<(ShareOwner, Time)> = shares.owners(client).filter_map(tag).collect();
        let (is_charged, keep) = (!tags.is_empty(), self.model().owners_with_one_key(id));
        self.fairness.set_finish_tags(self.now, id, &keep, tags);
        if is_charged {
            let mut own: Vec<Entity> = self.queues.first_of(id, owner).collect();
            own.sort_unstable_by_key(|entity| self.queues.request(*entity).map(|request| request.key));
            own.into_iter().for_each(|entity| self.requeue(entity));
        }
    }

    /// The finish tags of a client at its grant: its owner's tag and its own. Advances virtual time
    /// first.
    pub(crate) fn finish_tags_before(&mut self, client: ClientId, id: GpuId) -> (Time, Time) {
        let ahead = self.model().shares().virtual_time_lead(id, client);
        if !ahead.is_zero() {
            self.fairness.advance_virtual_time(id, ahead);
            let queue: Vec<Entity> = self.queues.queue(id).map(|(_, entity)| entity).collect();
            queue.into_iter().for_each(|entity| self.requeue(entity));
        }
        self.model().shares().finish_tags_before(client, id)
    }

    /// Moves a queued request to its current position.
    pub(crate) fn requeue(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity).filter(|request| request.blocked.is_none()) else { return };
        let Some(key) = self.model().current_key(entity).filter(|key| *key != request.key) else { return };
        self.dequeue(entity);
        if let Some(request) = self.queues.request_mut(entity) {
            request.key = key;
        }
        self.enqueue(entity);
    }

    /// Removes requests from a queue if they would only block other GPUs. A request blocks other
    /// GPUs if a request of a better tier waits in this queue.
    pub(crate) fn defer_behind(&mut self, id: GpuId) {
        if !self.model().shares().have_classes() {
            return;
        }
        let queue = self.queues.queue(id).map(|(_, entity)| entity);
        let behind: Vec<Entity> = queue.skip(1).filter(|entity| self.model().waits_behind(*entity, id)).collect();
        behind.into_iter().for_each(|entity| self.block(entity, Blocked::Behind(id)));
    }

    /// Moves all requests to their current positions after rules have changed.
    pub(crate) fn requeue_all(&mut self) {
        for entity in self.queues.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            self.requeue(entity);
            let blocked = self.queues.request(entity).and_then(|request| request.blocked);
            let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.model().is_delayed(entity);
            if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
                self.enqueue(entity);
            }
        }
        self.fairness.forget_usage(self.now, self.settings.time_period);
        self.effects.touch_all(self.gpus.ids());
    }

    /// Moves requests whose class depends on usage to their current positions. Returns the time of
    /// the next check.
    pub(crate) fn reclassify(&mut self, id: GpuId) -> Option<Time> {
        if !self.model().shares().are_watched() {
            return None;
        }
        let is_watched =
            |entity: &Entity| self.queues.clients_of(*entity).any(|client| self.model().shares().is_watched(client));
        let queue: Vec<Entity> = self.queues.queued(id).filter(is_watched).collect();
        for entity in queue {
            match self.model().shares().request_capped_until(entity) {
                Some(until) => self.block(entity, Blocked::Until(until)),
                None => self.requeue(entity),
            }
        }
        self.queues.first(id)?;
        self.model().shares().class_changes_at(id)
    }
}
