//! Keeps the order of the queues up to date. `model::order` computes the order.

use super::{Requests, Work};
use crate::{
    api::*,
    queue::{Blocked, Entity},
};

impl Requests<'_> {
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

    /// Reranks a request after a change of the policy.
    pub fn rerank(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity) else { return };
        let Some((client, wants)) = request.wants.first_key_value() else { return };
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

    /// Moves a request to its current position after rules have changed.
    pub fn rules_changed(&mut self, entity: Entity) {
        self.requeue(entity);
        let blocked = self.queues.request(entity).and_then(|request| request.blocked);
        let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.model().is_delayed(entity);
        if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
            self.enqueue(entity);
        }
    }

    /// Moves a queued request whose class depends on usage to its current position.
    pub fn reclassify(&mut self, entity: Entity) {
        match self.model().shares().request_capped_until(entity) {
            Some(until) => self.block(entity, Blocked::Until(until)),
            None => self.requeue(entity),
        }
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
