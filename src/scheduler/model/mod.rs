//! Decisions that involve several components. They only read; `machine`, `sharing`, `requests` and
//! `presence` then make the changes.
//!
//! - `order`: the order of queues, and the precedence of waiting clients over holders.
//! - `admission`: whether a request can be granted, and why not.
//! - `gangs`: how a gang's members help each other, and which gangs exclude each other.
//! - `turns`: when holders have to release the lock.
//! - `answers`: clients that do not answer.
//! - `standstill`: clients that probably wait for each other for ever.
//! - `sleep`, `moves`: which clients can sleep, and where sleeping clients can move.
//! - `corun`: which clients may hold a GPU at the same time.
//! - `backfill`: requests that may run while the first request of a GPU waits for other GPUs.

mod admission;
mod answers;
mod backfill;
mod corun;
mod gangs;
mod moves;
mod order;
mod sleep;
pub mod standstill;
mod turns;

pub(crate) use turns::Pressure;

use crate::{
    api::*,
    client::Clients,
    fairness::Fairness,
    gpu::{self, Access, Gpus, capacity::GpuCapacities},
    placement::Placements,
    policy::{self, Policy},
    queue::{Entity, Queues},
    quota::{self, Quota},
    rules::Rules,
    sleep::Sleep,
};
use std::time::Duration;

/// All state that decisions depend on.
#[derive(Clone, Copy)]
pub(crate) struct Model<'a> {
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub clients: &'a Clients,
    pub gpus: &'a Gpus,
    pub queues: &'a Queues,
    pub sleep: &'a Sleep,
    pub quota: &'a Quota,
    pub fairness: &'a Fairness,
    pub places: &'a Placements,
}

impl<'a> Model<'a> {
    pub fn policy(&self) -> &'static dyn Policy {
        policy::named(self.settings.policy)
    }

    pub fn access(&self, id: GpuId) -> Access {
        self.gpus.get(id).map_or(Access::default(), |gpu| gpu.access)
    }

    /// The state that decisions about a GPU depend on.
    pub fn gpu_context(&self) -> gpu::Context<'a> {
        let Self { now, settings, rules, clients, queues, sleep, quota, .. } = *self;
        gpu::Context { now, settings, rules, clients, queues, sleep, quota }
    }

    /// Runs `ask` on the quota without changing it.
    pub fn ask_quota<R>(&self, ask: impl FnOnce(&Quota, quota::Context) -> R) -> R {
        let gpus = GpuCapacities { gpus: self.gpus, settings: self.settings };
        ask(self.quota, quota::Context { now: self.now, rules: self.rules, gpus: &gpus })
    }

    /// The allowance in bytes that a client needs to run on a GPU: see [`Gpu::need`].
    pub fn need(&self, client: ClientId, id: GpuId) -> u64 {
        self.gpus.get(id).map_or(0, |gpu| gpu.need(self.gpu_context(), client))
    }

    pub fn faults_in(&self, client: ClientId, id: GpuId) -> bool {
        self.gpus.attachment(client, id).is_some_and(|attachment| attachment.faults_in(self.settings))
    }

    /// Why none of a client's memory can be evicted from a GPU now. `None`: some of it can be
    /// evicted.
    pub fn eviction_block(&self, client: ClientId, id: GpuId) -> Option<EvictionBlock> {
        self.gpus.get(id)?.eviction_block(self.gpu_context(), client)
    }

    /// Bytes by which charges on a GPU exceed its capacity.
    pub fn overdrawn(&self, id: GpuId) -> u64 {
        self.gpus.get(id).map_or(0, |gpu| gpu.overdrawn(self.settings))
    }

    pub fn is_crowded_out(&self, id: GpuId, clients: impl IntoIterator<Item = ClientId>) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.is_crowded_out(self.settings, self.rules, clients))
    }

    /// The time to evict `bytes` from a GPU and restore them: see [`Gpu::moving_both_ways`].
    pub fn moving_both_ways(&self, id: GpuId, bytes: u64, exempt: &[ClientId]) -> Duration {
        self.gpus.get(id).map_or(Duration::ZERO, |gpu| gpu.moving_both_ways(bytes, exempt))
    }

    /// Whether a client cannot use any lock, because its process is stopped or the client is kept
    /// off its GPUs.
    pub fn is_absent(&self, client: ClientId) -> bool {
        self.clients.get(&client).is_some_and(|state| state.stopped) || self.sleep.is_held_off(client)
    }

    /// Whether a client holds or waits for a lock.
    pub fn has_position(&self, client: ClientId) -> bool {
        self.queues.waiting(client).is_some() || self.gpus.holds_any(client)
    }

    pub fn any_absent(&self, entity: Entity) -> bool {
        self.queues.clients_of(entity).any(|client| self.is_absent(client))
    }
}
