//! Grants requests ahead of the first request of a GPU (see `model::backfill`).

use crate::{
    api::*,
    gpu::Access,
    machine::Machine,
    model::{LOOKS, SLOT},
    queue::Entity,
};

impl Machine {
    /// Updates the time at which this GPU admits its first request. If that time or the first
    /// request has changed, marks the other GPUs that the present and the previous first request
    /// want.
    pub(super) fn note_opening(&mut self, id: GpuId) {
        let first = self.queues.first(id).filter(|first| self.model().wants_others(id, *first));
        let opens = first.map(|first| (first, self.model().opens_at(id, first)));
        let Some(before) = self.queues.note_opening(id, opens) else { return };
        for entity in [before, first].into_iter().flatten() {
            let gpus = self.queues.request(entity).map(|request| request.gpus()).unwrap_or_default();
            self.effects.touch_all(gpus.into_iter().filter(|gpu| *gpu != id));
        }
    }

    /// Grants a request behind the first request that wants this GPU alone, while the first request
    /// waits for other GPUs. Returns whether a request was granted.
    pub(super) fn backfill(&mut self, id: GpuId, first: Entity) -> bool {
        // Backfilling does not consider the classes of requests, so it is off if rules create
        // classes.
        if !self.model().wants_others(id, first)
            || self.model().shares().have_classes()
            || self.model().access(id) != Access::Turns
        {
            return false;
        }
        let until = self.model().others_open_at(id, first).unwrap_or_else(|| self.now.saturating_add(SLOT));
        if until < self.now.saturating_add(SLOT) {
            return false;
        }
        let behind = self.queues.queue(id).skip(1).chain(self.queues.behind_first(id));
        let behind = behind.take(LOOKS).filter_map(|(_, entity)| match entity {
            Entity::Solo(client) => Some(client),
            Entity::Gang(_) => None,
        });
        let Some(client) = behind.into_iter().find(|client| self.model().may_backfill(*client, id, until)) else {
            return false;
        };
        self.grant(Entity::Solo(client));
        if let Some(hold) = self.gpus.hold_mut(client, id) {
            hold.backfills = Some((first, until));
        }
        true
    }
}
