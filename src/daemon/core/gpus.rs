//! The GPUs: which GPUs NVML lists, GPUs that appear or disappear, and the release of the driver for an
//! administrator.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_wire::SchedulerMessage;
use tokio::sync::{oneshot, watch};
use tracing::{info, warn};

use super::measure::unmeasured;
use super::state::{Core, Gpu};
use crate::daemon::gpu::nvml::{GpuDescription, Listing, NvmlState, Query};
use crate::scheduler::{ClientId, Event, GpuId};
use crate::sys::clock;

/// Maximum work that a client may queue ahead on a GPU with a display: one frame at 60 Hz. The
/// desktop's drawing then waits at most this long for the client's queued work.
const BESIDE_DISPLAY: Duration = Duration::from_millis(16);

/// UUIDs of the GPUs that programs can use.
pub type Present = BTreeSet<String>;

impl Core {
    pub fn follow_gpus(&self) -> watch::Receiver<Present> {
        self.present.subscribe()
    }

    /// Publishes the GPUs that programs can use. Called after a change of `gpus`.
    pub(super) fn publish_gpus(&self) {
        let now: Present = self.known_gpus().filter(|(_, gpu)| !gpu.gone).map(|(id, gpu)| gpu.label(*id)).collect();
        self.present.send_if_modified(|present| {
            let has_changed = *present != now;
            *present = now;
            has_changed
        });
    }

    /// True if the host has the GPU, as far as the daemon can tell: NVML lists or has listed the GPU, or
    /// does not answer.
    ///
    /// A client can invent a GPU. While NVML answers, a GPU that it does not list matters only to the
    /// clients that named it: such a GPU is in no list, sum or default, and has no lock files.
    pub(super) fn is_known(&self, gpu: &Gpu) -> bool {
        gpu.named_by.is_none() || self.nvml.is_none() || self.nvml_state != NvmlState::Usable
    }

    /// The GPUs that the host has.
    pub(super) fn known_gpus(&self) -> impl Iterator<Item = (&GpuId, &Gpu)> {
        self.gpus.iter().filter(|(_, gpu)| self.is_known(gpu))
    }

    /// True if NVML measures the memory in use on a GPU.
    pub(super) fn is_measured(&self, gpu: &Gpu) -> bool {
        self.nvml.is_some() && self.nvml_state == NvmlState::Usable && gpu.index.is_some()
    }

    pub(super) fn gpus_listed(&mut self, Listing { gpus, failing, is_complete }: Listing) {
        let listed: BTreeSet<GpuId> = gpus.iter().map(|found| found.gpu).collect();
        for found in gpus {
            let gpu = found.gpu;
            self.gpu_found(found);
            self.gpu_fails(gpu, failing.get(&gpu));
        }
        // NVML never lists a GPU without an index: only clients have named it.
        let is_missing = |(id, gpu): &(&GpuId, &Gpu)| gpu.index.is_some() && !listed.contains(id);
        let missing: Vec<GpuId> = self.gpus.iter().filter(is_missing).map(|(id, _)| *id).collect();
        if is_complete {
            missing.into_iter().for_each(|gpu| self.gpu_gone(gpu));
        }
        self.tell_kinds();
        self.publish_gpus();
    }

