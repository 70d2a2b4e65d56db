//! Requests and turns of gangs. `model::gangs` decides how gangs help or exclude each other.

use super::Requests;
use crate::{
    api::*,
    queue::{Blocked, Entity, Gang},
};

impl Requests<'_> {
    /// Begins the turn of a gang that was granted a GPU at `since`. If the turn has already begun,
    /// moves its beginning back to `since`.
    pub fn begin_gang_turn(&mut self, entity: Entity, since: Time) {
        if let Some(gang) = entity.gang() {
            let is_measured = self.model().holds_of_gang(gang).all(|(_, hold)| !hold.is_bypassed());
            self.queues.gangs_mut().begin_turn(gang, since, is_measured);
        }
    }

    /// Ends the turn of a gang whose members hold no lock any more. Bypassed holds do not count.
    pub fn end_gang_turn(&mut self, entity: Entity) {
        let is_over = |gang: &Gang| self.model().holds_of_gang(*gang).all(|(_, hold)| hold.is_bypassed());
        if let Some(gang) = entity.gang().filter(is_over) {
            let drained = self.model().holds_of_gang(gang).next().is_none();
            self.queues.gangs_mut().end_turn(self.now, gang, drained);
        }
    }

    /// Records that a gang's members keep their locks, unless some of the locks are still revoked.
    pub fn gang_continues(&mut self, entity: Entity) {
        let continues = |gang: &Gang| self.model().holds_of_gang(*gang).all(|(_, hold)| hold.revoked.is_none());
        if let Some(gang) = entity.gang().filter(continues) {
            self.queues.gangs_mut().goes_on(gang);
        }
    }

    /// Requeues a request, and marks its GPUs. Called when its reason to precede other requests has
    /// changed.
    pub fn requeue_and_touch(&mut self, entity: Entity) {
        self.requeue(entity);
        let gpus = self.queues.request(entity).map(|request| request.gpus());
        self.effects.touch_all(gpus.into_iter().flatten());
    }

    /// Marks the GPUs of a gang whose holds or requests changed, and the GPUs of conflicting gangs.
    pub fn touch_conflicting_gangs(&mut self, entity: Entity) {
        let Some(gang) = entity.gang() else { return };
        let conflicting = self.queues.gangs().others(gang).filter(|other| self.model().gangs_conflict(gang, *other));
        let gpus: GpuSet = conflicting.chain([gang]).flat_map(|gang| self.model().gpus_of_gang(gang)).collect();
        self.effects.touch_all(gpus);
    }

    /// Handles a revoke that was withdrawn. GPUs are no longer kept to let the client drain.
    pub fn revoke_withdrawn(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        self.gang_continues(entity);
        self.touch_conflicting_gangs(entity);
    }

    /// Requeues a client's request after the members of its gang have changed.
    pub fn members_changed(&mut self, client: ClientId) {
        if let Some(entity) = self.queues.waiting(client) {
            self.requeue(entity);
            self.retry(client, |blocked| matches!(blocked, Blocked::Behind(_)));
        }
    }
}
