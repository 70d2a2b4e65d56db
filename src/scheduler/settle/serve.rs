//! Allocates bytes to holders and to the queue. Grants requests that have all the bytes that they
//! need.
//!
//! Bytes that the first request lacks are evicted from clients without the lock while the holder
//! runs. Only the holder's own bytes wait for the end of its turn. A request is granted when it is
//! first in the queue, may hold the lock, and has been allowed all bytes that it needs.

use super::Pressure;
use crate::{
    api::*,
    gpu::ClientLock,
    machine::Machine,
    policy::Precedence,
    policy::Waiter,
    queue::{Blocked, Entity},
};

impl Machine {
    /// Serves the needs that precede all waiting clients: first contexts and other programs, then
    /// holders that grow. Returns the number of bytes being freed that are reserved for these
    /// needs.
    pub(super) fn serve_holders(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let mut reserved_ahead = self.model().overdrawn(id);
        let next = self.model().members_of_first(id);
        if reserved_ahead > 0 {
            pressure.short = self.collect(id, reserved_ahead, &[], &next);
            let vacates = self.gpus.get(id).is_some_and(|gpu| gpu.vacates(&self.settings));
            pressure.at_once = pressure.short > 0 && vacates;
        }
        for holder in self.gpus.holders(id).collect::<Vec<_>>() {
            if self.gpus.hold(holder, id).is_none_or(|hold| hold.revoked.is_some()) {
                continue;
            }
            let lacking = self.credit(holder, id, reserved_ahead);
            if lacking > 0 {
                reserved_ahead = reserved_ahead.saturating_add(lacking);
                let short = self.collect(id, reserved_ahead, &[holder], &next);
                if short > 0 {
                    // The holder waits for bytes of other holders. Only the holder that was granted
                    // first may do so: two holders that wait for each other would never continue.
                    // So the other holders are revoked even if they lack bytes.
                    pressure.short = pressure.short.max(short);
                    pressure.grower = Some(holder);
                }
                break;
            }
        }
        reserved_ahead
    }

    /// Evicts memory of clients without the lock until `bytes` are free or being freed. Returns the
    /// number of bytes that only holders can free. Clients in `exempt` are not evicted, and clients
    /// in `last` are evicted last.
    pub(crate) fn collect(&mut self, id: GpuId, bytes: u64, exempt: &[ClientId], last: &[ClientId]) -> u64 {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return bytes };
        let arriving = gpu.arriving(cx, fx, exempt);
        if bytes <= arriving {
            return 0;
        }
        let queue = self.model().policy().evicts_by_queue().then(|| self.model().whole_queue(id));
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return bytes };
        let asked = gpu.evict(cx, fx, bytes - arriving, exempt, last, queue.as_deref());
        let arriving = gpu.arriving(cx, fx, exempt);
        // Sets the time at which each client's answer is due.
        asked.into_iter().for_each(|client| self.check(client));
        bytes.saturating_sub(arriving)
    }

    /// Allocates bytes to the first request, grants it if possible, and continues with the next
    /// request until one has to wait. Returns the bytes that the waiting request lacks.
    pub(super) fn serve_queue(&mut self, id: GpuId, reserved_ahead: u64, pressure: &mut Pressure) -> u64 {
        loop {
            let Some(entity) = self.queues.first(id) else { return 0 };
            let members = self.queues.members(entity, id);
            if !self.fits(entity, id, &members) {
                continue; // the request has left the queue
            }
            if let Some(holder) = self.model().undrainable_ahead_of(entity, id, &members) {
                let lacking = self.credit(holder, id, reserved_ahead);
                if lacking > 0 {
                    // Other clients beside the holder free their bytes when their turns end.
                    let short = self.collect(id, reserved_ahead.saturating_add(lacking), &[holder], &[]);
                    pressure.short = pressure.short.max(short);
                    self.report_wait(entity, WaitReason::HolderStuck);
                    self.defer_behind(id);
                    return lacking;
                }
            }
            let mut lacking = 0u64;
            if pressure.short == 0 {
                for member in &members {
                    lacking = lacking.saturating_add(self.credit(*member, id, reserved_ahead));
                }
            } else {
                // No bytes are free, and bytes being freed are reserved for earlier needs.
                for member in &members {
                    let allowed = self.gpus.account(*member, id).map_or(0, |account| account.allowance);
                    lacking = lacking.saturating_add(self.model().need(*member, id).saturating_sub(allowed));
                }
            }
            let short =
                if lacking > 0 { self.collect(id, reserved_ahead.saturating_add(lacking), &members, &[]) } else { 0 };
            let locked = !self.model().is_admissible(entity, id);
            if !locked && self.model().is_grantable(entity) {
                self.grant(entity);
                continue;
            }
            if self.model().waits_behind(entity, id) {
                self.block(entity, Blocked::Behind(id));
                continue;
            }
            if short == 0 && pressure.short == 0 && reserved_ahead == 0 && self.backfill(id, entity) {
                continue;
            }
            self.gpus.note_idle_for(self.now, id, entity, lacking > 0 && !locked);
            if lacking > 0 && !locked {
                self.report_wait(entity, WaitReason::Eviction);
            }
            let burst =
                members.iter().filter_map(|m| self.gpus.history(*m, id)).map(|history| history.bursts.expected()).max();
            let both_ways = |bytes| self.model().moving_both_ways(id, bytes, &members);
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
                    .any(|m| self.gpus.history(*m, id).is_some_and(|history| history.utilization.is_open())),
                holders_measured: self.model().are_measured(id),
                waiters: self.queues.queue_length(id),
                rank: self.queues.request(entity).map_or(Time::ZERO, |request| request.key.rank),
                aged: self.queues.request(entity).is_some_and(|request| request.aged),
                ..Waiter::default()
            });
            self.defer_behind(id);
            return lacking;
        }
    }

    /// Serves undrainable holders, because they may need more bytes in order to drain. Such holders
    /// are served after all waiting requests. Other holders free memory for them when their turns end.
    /// Returns the bytes that undrainable holders lack.
    pub(super) fn serve_undrainable(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let holders = self
            .gpus
            .holds_on(id)
            .filter(|(client, _)| self.gpus.lock(*client, id).is_some_and(ClientLock::may_need_memory));
        let mut lacking = 0u64;
        for holder in holders.map(|(client, _)| client).collect::<Vec<_>>() {
            lacking = lacking.saturating_add(self.credit(holder, id, lacking));
            if lacking > 0 {
                let mut exempt = self.model().members_of_first(id);
                exempt.push(holder);
                let short = self.collect(id, lacking, &exempt, &[]);
                if self.model().can_be_served(holder, id) {
                    pressure.short = pressure.short.max(short);
                }
            }
        }
        lacking
    }

    /// Whether a request fits on the GPU. A request that does not fit leaves the queue until
    /// unevictable memory becomes evictable, so that it does not delay other requests. A gang whose
    /// members do not fit together is split instead.
    fn fits(&mut self, entity: Entity, id: GpuId, members: &[ClientId]) -> bool {
        if self.model().has_room(entity, id, members) {
            return true;
        }
        if members.len() > 1 && !self.model().is_crowded_out(id, members) {
            let all: Vec<ClientId> = self.queues.clients_of(entity).collect();
            self.split(entity, &all);
        } else {
            self.block(entity, Blocked::Pinned(id));
        }
        false
    }
}
