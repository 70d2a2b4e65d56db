//! Bytes for holders and for the queue, and grants to requests that have all that they need.

use super::Pressure;
use crate::{
    api::*,
    fairness::Precedence,
    lock::{Blocked, Entity},
    machine::Machine,
    policy::Waiter,
};

impl Machine {
    /// Bytes that are needed before any waiting client gets some: for contexts and other programs, then for holders that grow.
    /// Returns the bytes that are on their way out but spoken for.
    pub(super) fn serve_holders(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let mut owed = self.overdrawn(id);
        let next = self.members_of_first(id);
        if owed > 0 {
            pressure.short = self.collect(id, owed, &[], &next);
        }
        for holder in self.lock.holders(id).collect::<Vec<_>>() {
            if self.lock.hold(holder, id).is_none_or(|hold| hold.revoked.is_some()) {
                continue;
            }
            let lacking = self.credit(holder, id, owed);
            if lacking > 0 {
                owed = owed.saturating_add(lacking);
                let short = self.collect(id, owed, &[holder], &next);
                if short > 0 {
                    // It waits for bytes of other holders. Only the first one granted does: two that wait for each other would
                    // wait for ever, so the others are asked to go, whatever they want themselves.
                    pressure.short = pressure.short.max(short);
                    pressure.grower = Some(holder);
                }
                break;
            }
        }
        owed
    }

    /// Sees to it that `owed` bytes are on their way out, from clients without the lock. Says how many are not.
    pub(crate) fn collect(&mut self, id: GpuId, owed: u64, spare: &[ClientId], last: &[ClientId]) -> u64 {
        let arriving = self.arriving(id, spare);
        if owed > arriving {
            self.evict(id, owed - arriving, spare, last);
        }
        owed.saturating_sub(self.arriving(id, spare))
    }

    fn members_of_first(&self, id: GpuId) -> Vec<ClientId> {
        self.lock.first(id).map(|entity| self.lock.members(entity, id)).unwrap_or_default()
    }

    /// Prepares the first in line, grants what can be granted, and goes on with the next, until one has to wait.
    /// Returns the bytes that this one lacks.
    pub(super) fn serve_queue(&mut self, id: GpuId, owed: u64, pressure: &mut Pressure) -> u64 {
        loop {
            let Some(entity) = self.lock.first(id) else { return 0 };
            let members = self.lock.members(entity, id);
            if !self.fits(entity, id, &members) {
                continue; // it left the line
            }
            let mut lacking = 0u64;
            if pressure.short == 0 {
                for member in &members {
                    lacking = lacking.saturating_add(self.credit(*member, id, owed));
                }
            } else {
                // Nothing is free, and what comes is owed to others.
                for member in &members {
                    let allowed = self.account(*member, id).map_or(0, |account| account.allowance);
                    lacking = lacking.saturating_add(self.need(*member, id).saturating_sub(allowed));
                }
            }
            let short = if lacking > 0 { self.collect(id, owed.saturating_add(lacking), &members, &[]) } else { 0 };
            if self.is_grantable(entity) {
                self.begin_trials(entity);
                self.grant(entity);
                continue;
            }
            if self.waits_behind(entity, id) {
                self.block(entity, Blocked::Behind(id));
                continue;
            }
            let locked = !self.is_admissible(entity, id);
            self.lock.note_idle_for(self.now, id, entity, lacking > 0 && !locked);
            if lacking > 0 && !locked {
                self.report_wait(entity, WaitReason::Eviction);
            }
            let burst =
                members.iter().filter_map(|m| self.histories.of(*m, id)).map(|history| history.bursts.expected()).max();
            let both_ways = |bytes| self.moving_both_ways(id, bytes, &members);
            let (moving, arrives) = (both_ways(short), both_ways(lacking));
            pressure.short = pressure.short.max(short);
            pressure.first = Some(entity);
            pressure.locked_out = locked;
            pressure.waiter = Some(Waiter {
                precedence: Precedence::default(),
                burst: burst.unwrap_or_default(),
                moving,
                arrives,
                evicts: lacking > 0,
                unmeasured: members
                    .iter()
                    .any(|m| self.histories.of(*m, id).is_some_and(|history| history.utilization.is_open())),
                holders_measured: self.are_measured(id),
                waiters: self.lock.queue_length(id),
                rank: self.lock.request(entity).map_or(Time::ZERO, |request| request.key.rank),
                aged: self.lock.request(entity).is_some_and(|request| request.aged),
                ..Waiter::default()
            });
            self.defer_behind(id);
            return lacking;
        }
    }

    /// A holder that cannot drain may need more bytes in order to get there. It comes after all who wait, and no holder
    /// gives anything for it. Returns the bytes that it lacks.
    pub(super) fn serve_undrainable(&mut self, id: GpuId) -> u64 {
        let holders = self.lock.holds_on(id).filter(|(_, hold)| hold.is_undrainable());
        let mut lacking = 0u64;
        for holder in holders.map(|(client, _)| client).collect::<Vec<_>>() {
            lacking = lacking.saturating_add(self.credit(holder, id, lacking));
            if lacking > 0 {
                let mut spare = self.members_of_first(id);
                spare.push(holder);
                self.collect(id, lacking, &spare, &[]);
            }
        }
        lacking
    }

    /// Lets a request that cannot be served leave the line, so that it does not hold up others, until something that is
    /// pinned goes; a gang that is too large together falls apart.
    fn fits(&mut self, entity: Entity, id: GpuId, members: &[ClientId]) -> bool {
        if self.has_room(entity, id, members) {
            return true;
        }
        if members.len() > 1 {
            let all: Vec<ClientId> = self.lock.clients_of(entity).collect();
            self.split(entity, &all);
        } else {
            self.block(entity, Blocked::Pinned(id));
        }
        false
    }

    /// Whether a request could be served there if everybody who can give bytes did.
    pub(crate) fn has_room(&self, entity: Entity, id: GpuId, members: &[ClientId]) -> bool {
        let (Some(gpu), Some(_)) = (self.memory.get(&id), self.lock.request(entity)) else { return true };
        let mut own = 0u64;
        let mut need = 0u64;
        for member in members {
            own = own.saturating_add(gpu.ledger.unevictable_of(*member));
            need = need.saturating_add(self.need(*member, id));
        }
        let room = gpu.capacity(&self.settings).saturating_sub(gpu.ledger.unevictable().saturating_sub(own));
        need <= room || self.has_memory(entity, id)
    }
}
