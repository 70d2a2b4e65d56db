//! The steps that bring one GPU to rest after an event: memory first, then the lock, then what holders are told. Settling a GPU on
//! which nothing changed does nothing.
//!
//! The components keep their state and decide nothing about each other; everything that needs more than one of them is here.
//!
//! Memory:
//! - `serve`: bytes for holders and for the queue, in that order, and grants.
//! - `credit`, `eviction`: raise and lower allowances. `protection`: memory that rules keep on the GPU, or off it.
//! - `reservations`: room for the driver's own allocations. `contexts`: clients that create a context.
//! - `measurements`: what NVML shows. `failures`: mappings that fail. `eviction_blocks`: memory that cannot leave.
//!
//! The lock:
//! - `requests`: from request to release. `order`: where requests stand in queues.
//! - `turns`: when holders have to give the lock back. `corun`: which clients may hold it together.
//! - `gangs`, `gang_conflict`: clients that run together or not at all.
//! - `unresponsive`: clients that do not answer. `traffic`: clients that thrash.

mod contexts;
mod corun;
mod credit;
mod eviction;
mod eviction_blocks;
mod failures;
mod gang_conflict;
mod gangs;
mod measurements;
mod order;
mod protection;
mod requests;
mod reservations;
mod serve;
mod traffic;
mod turns;
mod unresponsive;

use crate::{api::*, lock::Entity, machine::Machine, policy::Waiter, timers::Wake};
use reservations::ReservationNeeds;
use std::time::Duration;

/// A gang that waits for another is looked at again after this: whether the two can run together depends on what is said of
/// other GPUs.
const CONFLICT_LOOK: Duration = Duration::from_millis(100);

/// Why holders of a GPU are to give its lock back.
#[derive(Debug, Clone, Copy, Default)]
struct Pressure {
    /// Bytes that only holders can give.
    short: u64,
    /// A holder that is not to give them, since it is the one that lacks them.
    grower: Option<ClientId>,
    /// Bytes are lacked by more than those who wait for the lock.
    overdue: bool,
    /// The first in line.
    first: Option<Entity>,
    /// Whether the lock itself is in its way.
    locked_out: bool,
    /// What the turn depends on.
    waiter: Option<Waiter>,
}

impl Pressure {
    /// What clients with reservations lack that only holders can give; from here on more than the queue waits for bytes.
    fn add_reservations(&mut self, needs: &ReservationNeeds) {
        if needs.short > self.short {
            self.short = needs.short;
            self.grower = self.grower.or(needs.caller);
        }
        self.overdue = self.short > 0;
    }
}

impl Machine {
    pub(crate) fn settle(&mut self, id: GpuId) {
        // Which clients are there, how much memory, and in what order requests wait.
        self.count_deferred(id);
        self.note_capacity(id);
        self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
        self.enqueue_unblocked(id);
        let reclassified = self.reclassify(id);

        // Memory, in the order in which clients get it: overdrawn bytes and holders, then reservations, then the queue.
        // `reserved_ahead` is on its way out and spoken for.
        let mut pressure = Pressure::default();
        let holders_lack = self.serve_holders(id, &mut pressure);
        let reserved = self.serve_reservations(id, holders_lack);
        pressure.add_reservations(&reserved);
        let reserved_ahead = holders_lack.saturating_add(reserved.lacking);
        let mut lacking = self.serve_queue(id, reserved_ahead, &mut pressure);
        self.note_conflict(id, &mut pressure);
        if reserved_ahead == 0 && lacking == 0 {
            lacking = self.serve_undrainable(id);
        }
        let is_enough = reserved_ahead == 0 && lacking == 0;
        if let Some(gpu) = self.memory.get_mut(&id) {
            gpu.lacking = !is_enough;
        }
        let attaching = self.answer_attaching(id);
        if is_enough {
            self.credit_ahead(id);
        }

        // The lock: turns that end, and what holders are told.
        let turn = self.press(id, &pressure);
        let conflict = pressure.first.filter(|first| self.waits_for_gang(*first)).map(|_| self.now + CONFLICT_LOOK);
        let next = [attaching, turn, reserved.next, reclassified, conflict].into_iter().flatten().min();
        self.effects.wake(Wake::Gpu(id), next);
    }

    /// Requests that pinned memory kept out may fit once there is more room.
    fn note_capacity(&mut self, id: GpuId) {
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        let capacity = gpu.capacity(&self.settings);
        if gpu.ledger.take_unevictable_fell() || capacity > gpu.capacity {
            for entity in self.lock.take_blocked_by_pinned(id) {
                self.enqueue(entity);
            }
        }
        if let Some(gpu) = self.memory.get_mut(&id) {
            gpu.capacity = capacity;
        }
    }

    /// Requests that waited for one of a better class, which has gone.
    fn enqueue_unblocked(&mut self, id: GpuId) {
        let free: Vec<Entity> = self.lock.behind(id).filter(|entity| !self.waits_behind(*entity, id)).collect();
        free.into_iter().for_each(|entity| self.enqueue(entity));
    }

    /// A gang that waits in other queues for the holders of this GPU counts as the first in line here.
    fn note_conflict(&mut self, id: GpuId, pressure: &mut Pressure) {
        if !pressure.locked_out
            && let Some(rival) = self.rival_of_holders(id)
        {
            pressure.first = Some(rival);
            pressure.locked_out = true;
            pressure.waiter.get_or_insert_default();
        }
    }
}
