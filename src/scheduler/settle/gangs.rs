//! Gang scheduling. Members of a gang are granted and revoked together as far as their memory fits.
//! Members that do not fit together take turns.

use crate::{
    api::*,
    gpu::Hold,
    machine::Machine,
    policy::{Waiter, utilization::MEASURED},
    queue::{Blocked, Entity, Gang},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// The minimum length of a gang's turn, as a multiple of the gang's hand-over time. During a
/// hand-over, members spin for members that have already drained. With turns of this length,
/// spinning costs 3 % of the time.
const HAND_OVERS_PER_TURN: u32 = 33;

impl Machine {
    /// Begins the turn of a gang that was granted a GPU at `since`. If the turn has already begun,
    /// moves its beginning back to `since`.
    pub(super) fn begin_gang_turn(&mut self, entity: Entity, since: Time) {
        if let Some(gang) = entity.gang() {
            let is_measured = self.model().holds_of_gang(gang).all(|(_, hold)| !hold.is_bypassed());
            self.queues.gangs_mut().begin_turn(gang, since, is_measured);
        }
    }

    /// Ends the turn of a gang whose members hold no lock any more. Bypassed holds do not count.
    pub(super) fn end_gang_turn(&mut self, entity: Entity) {
        let is_over = |gang: &Gang| self.model().holds_of_gang(*gang).all(|(_, hold)| hold.is_bypassed());
        if let Some(gang) = entity.gang().filter(is_over) {
            let drained = self.model().holds_of_gang(gang).next().is_none();
            self.queues.gangs_mut().end_turn(self.now, gang, drained);
        }
    }

    /// Records that a gang's members keep their locks, unless some of the locks are still revoked.
    pub(super) fn gang_continues(&mut self, entity: Entity) {
        let continues = |gang: &Gang| self.model().holds_of_gang(*gang).all(|(_, hold)| hold.revoked.is_none());
        if let Some(gang) = entity.gang().filter(continues) {
            self.queues.gangs_mut().goes_on(gang);
        }
    }

    /// The minimum length of a gang's turn on a GPU, so that hand-overs cost little. The time
    /// quantum and `max-wait` are upper bounds. A turn that only measures utilization is short,
    /// because the measurement may show that the clients can run together.
    pub(super) fn shortest_gang_turn(&self, gang: Gang, id: GpuId, waiter: Option<Waiter>) -> Duration {
        let measures = |waiter: Waiter| !waiter.evicts && (waiter.unmeasured || !waiter.holders_measured);
        if self.settings.anti_thrash == AntiThrash::Auto && waiter.is_some_and(measures) {
            return MEASURED.min(self.settings.time_quantum);
        }
        let most = match self.settings.max_wait {
            Duration::ZERO => Duration::MAX,
            most => most / self.queues.queue_length(id).max(1),
        };
        self.queues
            .gangs()
            .hand_over(gang)
            .saturating_mul(HAND_OVERS_PER_TURN)
            .min(self.settings.time_quantum)
            .min(most)
    }

    /// Checks all members of a gang after one of them requested a GPU. Another member may need the
    /// requesting member in order to drain.
    pub(crate) fn check_gang_peers(&mut self, entity: Entity) {
        let Some(gang) = entity.gang().filter(|gang| self.queues.gangs().is_job(*gang)) else { return };
        self.queues.gangs().members(gang).collect::<Vec<_>>().into_iter().for_each(|member| self.check(member));
    }

    /// Records that a holder's drain lags, so that other members of its gang are granted first.
    pub(crate) fn lags(&mut self, client: ClientId, id: GpuId) {
        if let Some(hold) = self.gpus.hold_mut(client, id) {
            hold.lags = true;
        }
        self.touch(id);
        self.touch_gang_peers(client);
    }

    /// Requeues the requests of a client's gang members. Called when their reason to precede other
    /// requests has changed.
    pub(crate) fn touch_gang_peers(&mut self, client: ClientId) {
        let waiting: BTreeSet<Entity> =
            self.queues.gang_peers(client).filter_map(|peer| self.queues.waiting(peer)).collect();
        for entity in waiting {
            self.requeue(entity);
            let gpus = self.queues.request(entity).map(|request| request.gpus());
            self.effects.touch_all(gpus.into_iter().flatten());
        }
    }

    /// Revokes the remaining locks of a gang after a revoked member has drained. The remaining
    /// members were running only to let that member drain.
    pub(crate) fn revoke_gang(&mut self, gang: Gang) {
        let is_left = |hold: &Hold| hold.entity == Entity::Gang(gang) && hold.revoked.is_none();
        let first = self.queues.gangs().members(gang).find_map(|client| {
            let (id, _) = self.gpus.holds_of(client).find(|(_, hold)| is_left(hold))?;
            Some((client, id))
        });
        if let Some((client, id)) = first {
            self.revoke(client, id);
        }
    }

    pub(crate) fn enter_gang(&mut self, client: ClientId, gang: Option<Gang>) {
        let Some(gang) = gang else { return };
        self.queues.join_gang(client, gang);
        self.members_changed(gang);
        self.touch_conflicting_gangs(Entity::Gang(gang));
    }

    pub(crate) fn leave_gang(&mut self, client: ClientId) {
        let Some(gang) = self.queues.gang(client) else { return };
        self.touch_conflicting_gangs(Entity::Gang(gang));
        self.queues.leave_gang(client);
        self.members_changed(gang);
    }

    /// Updates the members of a gang after a member joined or left. The members' class changes, and
    /// they may have become a gang or ceased to be one.
    fn members_changed(&mut self, gang: Gang) {
        for member in self.queues.gangs().members(gang).collect::<Vec<_>>() {
            self.update_entity(member);
            self.effects.touch_all(self.gpus.holds_of(member).map(|(id, _)| id));
            if let Some(entity) = self.queues.waiting(member) {
                self.requeue(entity);
                let blocked = self.queues.request(entity).and_then(|request| request.blocked);
                if matches!(blocked, Some(Blocked::Behind(_))) {
                    self.enqueue(entity);
                }
            }
        }
    }

    /// Assigns a client's holds and requests to the client's present entity: its gang, or the
    /// client alone.
    pub(crate) fn update_entity(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        // The holds are revoked together with the members of the new entity.
        if let Some(since) = self.gpus.set_entity_of_holds(client, entity) {
            self.begin_gang_turn(entity, since);
        }
        if self.queues.waiting(client).is_some_and(|waiting| waiting != entity)
            && let Some(wants) = self.queues.wants(client).cloned()
        {
            self.request(client, wants);
        }
    }

    /// Updates a client's gang after its rule changed. The client's requests become requests of the
    /// new gang.
    pub(crate) fn update_gang(&mut self, client: ClientId) {
        let Some(state) = self.clients.get(&client) else { return };
        let is_gang = |group: &GroupId| self.rules.limits(*group).is_some_and(|limits| limits.gang);
        let group = self.rules.group(client).filter(is_gang);
        let gang = group.map(Gang::Group).or(Gang::named(state.named));
        if gang == self.queues.gang(client) {
            return;
        }
        self.leave_gang(client);
        self.enter_gang(client, gang);
        self.update_entity(client);
    }

    /// Marks the GPUs of a gang whose holds or requests changed, and the GPUs of conflicting gangs.
    pub(crate) fn touch_conflicting_gangs(&mut self, entity: Entity) {
        let Some(gang) = entity.gang() else { return };
        let conflicting = self.queues.gangs().others(gang).filter(|other| self.model().gangs_conflict(gang, *other));
        let gpus: GpuSet = conflicting.chain([gang]).flat_map(|gang| self.model().gpus_of_gang(gang)).collect();
        self.effects.touch_all(gpus);
    }
}
