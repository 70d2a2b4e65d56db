//! All GPUs, with the clients that have attached each GPU or hold its lock.

use super::{Access, Account, Attachment, ClientLock, Gpu, Hold};
use crate::{
    api::*,
    entity::{Entity, Gang},
    policy::History,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// All GPUs.
///
/// Invariant: `of_clients` lists, for each client, exactly the GPUs whose `attachments` include the
/// client. So only the methods here may add, remove or move clients.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Gpus {
    gpus: BTreeMap<GpuId, Gpu>,
    of_clients: BTreeMap<ClientId, GpuSet>,
    /// For clients that owe an answer: when the daemon was last asked to probe the process, and the
    /// minimum time until the next probe.
    probed: BTreeMap<ClientId, (Time, Duration)>,
}

impl Gpus {
    pub fn get(&self, id: GpuId) -> Option<&Gpu> {
        self.gpus.get(&id)
    }

    pub fn get_mut(&mut self, id: GpuId) -> Option<&mut Gpu> {
        self.gpus.get_mut(&id)
    }

    pub fn contains(&self, id: GpuId) -> bool {
        self.gpus.contains_key(&id)
    }

    pub fn ids(&self) -> impl Iterator<Item = GpuId> {
        self.gpus.keys().copied()
    }

    pub fn iter(&self) -> impl Iterator<Item = (GpuId, &Gpu)> {
        self.gpus.iter().map(|(id, gpu)| (*id, gpu))
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = (GpuId, &mut Gpu)> {
        self.gpus.iter_mut().map(|(id, gpu)| (*id, gpu))
    }

    /// Adds a GPU of `total` bytes if its id is new. Returns the GPU with this id.
    pub fn found(&mut self, id: GpuId, total: u64) -> &mut Gpu {
        self.gpus.entry(id).or_insert_with(|| Gpu::new(id, total))
    }

    /// Lets no client run while the host is about to suspend.
    pub fn suspend(&mut self, suspended: bool) {
        for gpu in self.gpus.values_mut().filter(|gpu| gpu.access != Access::Gone) {
            gpu.access = if suspended { Access::Suspended } else { Access::Turns };
        }
    }

    /// Forgets a GPU that no client has attached.
    pub fn forget(&mut self, id: GpuId) {
        debug_assert!(self.get(id).is_none_or(|gpu| gpu.attachments.is_empty()), "a client has attached the GPU");
        self.gpus.remove(&id);
    }

    // Attachments.

    /// Adds a client that is about to create a context on a GPU.
    pub fn attach(&mut self, now: Time, client: ClientId, id: GpuId, tenant: TenantId, engine: Engine) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.attach(now, client, tenant, engine);
            self.of_clients.entry(client).or_default().insert(id);
        }
    }

    /// Removes a client that does not hold the lock from a GPU.
    pub fn detach(&mut self, client: ClientId, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.detach(client);
        }
        self.unlist(client, id);
    }

    /// Moves a client's attachment from the GPU `from` to the GPU `to`. The client must be off
    /// `from` and must not hold its lock. Returns whether the attachment was moved: false if the
    /// client has attached `to`, or a GPU is unknown.
    pub fn move_client(&mut self, now: Time, client: ClientId, Move { from, to }: Move) -> bool {
        if self.attachment(client, to).is_some() || !self.contains(to) {
            return false;
        }
        let Some(moved) = self.gpus.get_mut(&from).and_then(|gpu| gpu.take(client)) else { return false };
        self.unlist(client, from);
        if let Some(gpu) = self.gpus.get_mut(&to) {
            gpu.put(now, client, moved);
            self.of_clients.entry(client).or_default().insert(to);
        }
        true
    }

    fn unlist(&mut self, client: ClientId, id: GpuId) {
        if let Some(gpus) = self.of_clients.get_mut(&client) {
            gpus.remove(&id);
            if gpus.is_empty() {
                self.of_clients.remove(&client);
            }
        }
    }

    /// The GPUs that a client has attached.
    pub fn of_client(&self, client: ClientId) -> GpuSet {
        self.of_clients.get(&client).cloned().unwrap_or_default()
    }

    pub fn attachment(&self, client: ClientId, id: GpuId) -> Option<&Attachment> {
        self.gpus.get(&id)?.attachments.get(&client)
    }

    pub fn attachment_mut(&mut self, client: ClientId, id: GpuId) -> Option<&mut Attachment> {
        self.gpus.get_mut(&id)?.attachments.get_mut(&client)
    }

    pub fn account(&self, client: ClientId, id: GpuId) -> Option<&Account> {
        Some(self.attachment(client, id)?.account())
    }

    /// A client's history on a GPU, from which policies predict its turns.
    pub fn history(&self, client: ClientId, id: GpuId) -> Option<&History> {
        Some(&self.attachment(client, id)?.history)
    }

    // Locks.

    pub fn probed(&self, client: ClientId) -> Option<(Time, Duration)> {
        self.probed.get(&client).copied()
    }

    pub fn set_probed(&mut self, client: ClientId, probed: Option<(Time, Duration)>) {
        match probed {
            Some(probed) => self.probed.insert(client, probed),
            None => self.probed.remove(&client),
        };
    }

    /// A client's lock state on a GPU. `None`: the client has not attached the GPU.
    pub fn lock(&self, client: ClientId, id: GpuId) -> Option<&ClientLock> {
        Some(&self.attachment(client, id)?.lock)
    }

    /// A client's lock state on each GPU that it has attached.
    pub fn locks_of(&self, client: ClientId) -> impl Iterator<Item = (GpuId, &ClientLock)> {
        let ids = self.of_clients.get(&client).into_iter().flatten();
        ids.filter_map(move |id| Some((*id, self.lock(client, *id)?)))
    }

    pub fn hold(&self, client: ClientId, id: GpuId) -> Option<&Hold> {
        self.lock(client, id)?.hold.as_ref()
    }

    pub fn hold_mut(&mut self, client: ClientId, id: GpuId) -> Option<&mut Hold> {
        self.attachment_mut(client, id)?.lock.hold.as_mut()
    }

    /// The holds of a client.
    pub fn holds_of(&self, client: ClientId) -> impl Iterator<Item = (GpuId, &Hold)> {
        self.locks_of(client).filter_map(|(id, lock)| Some((id, lock.hold.as_ref()?)))
    }

    pub fn holds_any(&self, client: ClientId) -> bool {
        self.holds_of(client).next().is_some()
    }

    /// The holds that a client has as a member of a gang.
    pub fn holds_in_gang(&self, client: ClientId, gang: Gang) -> impl Iterator<Item = (GpuId, &Hold)> {
        self.holds_of(client).filter(move |(_, hold)| hold.entity == Entity::Gang(gang))
    }

    /// The holders of a GPU, in the order of their grants.
    pub fn holders(&self, id: GpuId) -> impl Iterator<Item = ClientId> {
        self.get(id).into_iter().flat_map(Gpu::holders)
    }

    /// The holders of a GPU and their holds.
    pub fn holds_on(&self, id: GpuId) -> impl Iterator<Item = (ClientId, &Hold)> {
        self.holders(id).filter_map(move |client| Some((client, self.hold(client, id)?)))
    }

    /// Holders that are not bypassed. While one of them runs, a client is admitted only if the two
    /// may run together.
    pub fn running_on(&self, id: GpuId) -> impl Iterator<Item = ClientId> {
        self.get(id).into_iter().flat_map(Gpu::running)
    }

    /// Adds a client's present holds to the grant with the number `group`. The holds are then
    /// revoked together with that grant. Revoked holds are not changed.
    pub fn join_hold_group(&mut self, client: ClientId, group: u64) {
        self.change_holds(client, |hold| {
            if hold.revoked.is_none() {
                hold.group = group;
            }
        });
    }

    /// Changes the entity of a client's holds. Returns the start of the first of these holds.
    pub fn set_entity_of_holds(&mut self, client: ClientId, entity: Entity) -> Option<Time> {
        self.change_holds(client, |hold| hold.entity = entity);
        self.holds_of(client).map(|(_, hold)| hold.since).min()
    }

    fn change_holds(&mut self, client: ClientId, mut change: impl FnMut(&mut Hold)) {
        for id in self.of_client(client) {
            self.hold_mut(client, id).into_iter().for_each(&mut change);
        }
    }

    /// The last holder of a GPU, if it was preempted.
    pub fn preempted(&self, id: GpuId) -> Option<ClientId> {
        self.get(id)?.preempted
    }

    /// Records the start of a GPU's idle time while memory of the next entity is moved in.
    /// `arrives`: that memory is being moved in now.
    pub fn note_idle_for(&mut self, now: Time, id: GpuId, entity: Entity, arrives: bool) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        gpu.idle_for = match gpu.idle_for {
            _ if !arrives || !gpu.holders.is_empty() => None,
            Some((whose, since)) if whose == entity => Some((whose, since)),
            _ => Some((entity, now)),
        };
    }

    /// Removes the record of `note_idle_for`. Returns the start of the GPU's idle time for this
    /// entity.
    pub fn take_idle_since(&mut self, id: GpuId, entity: Entity) -> Option<Time> {
        let (whose, since) = self.gpus.get_mut(&id)?.idle_for.take()?;
        (whose == entity).then_some(since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: ClientId = ClientId(1);

    #[test]
    fn the_index_lists_the_gpus_that_a_client_has_attached() {
        let [here, there, third] = [1, 2, 3].map(|n| GpuId(Uuid([n; 16])));
        let mut gpus = Gpus::default();
        for id in [here, there] {
            gpus.found(id, 1 << 30);
            gpus.attach(Time::ZERO, CLIENT, id, TenantId(1), Engine::Swap);
        }
        gpus.attach(Time::ZERO, CLIENT, third, TenantId(1), Engine::Swap);
        assert_eq!(gpus.of_client(CLIENT), GpuSet::from([here, there]), "the third is unknown");
        gpus.found(third, 1 << 30);
        assert!(!gpus.move_client(Time::ZERO, CLIENT, Move { from: here, to: there }), "it has attached that GPU");
        assert!(gpus.move_client(Time::ZERO, CLIENT, Move { from: here, to: third }));
        assert_eq!(gpus.of_client(CLIENT), GpuSet::from([there, third]));
        assert!(gpus.attachment(CLIENT, third).is_some() && gpus.attachment(CLIENT, here).is_none());
        [there, third].into_iter().for_each(|id| gpus.detach(CLIENT, id));
        assert!(gpus.of_clients.is_empty());
    }
}
