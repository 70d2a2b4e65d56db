//! How the members of a gang help each other to run and to drain, and which gangs exclude each
//! other.
//!
//! Two gangs conflict if they share a GPU and one of them uses several GPUs. One gang then waits
//! until the other has released all locks; a gang that already holds a lock runs first. Otherwise
//! each gang could hold a GPU that the other gang waits for, while its kernels spin for the missing
//! members.

use super::Model;
use crate::{
    api::*,
    gpu::{ClientLock, Hold},
    queue::{Entity, Gang},
};
use std::collections::BTreeSet;
use std::time::Duration;

/// How long a gang's request waits for members that have not requested a GPU yet, so that all
/// members run together.
const GATHERS: Duration = Duration::from_millis(5);
/// A member that released or attached a GPU within this time is likely to request a GPU. A gang's
/// request waits only for such members.
const LATELY: Duration = Duration::from_secs(1);

impl Model<'_> {
    /// The locks that a gang's members hold as members of the gang.
    pub fn holds_of_gang(&self, gang: Gang) -> impl Iterator<Item = (GpuId, &Hold)> {
        self.queues.gangs().members(gang).flat_map(move |client| self.gpus.holds_in_gang(client, gang))
    }

    /// GPUs that members of a gang have attached.
    pub fn gpus_of_gang(&self, gang: Gang) -> GpuSet {
        self.queues.gangs().members(gang).flat_map(|client| self.gpus.of_client(client)).collect()
    }

    /// When a new request stops waiting for members of its gang that ran recently. `None`: no such
    /// member is missing.
    pub fn gathers_until(&self, entity: Entity) -> Option<Time> {
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

    /// Whether a GPU is kept for another gang that was revoked. A GPU is kept while a member of the
    /// revoked gang has not drained, because that member may need another member that has just left
    /// this GPU.
    pub fn is_kept_for_gang(&self, entity: Entity, id: GpuId) -> bool {
        let gangs = self.queues.gangs();
        let mut turns = gangs.turns().filter(|(gang, _)| entity != Entity::Gang(*gang) && gangs.is_job(*gang));
        turns.any(|(gang, since)| {
            let left = |lock: &ClientLock| lock.hold.is_none() && lock.grants > 0 && lock.last_run > since;
            let has_left = |member| self.gpus.lock(member, id).is_some_and(left);
            self.holds_of_gang(gang).any(|(_, hold)| hold.drains()) && gangs.members(gang).any(has_left)
        })
    }

    /// Whether a hold helps a revoked member of its gang to drain.
    pub fn helps_to_drain(&self, hold: &Hold) -> bool {
        let gang = hold.entity.gang().filter(|_| hold.revoked.is_none());
        gang.is_some_and(|gang| self.holds_of_gang(gang).any(|(_, hold)| hold.drains()))
    }

    /// How long a holder may be idle without losing the lock, because the other members of its gang may be
    /// spinning while they wait for the holder: as long as a hand-over to another client would take. 0: the
    /// holder is in no gang, or no other member holds a GPU.
    pub fn gang_grace(&self, hold: &Hold) -> Duration {
        let gang = hold.entity.gang().filter(|gang| self.queues.gangs().is_job(*gang));
        let gang = gang.filter(|gang| self.holds_of_gang(*gang).nth(1).is_some());
        gang.map_or(Duration::ZERO, |gang| self.queues.gangs().hand_over(gang).min(self.settings.time_quantum))
    }

    /// When a holder's drain counts as late, if waiting members of its gang could help the holder.
    /// `None`: the drain does not become late.
    pub fn lags_at(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let lock = self.gpus.lock(client, id)?;
        let hold = lock.hold.as_ref().filter(|hold| hold.drains() && !hold.may_need_others())?;
        let gang = hold.entity.gang().filter(|gang| self.queues.gangs().is_job(*gang))?;
        let begun = hold.revoked?.first;
        let mut peers = self.queues.gangs().members(gang);
        peers.any(|peer| self.queues.waiting(peer).is_some()).then(|| begun + lock.drains.lags_after())
    }

    /// Whether a gang has its turn. During the turn, the gang's waiting members precede all
    /// requests of their class. The turn lasts one time quantum. If members have been revoked, the
    /// turn is over, because no member is granted a lock before they drain. But if a revoked member
    /// may need the others in order to drain, the turn lasts two time quanta.
    pub fn has_turn(&self, entity: Entity) -> bool {
        let turn = entity.gang().and_then(|gang| Some((gang, self.queues.gangs().turn_since(gang)?)));
        let Some((gang, since)) = turn else { return false };
        let had = self.now.saturating_sub(since);
        let drains = || self.holds_of_gang(gang).filter(|(_, hold)| hold.drains());
        match drains().next().is_some() {
            true => had < self.settings.time_quantum * 2 && drains().any(|(_, hold)| hold.may_need_others()),
            false => had < self.settings.time_quantum,
        }
    }

    /// When the passage of time may end a gang's turn. `None`: the gang has no turn.
    pub fn turn_passes_at(&self, entity: Entity) -> Option<Time> {
        let since = self.queues.gangs().turn_since(entity.gang()?)?;
        let ends = [1, 2].map(|quanta| since.saturating_add(self.settings.time_quantum.saturating_mul(quanta)));
        ends.into_iter().find(|at| *at > self.now)
    }

    /// Whether a revoked member is about to drain. Until that member has drained, no member is
    /// granted a lock.
    pub fn is_about_to_drain(&self, entity: Entity) -> bool {
        let holds = entity.gang().into_iter().flat_map(|gang| self.holds_of_gang(gang));
        holds.into_iter().any(|(_, hold)| hold.drains() && !hold.may_need_others())
    }

    /// Whether two gangs conflict: they share a GPU on which they cannot run together, and one of
    /// them uses several GPUs.
    pub fn gangs_conflict(&self, one: Gang, other: Gang) -> bool {
        if !(self.queues.gangs().is_job(one) && self.queues.gangs().is_job(other)) {
            return false;
        }
        let (ones, others) = (self.gpus_of_gang(one), self.gpus_of_gang(other));
        let several = ones.len() > 1 || others.len() > 1;
        let mut shared = ones.intersection(&others);
        let both = || self.queues.gangs().members(one).chain(self.queues.gangs().members(other));
        several
            && shared.any(|id| !self.run_together(*id, both().filter(|client| self.gpus.lock(*client, *id).is_some())))
    }

    /// Whether an entity is a gang that must wait for a conflicting gang on any GPU.
    pub fn waits_for_gang(&self, entity: Entity) -> bool {
        let Entity::Gang(gang) = entity else { return false };
        if !self.queues.gangs().are_several() || self.settings.anti_thrash == AntiThrash::Off {
            return false;
        }
        self.queues.gangs().others(gang).any(|other| {
            self.gangs_conflict(gang, other) && self.holds_of_gang(other).any(|(_, hold)| !hold.is_bypassed())
        })
    }

    /// The first gang in the queues of other GPUs that waits for this GPU's holders. `None`: no
    /// gang waits for them.
    pub fn gang_awaiting_holders(&self, id: GpuId) -> Option<Entity> {
        if !self.queues.gangs().are_several() {
            return None;
        }
        let holds = self.gpus.holds_on(id).filter(|(_, hold)| !hold.is_bypassed());
        let here: BTreeSet<Gang> = holds.filter_map(|(_, hold)| hold.entity.gang()).collect();
        let waiting = self.queues.requests().filter(|(_, request)| request.blocked.is_none());
        let conflicting = waiting.filter(|(entity, _)| {
            let gang = entity.gang().filter(|gang| !here.contains(gang));
            gang.is_some_and(|gang| here.iter().any(|other| self.gangs_conflict(gang, *other)))
        });
        conflicting.min_by_key(|(_, request)| request.key).map(|(entity, _)| entity)
    }

    /// Whether a conflicting gang waits, on any GPU, for this gang to release all locks, or runs
    /// while this gang is bypassed.
    pub fn is_in_the_way(&self, entity: Entity) -> bool {
        let Some(gang) = entity.gang().filter(|_| self.queues.gangs().are_several()) else { return false };
        let waits =
            |other: Gang| self.queues.request(Entity::Gang(other)).is_some_and(|request| request.blocked.is_none());
        let runs = |other: Gang| self.holds_of_gang(other).any(|(_, hold)| !hold.is_bypassed());
        let mut others = self.queues.gangs().others(gang);
        self.settings.anti_thrash != AntiThrash::Off
            && others.any(|other| (waits(other) || runs(other)) && self.gangs_conflict(gang, other))
    }

    /// Whether a gang must release its locks because a conflicting gang held a lock first. If
    /// neither released its locks, the two gangs would wait for each other.
    pub fn yields(&self, entity: Entity) -> bool {
        let Some(gang) = entity.gang().filter(|_| self.queues.gangs().are_several()) else { return false };
        if self.settings.anti_thrash == AntiThrash::Off {
            return false;
        }
        let first = |gang: Gang| {
            let holds = self.holds_of_gang(gang).filter(|(_, hold)| !hold.is_bypassed());
            holds.map(|(_, hold)| (hold.since, hold.number)).min()
        };
        let Some(since) = first(gang) else { return false };
        let mut others = self.queues.gangs().others(gang);
        others.any(|other| first(other).is_some_and(|other| other < since) && self.gangs_conflict(gang, other))
    }

    /// The start of the holder's gang's turn, if the waiter is a conflicting gang.
    pub fn awaited_since(&self, holder: Entity, waiter: Entity) -> Option<Time> {
        let (gang, other) = (holder.gang()?, waiter.gang()?);
        let since = self.queues.gangs().turn_since(gang)?;
        (gang != other && self.gangs_conflict(gang, other)).then_some(since)
    }

    /// The requests of the other members of a client's gang. The client may need these members in
    /// order to drain.
    pub fn waiting_peers(&self, client: ClientId) -> BTreeSet<Entity> {
        self.queues.gang_peers(client).filter_map(|peer| self.queues.waiting(peer)).collect()
    }

    /// The locks that a client releases, and its gang if one of these locks was revoked.
    pub fn released(&self, client: ClientId, gpus: &GpuSet) -> (Vec<GpuId>, Option<Gang>) {
        let holds = || gpus.iter().filter_map(|id| Some((*id, self.gpus.hold(client, *id)?)));
        let revoked = holds().find_map(|(_, hold)| hold.revoked.and(hold.entity.gang()));
        (holds().map(|(id, _)| id).collect(), revoked)
    }

    /// A lock of a gang that is not revoked yet. After a revoked member has drained, the remaining
    /// members have only run to let that member drain.
    pub fn remaining_lock(&self, gang: Gang) -> Option<(ClientId, GpuId)> {
        let is_left = |hold: &Hold| hold.entity == Entity::Gang(gang) && hold.revoked.is_none();
        self.queues.gangs().members(gang).find_map(|client| {
            let (id, _) = self.gpus.holds_of(client).find(|(_, hold)| is_left(hold))?;
            Some((client, id))
        })
    }

    /// The locks that are revoked together with a client's lock: all that were granted together with
    /// it. A program that needs several GPUs at once gains nothing from some of them.
    pub fn revoked_with(&self, client: ClientId, id: GpuId) -> Vec<(ClientId, GpuSet)> {
        let Some(Hold { entity, group, .. }) = self.gpus.hold(client, id) else { return Vec::new() };
        let gpus = |member: ClientId| {
            let is_part =
                |hold: &Hold| hold.entity == *entity && (hold.group == *group || *entity != Entity::Solo(member));
            let holds = self.gpus.holds_of(member).filter(|(_, hold)| hold.revoked.is_none() && is_part(hold));
            holds.map(|(id, _)| id).collect()
        };
        self.queues.clients_of_entity(*entity).into_iter().map(|member| (member, gpus(member))).collect()
    }

    /// The gang of a client: by its rule, or by its own choice.
    pub fn gang_by_rule(&self, client: ClientId) -> Option<Gang> {
        let is_gang = |group: &GroupId| self.rules.limits(*group).is_some_and(|limits| limits.gang);
        let group = self.rules.group(client).filter(is_gang);
        group.map(Gang::Group).or(self.clients.get(&client).and_then(|state| Gang::named(state.named)))
    }
}
