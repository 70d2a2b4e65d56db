//! Checks whether a request can be granted, why it cannot, and whether there is a reason to revoke
//! a holder.

use super::Model;
use crate::{
    api::*,
    gpu::{Access, ClientLock, Gpu, Hold},
    policy::{Precedence, Waiter},
    queue::{Blocked, Entity, Request},
};
use std::cell::OnceCell;

impl Model<'_> {
    /// The clients of a request that hold a wanted lock and cannot drain.
    pub fn undrained(&self, entity: Entity) -> Vec<ClientId> {
        let wants = self.queues.request(entity).into_iter().flat_map(|request| &request.wants);
        let is_undrainable = |client: ClientId, id: GpuId| self.gpus.hold(client, id).is_some_and(Hold::is_undrainable);
        let undrained = wants.filter(|(client, gpus)| gpus.iter().any(|id| is_undrainable(**client, *id)));
        undrained.map(|(client, _)| *client).collect()
    }

    /// Whether a client of a request must wait before it is granted a GPU again, because mapping
    /// failed there.
    pub fn is_delayed(&self, entity: Entity) -> bool {
        let mut wants = self.queues.request(entity).into_iter().flat_map(|request| &request.wants);
        wants.any(|(client, gpus)| self.delayed_until(*client, gpus) > self.now)
    }

    /// Whether the holders of a GPU allow an entity to be admitted now.
    pub fn is_admissible(&self, entity: Entity, id: GpuId) -> bool {
        let (true, Some(request)) = (self.gpus.contains(id), self.queues.request(entity)) else { return false };
        let is_gone = match self.access(id) {
            Access::Turns => false,
            Access::Gone => true,
            Access::Suspended => return false,
        };
        if !is_gone && (self.waits_for_gang(entity) || self.is_kept_for_gang(entity, id)) {
            return false;
        }
        // Computed at most once, because the result is the same for all holders. Usually at most
        // one holder needs the result.
        let known = OnceCell::new();
        let together = || {
            let may_join = || is_gone || self.settings.anti_thrash == AntiThrash::Off || self.may_join(entity, id);
            *known.get_or_init(may_join)
        };
        self.gpus.holds_on(id).all(|(holder, hold)| {
            let is_holding = request.wants.get(&holder).is_some_and(|gpus| gpus.contains(&id));
            let beside = || {
                hold.is_bypassed()
                    || hold.entity == entity
                    || self.admits_while_draining(holder, hold, entity)
                    || together()
            };
            !is_holding && beside()
        })
    }

    /// Whether each client of a request has an allowance for all bytes that it needs on a GPU.
    pub fn has_memory(&self, entity: Entity, id: GpuId) -> bool {
        let has =
            |client| self.gpus.account(client, id).is_some_and(|account| account.allowance >= self.need(client, id));
        self.queues.request(entity).is_some() && self.queues.wanting(entity, id).all(has)
    }

    /// Whether memory that others wait for is still being evicted from a request's clients: memory of
    /// clients that run by page faults, or memory that has to leave for rooms or headroom. A client
    /// does not evict memory while it holds the lock, so a grant would delay those that wait. For a
    /// room, the client would also be revoked at once, and granted again, without end.
    pub fn is_evicting(&self, entity: Entity, id: GpuId) -> bool {
        let vacates = self.gpus.get(id).is_some_and(|gpu| gpu.vacates(self.settings));
        let evicts = |client| {
            let Some(account) = self.gpus.account(client, id) else { return false };
            account.charge > account.allowance.max(account.report.pinned)
                && (vacates || self.faults_in(client, id))
                && self.eviction_block(client, id).is_none()
        };
        self.queues.wanting(entity, id).any(evicts)
    }

    /// Whether a request is the first in all of its queues and can be granted.
    pub fn is_grantable(&self, entity: Entity) -> bool {
        let Some(request) = self.queues.request(entity) else { return false };
        if request.gathers.is_some_and(|until| until > self.now) || self.is_about_to_drain(entity) {
            return false;
        }
        let is_served = |id: &GpuId| {
            let is_next = || {
                self.queues.first(*id) == Some(entity) && self.has_memory(entity, *id) && !self.is_evicting(entity, *id)
            };
            self.is_admissible(entity, *id) && (self.access(*id) == Access::Gone || is_next())
        };
        request.wants.values().flatten().all(is_served)
    }

    /// Those of the wanted GPUs that a client has to wait for. It need not wait for locks that it
    /// holds. A revoked lock has to be released first.
    pub fn locks_to_wait_for(&self, client: ClientId, gpus: GpuSet) -> GpuSet {
        let is_wanted = |gpu: &GpuId| {
            self.gpus.lock(client, *gpu).is_some_and(|lock| lock.hold.as_ref().is_none_or(|h| h.revoked.is_some()))
        };
        gpus.into_iter().filter(is_wanted).collect()
    }

    /// Whether a request has waited long enough to precede all other requests of its owner from now
    /// on.
    pub fn is_due_to_age(&self, entity: Entity) -> bool {
        let request = self.queues.request(entity);
        request.is_some_and(|request| !request.aged && request.ages.is_some_and(|at| at <= self.now))
    }

    /// Why a request would only delay other requests in the queues: it may not run yet, or it would
    /// take bytes on other GPUs and could not use them. `None`: the request should be queued.
    pub fn stays_out(&self, entity: Entity) -> Option<Blocked> {
        if let Some(until) = self.shares().request_capped_until(entity) {
            return Some(Blocked::Until(until));
        }
        let is_alone = |id: &GpuId| {
            let members = self.queues.wanting(entity, *id);
            members.clone().count() == 1 || self.is_crowded_out(*id, members)
        };
        self.full_gpus(entity).find(is_alone).map(Blocked::Pinned)
    }

    /// The GPUs of a request that have no room for it: see [`Model::has_room`].
    pub fn full_gpus(&self, entity: Entity) -> impl Iterator<Item = GpuId> {
        let gpus = self.queues.request(entity).into_iter().flat_map(Request::gpus);
        gpus.filter(move |id| !self.has_room(entity, *id))
    }

    /// Whether a queued request needs neither bytes nor turns, because its clients use managed memory
    /// and anti-thrash is `off`. While memory of such a client is being evicted for other clients,
    /// the client's request waits in the queue.
    pub fn needs_no_turn(&self, entity: Entity) -> bool {
        let Some(request) = self.queues.request(entity).filter(|request| request.blocked.is_none()) else {
            return false;
        };
        let is_needless = |client: ClientId, id: GpuId| {
            self.faults_in(client, id)
                && self.access(id) != Access::Suspended
                && self.gpus.hold(client, id).is_none()
                && !self.is_evicting(entity, id)
        };
        request.wants.iter().all(|(client, gpus)| gpus.iter().all(|id| is_needless(*client, *id)))
    }

    /// When a client can be granted these GPUs again after mapping failed there. 0 if mapping never
    /// failed there.
    pub fn delayed_until(&self, client: ClientId, gpus: &GpuSet) -> Time {
        let attachments = gpus.iter().filter_map(|id| self.gpus.attachment(client, *id));
        attachments.map(|attachment| attachment.failures.not_before).max().unwrap_or_default()
    }

    /// Whether a request could be served if every client evicted all evictable bytes. A request
    /// that already has its memory on the GPU can be served, except if that memory must be evicted
    /// for a room.
    pub fn has_room(&self, entity: Entity, id: GpuId) -> bool {
        let (Some(gpu), Some(_)) = (self.gpus.get(id), self.queues.request(entity)) else { return true };
        if gpu.access != Access::Turns {
            return true;
        }
        let members = self.queues.wanting(entity, id);
        if self.is_crowded_out(id, members.clone()) {
            return false;
        }
        self.could_fit(gpu, members) || self.has_memory(entity, id)
    }

    /// Whether clients would fit on a GPU if all evictable memory of other clients were evicted.
    fn could_fit(&self, gpu: &Gpu, clients: impl Iterator<Item = ClientId>) -> bool {
        let (mut need, mut unevictable) = (0u64, 0u64);
        for client in clients {
            need = need.saturating_add(gpu.need(self.gpu_context(), client));
            unevictable = unevictable.saturating_add(gpu.unevictable_of(client));
        }
        let others = gpu.ledger.unevictable().saturating_sub(unevictable);
        need <= gpu.capacity(self.settings).saturating_sub(others)
    }

    /// The undrainable holder that gets its memory before a request is granted. A request precedes an
    /// undrainable holder once. If its clients have run beside the holder since the holder was revoked,
    /// the holder comes first. Otherwise, clients that always have work would keep the holder from
    /// draining for ever.
    pub fn undrainable_ahead_of(&self, entity: Entity, id: GpuId, members: &[ClientId]) -> Option<ClientId> {
        let has_run_since = |revoked: Time| {
            let locks = members.iter().filter_map(|member| self.gpus.lock(*member, id));
            locks.filter(|lock| lock.grants > 0).any(|lock| lock.last_run > revoked)
        };
        let is_ahead = |holder: ClientId, hold: &Hold| {
            hold.entity != entity
                && hold.revoked.is_some_and(|revoked| has_run_since(revoked.first))
                && self.gpus.lock(holder, id).is_some_and(ClientLock::may_need_memory)
                && self.can_be_served(holder, id)
        };
        self.gpus.holds_on(id).find(|(holder, hold)| is_ahead(*holder, hold)).map(|(holder, _)| holder)
    }

    /// Whether memory can be evicted for an undrainable holder so that it drains: its process runs, and
    /// it could have all bytes that it needs.
    pub fn can_be_served(&self, holder: ClientId, id: GpuId) -> bool {
        let runs = self.clients.get(&holder).is_some_and(|state| !state.stopped);
        runs && self.gpus.get(id).is_some_and(|gpu| self.could_fit(gpu, [holder].into_iter()))
    }

    pub fn members_of_first(&self, id: GpuId) -> Vec<ClientId> {
        self.queues.first(id).map(|entity| self.queues.members(entity, id)).unwrap_or_default()
    }

    /// Whether a request must wait on this GPU for a request or holder of a better tier, and also
    /// wants other GPUs. The wait may be long, and a queued request would block the other GPUs for
    /// all clients.
    pub fn waits_behind(&self, entity: Entity, id: GpuId) -> bool {
        let Some(request) = self.queues.request(entity).filter(|_| self.rules.have_classes()) else { return false };
        if self.access(id) == Access::Gone {
            return false;
        }
        let tier = request.key.class.tier;
        let several = request.wants.values().flatten().any(|other| *other != id);
        let waits = || self.queues.queue(id).next().is_some_and(|(key, _)| key.class.tier < tier);
        let is_better = |(holder, hold): (ClientId, &Hold)| {
            !hold.is_bypassed() && hold.entity != entity && self.shares().class_of_holder(holder).tier < tier
        };
        several && (waits() || (self.gpus.holds_on(id).any(is_better) && !self.is_admissible(entity, id)))
    }

    /// Requests that no longer have to wait for a request or holder of a better tier.
    pub fn unblocked(&self, id: GpuId) -> Vec<Entity> {
        self.queues.behind(id).filter(|entity| !self.waits_behind(*entity, id)).collect()
    }

    /// Whether a request is admitted beside a draining holder. In `auto`, a request that precedes
    /// the holder is granted without waiting for the holder's queued work, if the request's memory
    /// fits beside the holder's. The GPU time-slices the two clients until the drain ends.
    pub fn admits_while_draining(&self, holder: ClientId, hold: &Hold, waiter: Entity) -> bool {
        let is_auto = self.settings.anti_thrash == AntiThrash::Auto;
        is_auto && hold.revoked.is_some() && self.shares().precedence(waiter, holder) == Precedence::Before
    }

    /// Whether there is a reason to revoke a holder.
    pub fn is_wanted_from(&self, client: ClientId, id: GpuId) -> bool {
        // Bytes that the holder cannot free may block a request, or a request may have been
        // admitted beside the holder.
        let hold = self.gpus.hold(client, id);
        let undrainable = hold.is_some_and(Hold::is_undrainable);
        let is_in_the_way = || hold.is_some_and(|hold| self.is_in_the_way(hold.entity));
        let exclusive = self.settings.anti_thrash != AntiThrash::Off;
        let others = self.queues.first(id).is_some()
            || (undrainable && (self.queues.blocks_any(id) || self.waits_to_return(id).is_some()))
            || self.overdrawn(id) > 0
            || (exclusive && self.gpus.holders(id).count() > 1 && !self.may_all_stay(id));
        let is_spent = self.shares().capped_at(client, id).is_some_and(|at| at <= self.now);
        // The client itself may want the lock again, and must release it first.
        others || is_in_the_way() || is_spent || self.sleep.is_held_off(client) || self.queues.waits_for(client, id)
    }

    /// Whether a client gets no free bytes on a GPU: the client neither runs nor waits there, and
    /// the client or its group exceeds a limit.
    pub fn is_over_limit(&self, client: ClientId, id: GpuId) -> bool {
        let uses = self.gpus.hold(client, id).is_some() || self.queues.waits_for(client, id);
        !uses && self.ask_quota(|quota, cx| quota.is_over(cx, client, id))
    }

    /// The allowance of a client after memory beyond the limit of the client or its group is evicted.
    /// A running client keeps the memory that it needs. `None`: nothing is to be evicted.
    pub fn within_limits(&self, client: ClientId, id: GpuId) -> Option<u64> {
        let account = self.gpus.account(client, id).filter(|_| self.is_over_limit(client, id))?;
        let allowance = |client| self.gpus.account(client, id).map_or(0, |account| account.allowance);
        let surplus = self.ask_quota(|quota, cx| quota.surplus(cx, client, id, allowance));
        let take = account.evictable().min(surplus);
        (take > 0).then(|| account.allowance - take)
    }

    /// Bytes that the members of a request still lack on a GPU.
    pub fn lacking(&self, entity: Entity, id: GpuId) -> u64 {
        let lacking = |client| {
            let allowed = self.gpus.account(client, id).map_or(0, |account| account.allowance);
            self.need(client, id).saturating_sub(allowed)
        };
        self.queues.wanting(entity, id).fold(0u64, |sum, client| sum.saturating_add(lacking(client)))
    }

    /// The policy's view of the first request of a GPU, which has to wait. `lacking`: bytes that it
    /// lacks; `short`: those of them that only holders can free.
    pub fn first_waiter(&self, entity: Entity, id: GpuId, members: &[ClientId], lacking: u64, short: u64) -> Waiter {
        let histories = || members.iter().filter_map(|member| self.gpus.history(*member, id));
        let request = self.queues.request(entity);
        Waiter {
            burst: histories().map(|history| history.bursts.expected()).max().unwrap_or_default(),
            is_first_burst: histories().all(|history| history.bursts.is_first()),
            moving: self.moving_both_ways(id, short, members),
            arrives: self.moving_both_ways(id, lacking, members),
            evicts: lacking > 0,
            unmeasured: histories().any(|history| history.utilization.is_open()),
            holders_measured: self.are_measured(id),
            waiters: self.queues.queue_length(id),
            rank: request.map_or(Time::ZERO, |request| request.key.rank),
            aged: request.is_some_and(|request| request.aged),
            ..Waiter::default()
        }
    }

    /// Undrainable holders that may need more bytes in order to drain.
    pub fn undrainable_holders(&self, id: GpuId) -> Vec<ClientId> {
        let may_need = |client: &ClientId| self.gpus.lock(*client, id).is_some_and(ClientLock::may_need_memory);
        self.gpus.holders(id).filter(may_need).collect()
    }
}
