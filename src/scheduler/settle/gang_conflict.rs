//! Conflicts between gangs that share a GPU and use others besides: one waits until the other holds nothing, and the
//! gang that holds a lock already goes first. Otherwise each could hold a GPU that the other waits for, its kernels
//! spinning for the missing members.

use crate::{
    api::*,
    machine::Machine,
    queue::{Entity, Gang},
};
use std::collections::BTreeSet;

impl Machine {
    /// Whether two gangs conflict: they share a GPU on which they cannot run together, and one of them uses several.
    fn gangs_conflict(&self, one: Gang, other: Gang) -> bool {
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

    /// Whether an entity is a gang that has to wait for a conflicting gang, on any GPU.
    pub(crate) fn waits_for_gang(&self, entity: Entity) -> bool {
        let Entity::Gang(gang) = entity else { return false };
        if !self.queues.gangs().are_several() || self.settings.anti_thrash == AntiThrash::Off {
            return false;
        }
        self.queues.gangs().others(gang).any(|other| {
            self.gangs_conflict(gang, other) && self.holds_of_gang(other).any(|(_, hold)| !hold.is_bypassed())
        })
    }

    /// The first gang in the queues of other GPUs that waits for the holders of this one. `None`: no gang does.
    pub(crate) fn gang_awaiting_holders(&self, id: GpuId) -> Option<Entity> {
        if !self.queues.gangs().are_several() || self.settings.anti_thrash == AntiThrash::Off {
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

    /// Whether a conflicting gang, on any GPU, waits for this one to release all that it holds, or runs while this one
    /// is bypassed.
    pub(crate) fn is_in_the_way(&self, entity: Entity) -> bool {
        let Some(gang) = entity.gang().filter(|_| self.queues.gangs().are_several()) else { return false };
        let waits =
            |other: Gang| self.queues.request(Entity::Gang(other)).is_some_and(|request| request.blocked.is_none());
        let runs = |other: Gang| self.holds_of_gang(other).any(|(_, hold)| !hold.is_bypassed());
        let mut others = self.queues.gangs().others(gang);
        self.settings.anti_thrash != AntiThrash::Off
            && others.any(|other| (waits(other) || runs(other)) && self.gangs_conflict(gang, other))
    }

    /// Whether a gang has to release what it holds because a conflicting one held something first: each would wait for
    /// the other.
    pub(crate) fn yields(&self, entity: Entity) -> bool {
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

    /// Since when the holder's gang has had its turn, if the waiter is a gang that conflicts with it.
    pub(crate) fn awaited_since(&self, holder: Entity, waiter: Entity) -> Option<Time> {
        let (gang, other) = (holder.gang()?, waiter.gang()?);
        let since = self.queues.gangs().turn_since(gang)?;
        (gang != other && self.gangs_conflict(gang, other)).then_some(since)
    }

    /// Marks the GPUs of a gang whose holds or requests changed, and of the gangs that conflict with it.
    pub(crate) fn touch_conflicting_gangs(&mut self, entity: Entity) {
        let Some(gang) = entity.gang() else { return };
        let conflicting = self.queues.gangs().others(gang).filter(|other| self.gangs_conflict(gang, *other));
        let gpus: GpuSet = conflicting.chain([gang]).flat_map(|gang| self.gpus_of_gang(gang)).collect();
        self.effects.touch_all(gpus);
    }
}
