//! Keeps the order of the queues up to date. `model::order` computes the order.

use super::{Requests, Work};
use crate::{
    api::*,
    fairness::ShareOwner,
    queue::{Blocked, Entity},
};

impl Requests<'_> {
    /// Moves requests to their current positions, in the given order.
    pub fn requeue_each(&mut self, requests: Vec<Entity>) {
        requests.into_iter().for_each(|entity| self.requeue(entity));
    }

    /// Moves the requests in the queue of a GPU, after all of their finish tags have changed.
    pub fn requeue_on(&mut self, id: GpuId) {
        self.requeue_each(self.queues.queue(id).map(|(_, entity)| entity).collect());
    }

    /// Moves an owner's requests for a GPU, after the owner's finish tag has changed.
    pub fn requeue_own(&mut self, id: GpuId, owner: ShareOwner) {
        let mut own: Vec<Entity> = self.queues.first_of(id, owner).collect();
        own.sort_unstable_by_key(|entity| self.queues.request(*entity).map(|request| request.key));
        self.requeue_each(own);
    }

    /// Moves a queued request to its current position.
    pub fn requeue(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity).filter(|request| request.blocked.is_none()) else { return };
        let Some(key) = self.model().current_key(entity).filter(|key| *key != request.key) else { return };
        self.dequeue(entity);
        if let Some(request) = self.queues.request_mut(entity) {
            request.key = key;
        }
        self.enqueue(entity);
    }

    /// Requeues a client's request after its owner has changed.
    pub fn owner_changed(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        let is_queued = self.queues.request(entity).is_some_and(|request| request.blocked.is_none());
        if is_queued {
            self.dequeue(entity);
            self.work(Work::Join { entity, takes_turn: true });
        }
    }

    /// Reranks all requests after a change of the policy.
    pub fn rerank_all(&mut self) {
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

    /// Moves all requests to their current positions after rules have changed.
    pub fn requeue_all(&mut self) {
        for entity in self.queues.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            self.requeue(entity);
            let blocked = self.queues.request(entity).and_then(|request| request.blocked);
            let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.model().is_delayed(entity);
            if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
                self.enqueue(entity);
            }
        }
        self.effects.touch_all(self.gpus.ids());
    }

    /// Moves requests whose class depends on usage to their current positions. Returns the time of
    /// the next check.
    pub fn reclassify(&mut self, id: GpuId) -> Option<Time> {
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

    /// Requeues the requests that unevictable memory on a GPU has blocked.
    pub fn enqueue_pinned(&mut self, id: GpuId) {
        self.queues.take_blocked_by_pinned(id).into_iter().for_each(|entity| self.enqueue(entity));
    }

    /// Requeues requests that no longer have to wait for a request or holder of a better tier.
    pub fn enqueue_unblocked(&mut self, id: GpuId) {
        let free: Vec<Entity> =
            self.queues.behind(id).filter(|entity| !self.model().waits_behind(*entity, id)).collect();
        free.into_iter().for_each(|entity| self.enqueue(entity));
    }

    /// Removes requests from a queue if they would only block other GPUs. A request blocks other
    /// GPUs if a request of a better tier waits in this queue.
    pub fn defer_behind(&mut self, id: GpuId) {
        if !self.model().shares().have_classes() {
            return;
        }
        let queue = self.queues.queue(id).map(|(_, entity)| entity);
        let behind: Vec<Entity> = queue.skip(1).filter(|entity| self.model().waits_behind(*entity, id)).collect();
        behind.into_iter().for_each(|entity| self.block(entity, Blocked::Behind(id)));
    }

    /// Updates the time at which this GPU admits its first request. If that time or the first
    /// request has changed, marks the other GPUs that the present and the previous first request
    /// want.
    pub fn note_opening(&mut self, id: GpuId) {
        let first = self.queues.first(id).filter(|first| self.model().wants_others(id, *first));
        let opens = first.map(|first| (first, self.model().opens_at(id, first)));
        let Some(before) = self.queues.note_opening(id, opens) else { return };
        for entity in [before, first].into_iter().flatten() {
            let gpus = self.queues.request(entity).map(|request| request.gpus()).unwrap_or_default();
            self.effects.touch_all(gpus.into_iter().filter(|gpu| *gpu != id));
        }
    }
}
