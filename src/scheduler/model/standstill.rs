//! Clients that probably wait for each other for ever.
//!
//! If the processes of a job are in no gang, two jobs can each hold a GPU that the other job waits for.
//! The holders' kernels then spin until the other processes of their jobs run, and these do not fit on
//! the GPU beside the holder of the other job. No order of turns ends this: nothing can interrupt a
//! kernel, and memory that a kernel may use cannot be evicted. So the scheduler only recognises the
//! state, and explains how to avoid it. Whether a kernel waits for another process, and for which one,
//! is unknown. Two programs with very long kernels look the same until a kernel ends.

use super::Model;
use crate::{
    api::*,
    gpu::Hold,
    queue::{Blocked, Entity},
};

/// A wait that may never end, because the processes of two jobs hold GPUs that the other job waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standstill {
    /// The waiting client does not fit beside this client, which cannot drain. It may wait for a client
    /// that waits for `gpu`.
    pub holder: ClientId,
    pub gpu: GpuId,
    /// The client that cannot drain on `gpu`. It may wait for the waiting client.
    pub other_holder: ClientId,
}

impl Model<'_> {
    /// The standstill in which a client waits, if the client is in the tenant of a stuck holder of another
    /// GPU, and a client in the tenant of its own GPU's stuck holder waits there.
    pub fn standstill(&self, client: ClientId) -> Option<Standstill> {
        let own = self.queues.waiting(client)?;
        let (own_gpu, holders) = self.stuck_holders(own)?;
        let are_fellows = |one: ClientId, other: ClientId| {
            let tenant = |client| self.clients.get(&client).map(|state| state.tenant);
            tenant(one) == tenant(other)
        };
        self.queues.requests().filter(|(entity, _)| *entity != own).find_map(|(entity, _)| {
            let (gpu, others) = self.stuck_holders(entity).filter(|(gpu, _)| *gpu != own_gpu)?;
            let other_holder = others.into_iter().find(|holder| are_fellows(*holder, client))?;
            let awaits = |holder: &ClientId| self.queues.clients_of(entity).any(|other| are_fellows(*holder, other));
            let holder = holders.iter().copied().find(awaits)?;
            Some(Standstill { holder, gpu, other_holder })
        })
    }

    /// The GPU on which a request has too little room, and the holders there that cannot drain. `None`: the
    /// request would not fit if these holders' memory left, so it waits for something else.
    fn stuck_holders(&self, entity: Entity) -> Option<(GpuId, Vec<ClientId>)> {
        let Some(Blocked::Pinned(id)) = self.queues.request(entity)?.blocked else { return None };
        let gpu = self.gpus.get(id)?;
        let members = self.queues.members(entity, id);
        let is_stuck = |(holder, hold): &(ClientId, &Hold)| hold.is_undrainable() && !members.contains(holder);
        let holders: Vec<ClientId> = self.gpus.holds_on(id).filter(is_stuck).map(|(holder, _)| holder).collect();
        let unevictable_of = |clients: &[ClientId]| {
            clients.iter().fold(0u64, |sum, client| sum.saturating_add(gpu.unevictable_of(*client)))
        };
        let leaves = unevictable_of(&holders).saturating_add(unevictable_of(&members));
        let stays = gpu.ledger.unevictable().saturating_sub(leaves);
        let need = members.iter().fold(0u64, |sum, member| sum.saturating_add(self.need(*member, id)));
        let fits = need <= gpu.capacity(self.settings).saturating_sub(stays);
        (fits && !holders.is_empty()).then_some((id, holders))
    }
}
