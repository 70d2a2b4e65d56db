//! Gang scheduling: members of a gang are granted and revoked together as far as their memory fits; members that do not
//! fit together take turns. `gang_conflict` handles gangs that need the same GPUs.

use crate::{
    api::*,
    gpu::{ClientLock, Hold},
    machine::Machine,
    policy::{Waiter, utilization::MEASURED},
    queue::{Blocked, Entity, Gang},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a gang's request waits for members that have not requested yet, so that they run together.
const GATHERS: Duration = Duration::from_millis(5);
/// A member that released or attached a GPU within this time is likely to request one. A gang's request waits for no
/// other members.
const LATELY: Duration = Duration::from_secs(1);
/// A gang's turn lasts at least this many of its hand-overs. In a hand-over, members spin for members that have
/// drained: spinning then costs 3 % of the time.
const HAND_OVERS_PER_TURN: u32 = 33;

impl Machine {
    /// The holds that a gang's members have as members of the gang.
    pub(super) fn holds_of_gang(&self, gang: Gang) -> impl Iterator<Item = (GpuId, &Hold)> {
        self.queues.gangs().members(gang).flat_map(move |client| self.gpus.holds_in_gang(client, gang))
    }

    /// GPUs that members of a gang have attached.
    pub(super) fn gpus_of_gang(&self, gang: Gang) -> GpuSet {
        self.queues.gangs().members(gang).flat_map(|client| self.gpus.of_client(client)).collect()
    }

    /// Begins the turn of a gang that was granted a GPU at `since`, or moves its beginning back.
    pub(super) fn begin_gang_turn(&mut self, entity: Entity, since: Time) {
        if let Some(gang) = entity.gang() {
            let is_measured = self.holds_of_gang(gang).all(|(_, hold)| !hold.is_bypassed());
            self.queues.gangs_mut().begin_turn(gang, since, is_measured);
        }
    }

    /// Ends the turn of a gang that no longer holds anything. Holds that are bypassed do not count.
    pub(super) fn end_gang_turn(&mut self, entity: Entity) {
        let is_over = |gang: &Gang| self.holds_of_gang(*gang).all(|(_, hold)| hold.is_bypassed());
        if let Some(gang) = entity.gang().filter(is_over) {
            let drained = self.holds_of_gang(gang).next().is_none();
            self.queues.gangs_mut().end_turn(self.now, gang, drained);
        }
    }

    /// Records that members of a gang need not release what they hold after all, unless others still have to.
    pub(super) fn gang_continues(&mut self, entity: Entity) {
        let continues = |gang: &Gang| self.holds_of_gang(*gang).all(|(_, hold)| hold.revoked.is_none());
        if let Some(gang) = entity.gang().filter(continues) {
            self.queues.gangs_mut().goes_on(gang);
        }
    }

    /// Until when a new request waits for other members of its gang that ran lately. `None`: it waits for none.
    pub(crate) fn gathers_until(&self, entity: Entity) -> Option<Time> {
        let gang = entity.gang()?;
        let is_missing = |client: &ClientId| {
            let is_absent = !self.clients.contains_key(client) || self.is_absent(*client);
            self.queues.waiting(*client).is_none() && !self.gpus.holds_any(*client) && !is_absent
        };
        let had_lately = |client: ClientId| {
            let last = self.gpus.locks_of(client).map(|(_, lock)| lock.last_run).max();
            last.is_some_and(|last| self.now.saturating_sub(last) < LATELY)
        };
        let mut missing = self.queues.gangs().members(gang).filter(is_missing);
        missing.any(had_lately).then(|| self.now + GATHERS)
    }

    /// Whether a GPU is kept for another gang, which was revoked: one of its members does not drain yet, and may need
    /// another member in order to drain that has just left this GPU.
    pub(crate) fn is_kept_for_gang(&self, entity: Entity, id: GpuId) -> bool {
        let gangs = self.queues.gangs();
        let mut turns = gangs.turns().filter(|(gang, _)| entity != Entity::Gang(*gang) && gangs.is_job(*gang));
        turns.any(|(gang, since)| {
            let left = |lock: &ClientLock| lock.hold.is_none() && lock.grants > 0 && lock.last_run > since;
            let has_left = |member| self.gpus.lock(member, id).is_some_and(left);
            self.holds_of_gang(gang).any(|(_, hold)| hold.drains()) && gangs.members(gang).any(has_left)
        })
    }

    /// Whether a hold helps another member of its gang to drain, which was revoked and has not drained yet.
    pub(crate) fn helps_to_drain(&self, hold: &Hold) -> bool {
        let gang = hold.entity.gang().filter(|_| hold.revoked.is_none());
        gang.is_some_and(|gang| self.holds_of_gang(gang).any(|(_, hold)| hold.drains()))
    }

    /// The least that a gang's turn on a GPU lasts, so that hand-overs cost little, as far as the time quantum and
    /// `max-wait` allow. A turn to measure is short: perhaps they can all run together.
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

    /// How long a holder may be idle for the sake of its gang: the others may spin for it, and handing the GPU over
    /// costs them the same. 0: it is in no gang, or no other member holds a GPU.
    pub(super) fn gang_grace(&self, hold: &Hold) -> Duration {
        let gang = hold.entity.gang().filter(|gang| self.queues.gangs().is_job(*gang));
        let gang = gang.filter(|gang| self.holds_of_gang(*gang).nth(1).is_some());
        gang.map_or(Duration::ZERO, |gang| self.queues.gangs().hand_over(gang).min(self.settings.time_quantum))
    }

    /// Checks all members after one requested a GPU: another may need it in order to drain.
    pub(crate) fn check_gang_peers(&mut self, entity: Entity) {
        let Some(gang) = entity.gang().filter(|gang| self.queues.gangs().is_job(*gang)) else { return };
        self.queues.gangs().members(gang).collect::<Vec<_>>().into_iter().for_each(|member| self.check(member));
    }

    /// When a holder's drain will lag, while other members of its gang wait that could help it. `None`: it will not.
    pub(crate) fn lags_at(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let lock = self.gpus.lock(client, id)?;
        let hold = lock.hold.as_ref().filter(|hold| hold.drains() && !hold.may_need_others())?;
        let gang = hold.entity.gang().filter(|gang| self.queues.gangs().is_job(*gang))?;
        let begun = hold.revoked?.first;
        let mut peers = self.queues.gangs().members(gang);
        peers.any(|peer| self.queues.waiting(peer).is_some()).then(|| begun + lock.drains.lags_after())
    }

    /// Records that a holder's drain lags, so that other members of its gang go first.
    pub(crate) fn lags(&mut self, client: ClientId, id: GpuId) {
        if let Some(hold) = self.gpus.hold_mut(client, id) {
            hold.lags = true;
        }
        self.touch(id);
        self.touch_gang_peers(client);
    }

    /// Requeues the requests of a client's gang members, after the reason changed for which they may go first.
    pub(crate) fn touch_gang_peers(&mut self, client: ClientId) {
        let waiting: BTreeSet<Entity> =
            self.queues.gang_peers(client).filter_map(|peer| self.queues.waiting(peer)).collect();
        for entity in waiting {
            self.requeue(entity);
            let gpus = self.queues.request(entity).map(|request| request.gpus());
            self.effects.touch_all(gpus.into_iter().flatten());
        }
    }

    /// Revokes the rest of a gang after a member that was revoked has drained: they ran only to let it drain.
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

    /// Whether a gang has its turn, in which its other members precede all requests of their class: for the time
    /// quantum, and for another one if a revoked member cannot drain, which may need them. A gang that has waited for
    /// longer would only delay them, since it waits for all of them to drain.
    pub(crate) fn has_turn(&self, entity: Entity) -> bool {
        let turn = entity.gang().and_then(|gang| Some((gang, self.queues.gangs().turn_since(gang)?)));
        let Some((gang, since)) = turn else { return false };
        let had = self.now.saturating_sub(since);
        let drains = || self.holds_of_gang(gang).filter(|(_, hold)| hold.drains());
        match drains().next().is_some() {
            true => had < self.settings.time_quantum * 2 && drains().any(|(_, hold)| hold.may_need_others()),
            false => had < self.settings.time_quantum,
        }
    }

    /// When a gang may no longer have its turn because of the time that passes. `None`: it has none.
    pub(crate) fn turn_passes_at(&self, entity: Entity) -> Option<Time> {
        let since = self.queues.gangs().turn_since(entity.gang()?)?;
        let ends = [1, 2].map(|quanta| since.saturating_add(self.settings.time_quantum.saturating_mul(quanta)));
        ends.into_iter().find(|at| *at > self.now)
    }

    /// Whether a member was revoked and is about to drain. Until it has, no member is granted anything.
    pub(crate) fn is_about_to_drain(&self, entity: Entity) -> bool {
        let holds = entity.gang().into_iter().flat_map(|gang| self.holds_of_gang(gang));
        holds.into_iter().any(|(_, hold)| hold.drains() && !hold.may_need_others())
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

    /// Updates the members of a gang after one came or went: their class changes, and they may be a gang now, or none
    /// any more.
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

    /// Assigns a client's holds and requests to its present entity: its gang, or itself.
    pub(crate) fn update_entity(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        // So that it is revoked with the members of that entity.
        if let Some(since) = self.gpus.set_entity_of_holds(client, entity) {
            self.begin_gang_turn(entity, since);
        }
        if self.queues.waiting(client).is_some_and(|waiting| waiting != entity)
            && let Some(wants) = self.queues.wants(client).cloned()
        {
            self.request(client, wants);
        }
    }

    /// Updates a client's gang after its rule changed. Its requests become requests of the new gang.
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
}
