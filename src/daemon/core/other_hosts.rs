//! GPUs of other hosts. A program that was hibernated on another host names that host's GPU, and sleeps. **The
//! daemon drains such a foreign GPU**, so the scheduler moves the program to a GPU of the same kind, as it moves
//! other sleeping programs. Such a drain is not saved: the GPU is forgotten with its last client.

use nvshare_wire::client::GpuKind;
use tracing::info;

use super::model::{Gpu, Model};
use super::moves::{self, Moves};
use super::placement;
use crate::scheduler::{ClientId, Event, GpuId};

/// The events after the list of GPUs has changed: between which GPUs programs can move. If NVML has listed all
/// GPUs, programs also leave those of other hosts.
pub(super) fn listed(model: &mut Model, is_complete: bool) -> Vec<Event> {
    let unlisted = model.gpus.iter().filter(|(_, gpu)| is_complete && gpu.index.is_none()).map(|(id, _)| *id);
    let foreign = unlisted.collect::<Vec<_>>().into_iter().flat_map(|gpu| recognize(model, gpu)).collect();
    kinds_and(model, foreign)
}

/// The events that let programs leave a GPU that a client has attached, if it belongs to another host.
pub(super) fn attached(model: &mut Model, gpu: GpuId) -> Vec<Event> {
    let foreign = recognize(model, gpu);
    if foreign.is_empty() { foreign } else { kinds_and(model, foreign) }
}

/// The events that let programs use a GPU that NVML lists now, if it seemed to belong to another host.
pub(super) fn returned(model: &Model, moves: &Moves, gpu: GpuId) -> Vec<Event> {
    let is_foreign = model.gpus.get(&gpu).is_some_and(|known| known.is_foreign);
    let used = is_foreign.then(|| [Some(Event::Drain { gpu, drained: false }), moves.drain_again(model, gpu)]);
    used.into_iter().flatten().flatten().collect()
}

/// Puts the kinds of GPUs before events, because a drain looks for GPUs of the same kind.
fn kinds_and(model: &Model, events: Vec<Event>) -> Vec<Event> {
    let kinds = moves::kinds(model);
    let allowed = kinds.as_ref().and_then(|_| placement::allowed(model, model.all_clients()));
    kinds.into_iter().chain(allowed).chain(events).collect()
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
