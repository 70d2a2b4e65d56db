//! GPUs of other hosts. A program that was hibernated on another host names that host's GPU, and sleeps. **The
//! daemon drains such a foreign GPU**, so the scheduler moves the program to a GPU of the same kind, as it moves
//! other sleeping programs. Such a drain is not saved: the GPU is forgotten with its last client.

use nvshare_wire::client::GpuKind;
use tracing::info;

use super::model::{Gpu, Model};
use super::{Core, moves, placement};
use crate::scheduler::{ClientId, Event, GpuId};

impl Core {
    /// Tells the scheduler about the GPUs between which programs can move.
    pub(super) fn apply_kinds(&mut self) {
        if let Some(kinds) = moves::kinds(&self.model) {
            self.apply(kinds);
            self.apply_all(placement::allowed(&self.model, self.model.all_clients()));
        }
    }

    /// Moves programs off a GPU that belongs to another host.
    pub(super) fn recognize_foreign(&mut self, gpu: GpuId) {
        let events = recognize(&mut self.model, gpu);
        if !events.is_empty() {
            // First, because the drain looks for GPUs of the same kind.
            self.apply_kinds();
            self.apply_all(events);
        }
    }

    /// As [`Self::recognize_foreign`], for all GPUs that NVML does not list.
    pub(super) fn recognize_all_foreign(&mut self) {
        let unlisted = self.model.gpus.iter().filter(|(_, gpu)| gpu.index.is_none()).map(|(id, _)| *id);
        unlisted.collect::<Vec<_>>().into_iter().for_each(|gpu| self.recognize_foreign(gpu));
    }

    /// Lets programs use a GPU that NVML lists now, and did not when it seemed to belong to another host.
    pub(super) fn use_if_foreign(&mut self, gpu: GpuId) {
        if self.model.gpus.get(&gpu).is_some_and(|known| known.is_foreign) {
            self.apply(Event::Drain { gpu, drained: false });
            self.apply_all(self.host.moves.drain_again(&self.model, gpu));
        }
    }
}

/// Recognizes a GPU of another host: only sleeping clients have named it, NVML does not list it, and NVML lists a
/// GPU of the same name. Returns the events that let its clients leave it.
fn recognize(model: &mut Model, id: GpuId) -> Vec<Event> {
    let Some(gpu) = model.gpus.get(&id) else { return Vec::new() };
    let is_unlisted = gpu.index.is_none() && !gpu.gone && gpu.kind == GpuKind::Gpu && !gpu.is_foreign;
    let users: Vec<ClientId> = model.users_of_gpu(id).collect();
    let sleeps = |client: &ClientId| model.clients.get(client).is_some_and(|entry| entry.is_exempt);
    if !is_unlisted || users.is_empty() || !users.iter().all(sleeps) {
        return Vec::new();
    }
    let like_it = |other: &&Gpu| other.index.is_some() && !other.gone && !other.is_slice() && other.name == gpu.name;
    let Some((total, capability)) = model.gpus.values().find(like_it).map(|gpu| (gpu.total, gpu.capability)) else {
        return Vec::new();
    };
    info!(gpu = gpu.label(id), "{} belongs to another host. Its programs move to a GPU of this host", gpu.name);
    if let Some(gpu) = model.gpus.get_mut(&id) {
        // The driver and NVML show different sizes of one GPU.
        (gpu.is_foreign, gpu.total, gpu.capability) = (true, total, capability);
    }
    vec![Event::GpuFound { gpu: id, total }, Event::Drain { gpu: id, drained: true }]
}