    fn gpu_found(&mut self, found: GpuDescription) {
        let GpuDescription { gpu, kind, name, total, index, minor, capability, link, has_display } = found;
        let before = self.gpus.remove(&gpu).filter(|known| !known.gone);
        let is_new = before.as_ref().is_none_or(|known| known.named_by.is_some());
        let is_same_size = before.as_ref().is_some_and(|known| known.total == total);
        let is_news = before.as_ref().is_none_or(|known| known.index.is_none());
        let failing = before.as_ref().is_some_and(|known| known.failing);
        let had_display = before.as_ref().is_some_and(|known| known.has_display);
        let (accounting, sample) = before.map(|known| (known.accounting, known.sample)).unwrap_or_default();
        let entry = Gpu {
            failing,
            kind,
            name,
            total,
            index: Some(index),
            gone: false,
            minor,
            capability,
            accounting,
            sample,
            has_others: true,
            has_display,
            named_by: None,
        };
        if is_new {
            info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "found {}", entry.name);
            self.create_lock_files(gpu);
        }
        self.gpus.insert(gpu, entry);
        if !is_same_size {
            self.apply(Event::GpuFound { gpu, total });
            self.drain_again(gpu);
            self.announce_all_limits();
        }
        if is_news {
            self.disconnect_unproven(gpu);
        }
        if has_display != had_display {
            self.tell_run_ahead(gpu);
        }
        if let Some(rate) = link.filter(|_| is_news || !is_same_size) {
            self.apply(Event::GpuLink { gpu, rate });
        }
    }

    /// Sends each client of a GPU its limit on queued work.
    fn tell_run_ahead(&self, gpu: GpuId) {
        let clients = self.clients.iter().filter(|(_, client)| client.gpus.contains_key(&gpu));
        clients.for_each(|(client, _)| self.limit_run_ahead(*client, gpu));
    }

    /// Sends one client its limit on queued work for a GPU.
    pub(super) fn limit_run_ahead(&self, client: ClientId, gpu: GpuId) {
        let Some(slot) = self.clients.get(&client).and_then(|entry| entry.session.slot(gpu)) else { return };
        let micros =
            if self.gpus.get(&gpu).is_some_and(|gpu| gpu.has_display) { BESIDE_DISPLAY } else { Duration::ZERO };
        self.send(client, SchedulerMessage::RunAhead { slot, micros: micros.as_micros() as u32 });
    }

    /// Records whether a GPU reports errors, and logs each change.
    fn gpu_fails(&mut self, gpu: GpuId, why: Option<&String>) {
        let failing = why.is_some();
        let Some(entry) = self.gpus.get_mut(&gpu).filter(|entry| entry.failing != failing) else { return };
        entry.failing = failing;
        let (label, name) = (entry.label(gpu), entry.name.clone());
        if let Some(why) = why {
            warn!(gpu = label, "{name} reports errors: {why}");
        } else {
            info!(gpu = label, "{name} no longer reports errors");
        }
        self.apply(Event::Failing { gpu, failing });
    }

    /// Handles a GPU that NVML no longer lists.
    fn gpu_gone(&mut self, gpu: GpuId) {
        let users = self.clients.values().filter(|client| client.gpus.contains_key(&gpu)).count();
        let Some(entry) = self.gpus.get_mut(&gpu) else { return };
        (entry.gone, entry.index, entry.sample) = (true, None, None);
        let (label, name) = (entry.label(gpu), entry.name.clone());
        if users == 0 {
            info!(name: "gpu-gone", gpu = label, clients = users, "{name} is gone");
        } else {
            warn!(name: "gpu-gone", gpu = label, clients = users, "{name} is gone, and programs still use it");
        }
        self.apply(Event::GpuGone { gpu });
    }

    /// Removes GPUs that have disappeared and that the scheduler has forgotten, because no client
    /// uses them any more.
    pub(super) fn forget_gone(&mut self) {
        let is_over = |(id, gpu): &(&GpuId, &Gpu)| gpu.gone && !self.machine.is_known(**id);
        let over: Vec<GpuId> = self.gpus.iter().filter(is_over).map(|(id, _)| *id).collect();
        over.into_iter().for_each(|gpu| self.forget(gpu));
    }

    /// Removes a GPU that the scheduler has forgotten.
    pub(super) fn forget(&mut self, gpu: GpuId) {
        self.record_usage();
        self.gpus.remove(&gpu);
        self.remove_lock_files(gpu);
        self.counts.forget(gpu);
        self.publish_gpus();
    }

    /// Records whether NVML answers queries.
    pub(super) fn nvml_is(&mut self, state: NvmlState) {
        match &state {
            NvmlState::Usable => info!(name: "nvml-usable", "NVML can be used"),
            NvmlState::Released => info!(name: "driver-released", "the driver was released"),
            NvmlState::Failed(e) => {
                info!(name: "no-nvml", "cannot use NVML, retrying: {e}. Without NVML, the scheduler finds a GPU only \
                    when a program uses it");
            }
        }
        self.nvml_state = state;
        self.publish_problems();
        // The scheduler may be waiting for a measurement that will not arrive. Clients' reports
        // count as measured instead.
        if self.nvml_state != NvmlState::Usable {
            let now = clock::now();
            let measured = self.gpus.iter().filter(|(_, gpu)| gpu.index.is_some()).map(|(id, _)| *id);
            measured.collect::<Vec<_>>().into_iter().for_each(|gpu| self.apply(unmeasured(gpu, now)));
        }
    }

    /// Releases the driver for at most `lasts`, or until a client attaches a GPU. The receiver
    /// completes when the driver has been released. Also returns the programs that still use the
    /// driver.
    pub fn release_driver(&self, lasts: Duration) -> (oneshot::Receiver<()>, Vec<u64>) {
        let (done, released) = oneshot::channel();
        self.query_nvml(Query::Release(lasts, done));
        let programs = self.clients.iter().filter(|(_, client)| client.lock.is_none()).map(|(id, _)| id.0);
        (released, programs.collect())
    }
}
