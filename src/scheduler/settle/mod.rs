//! Brings one GPU up to date after an event: first its memory, then the lock, then messages to
//! holders. Settling an unchanged GPU does nothing.
//!
//! Each component owns its state and the decisions about it. For example, `gpu` decides on one
//! GPU's memory. The module `settle` makes the decisions that change several components.
//!
//! Memory:
//! - `serve`: bytes for holders and then for the queue, and grants. `protection`: memory beyond the
//!   limits of rules.
//! - `reservations`: room for the driver's own allocations. `contexts`: admission of CUDA contexts.
//! - `sleep`: clients that are taken off their GPUs, and room to restore them. `moves`: clients
//!   that are restored on another GPU.
//! - `ahead`: host memory allocated ahead of evictions. `measurements`: limits, restores and
//!   failures that wait for a measurement. `failures`: requests that wait because mapping failed.
//!
//! The lock:
//! - `requests`: requests for the lock, from arrival to release. `order`: the order of queues.
//! - `turns`: when holders have to release the lock. `corun`: clients that may hold the lock
//!   together.
//! - `backfill`: grants on a GPU while its first request waits for other GPUs.
//! - `gangs`: clients that run together.
//! - `unresponsive`: clients that do not answer.

mod ahead;
mod backfill;
mod contexts;
mod corun;
mod failures;
mod gangs;
mod measurements;
mod moves;
mod order;
mod protection;
mod requests;
mod reservations;
mod serve;
mod sleep;
mod turns;
mod unresponsive;

use crate::{api::*, gpu::Access, machine::Machine, policy::Waiter, queue::Entity, timers::Wake};
use reservations::ReservationNeeds;
use std::time::Duration;

/// How often a gang's wait for another gang is checked. Whether the two gangs can run together also
/// depends on reports about other GPUs, and such a report does not settle this GPU.
const CONFLICT_LOOK: Duration = Duration::from_millis(100);

/// Why holders of a GPU should release it.
#[derive(Debug, Clone, Copy, Default)]
struct Pressure {
    /// Lacking bytes that only holders can free.
    short: u64,
    /// The holder that itself lacks these bytes and is not asked to free them.
    grower: Option<ClientId>,
    /// Holders or reservations lack bytes, in addition to the queue.
    overdue: bool,
    /// The bytes are for other programs, so holders are revoked before their turn ends.
    at_once: bool,
    /// The first request in the queue, or a gang that is in other queues and waits for these
    /// holders.
    first: Option<Entity>,
    /// Whether holders of the lock prevent the first request from being granted.
    locked_out: bool,
    /// The first request, as the policy sees it.
    waiter: Option<Waiter>,
}

impl Pressure {
    /// Adds the bytes that reservations lack and only holders can free. The queue has added nothing
    /// to `short` yet, so any missing bytes are overdue.
    fn add_reservations(&mut self, needs: &ReservationNeeds) {
        if needs.short > self.short {
            self.short = needs.short;
            self.grower = self.grower.or(needs.caller);
        }
        self.overdue = self.short > 0;
    }
}

impl Machine {
    /// Brings a GPU up to date. Called for each GPU that an event has marked.
    pub(crate) fn settle(&mut self, id: GpuId) {
        // Rooms, the number of contexts, the capacity, and the order of the queue.
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        let rooms = gpu.serve_rooms(cx.now, cx.settings, fx);
        gpu.count_deferred(cx);
        self.note_capacity(id);
        self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
        self.enqueue_unblocked(id);
        let reclassified = self.reclassify(id);
        if self.model().access(id) == Access::Gone {
            self.let_through(id);
            self.serve_returning(id);
            let next = self.answer_attaching(id);
            return self.effects.wake(Wake::Gpu(id), next);
        }

        // Memory, in order of precedence: contexts and holders, then reservations, then the queue.
        // `reserved_ahead` counts the bytes being freed for needs that precede the queue.
        let mut pressure = Pressure::default();
        let holders_lack = self.serve_holders(id, &mut pressure);
        let reserved = self.serve_reservations(id, holders_lack);
        pressure.add_reservations(&reserved);
        let reserved_ahead = holders_lack.saturating_add(reserved.lacking);
        let mut lacking = self.serve_queue(id, reserved_ahead, &mut pressure);
        self.with_gpu(id, |gpu, cx, fx| gpu.try_holder(cx, fx));
        self.note_conflict(id, &mut pressure);
        if reserved_ahead == 0 && lacking == 0 {
            lacking = self.serve_undrainable(id, &mut pressure);
        }
        let is_enough = reserved_ahead == 0 && lacking == 0;
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.lacking = !is_enough;
        }
        let returning = self.serve_returning(id);
        let attaching = self.answer_attaching(id);
        let sleeping = self.sleep_idle(id);
        if is_enough {
            self.with_gpu(id, |gpu, cx, fx| gpu.credit_ahead(cx, fx));
        }

        // The lock: turns that end, and messages to holders.
        let turn = self.update_turns(id, &pressure);
        self.note_opening(id);
        let conflict =
            pressure.first.filter(|first| self.model().waits_for_gang(*first)).map(|_| self.now + CONFLICT_LOOK);
        let next = [rooms, attaching, returning, sleeping, turn, reserved.next, reclassified, conflict]
            .into_iter()
            .flatten()
            .min();
        self.effects.wake(Wake::Gpu(id), next);
    }

    /// Grants requests for a GPU that is gone, if all other GPUs that the requests want can be
    /// granted too.
    fn let_through(&mut self, id: GpuId) {
        for entity in self.model().whole_queue(id) {
            for member in self.queues.members(entity, id) {
                self.credit(member, id, 0);
            }
            if self.model().is_grantable(entity) {
                self.grant(entity);
            }
        }
        for holder in self.gpus.holders(id).collect::<Vec<_>>() {
            self.credit(holder, id, 0);
        }
    }

    /// If the GPU has gained room, requeues the requests blocked by unevictable memory.
    fn note_capacity(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        let capacity = gpu.capacity(&self.settings);
        if gpu.ledger.take_unevictable_fell() || capacity > gpu.capacity {
            for entity in self.queues.take_blocked_by_pinned(id) {
                self.enqueue(entity);
            }
        }
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.capacity = capacity;
        }
    }

    /// Requeues requests that no longer have to wait for a request or holder of a better tier.
    fn enqueue_unblocked(&mut self, id: GpuId) {
        let free: Vec<Entity> =
            self.queues.behind(id).filter(|entity| !self.model().waits_behind(*entity, id)).collect();
        free.into_iter().for_each(|entity| self.enqueue(entity));
    }

    /// If a gang in other queues waits for the holders of this GPU, counts the gang as the first
    /// request of this GPU.
    fn note_conflict(&mut self, id: GpuId, pressure: &mut Pressure) {
        if !pressure.locked_out
            && let Some(waiting) = self.model().gang_awaiting_holders(id)
        {
            pressure.first = Some(waiting);
            pressure.locked_out = true;
            pressure.waiter.get_or_insert_default();
        }
    }
}
