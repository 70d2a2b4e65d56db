//! Changes of the model's GPUs: GPUs that NVML lists or no longer lists, GPUs that only clients name,
//! and GPUs that report errors.

use std::collections::BTreeSet;
use std::time::Duration;

use nvshare_wire::SchedulerMessage;
use tracing::{info, warn};

use super::model::{Gpu, Model};
use crate::daemon::gpu::nvml::{GpuDescription, NvmlState};
use crate::daemon::tenants::What;
use crate::daemon::transport::session::Violation;
use crate::scheduler::{ClientId, Event, GpuId};

/// Maximum work that a client may queue ahead on a GPU with a display: one frame at 60 Hz. The
/// desktop's drawing then waits at most this long for the client's queued work.
const BESIDE_DISPLAY: Duration = Duration::from_millis(16);

/// UUIDs of the GPUs that programs can use.
pub type Present = BTreeSet<String>;

/// The changes that a listed GPU brings.
#[derive(Debug, Clone, Copy)]
pub(super) struct Found {
    /// NVML has not listed the GPU before, or not since it was gone.
    pub is_new: bool,
    /// NVML lists the GPU now, and did not before. A client may have named it.
    pub is_listed: bool,
    pub is_resized: bool,
    pub display_changed: bool,
    pub fabric_changed: bool,
}

impl Model {
    /// The GPUs that programs can use.
    pub fn present_gpus(&self) -> Present {
        self.known_gpus().filter(|(_, gpu)| !gpu.gone).map(|(id, gpu)| gpu.label(*id)).collect()
    }

    /// Records a GPU that NVML lists.
    pub(super) fn found(&mut self, found: GpuDescription) -> Found {
        let GpuDescription { gpu, kind, name, total, index, minor, capability, link: _, has_display, has_fabric } =
            found;
        let before = self.gpus.remove(&gpu).filter(|known| !known.gone);
        let is_same_size = before.as_ref().is_some_and(|known| known.total == total);
        let changes = Found {
            is_new: before.as_ref().is_none_or(|known| known.named_by.is_some()),
            is_listed: before.as_ref().is_none_or(|known| known.index.is_none()),
            is_resized: !is_same_size,
            display_changed: has_display != before.as_ref().is_some_and(|known| known.has_display),
            fabric_changed: has_fabric != before.as_ref().is_some_and(|known| known.has_fabric),
        };
        let (accounting, sample) = before.map(|known| (known.accounting, known.sample)).unwrap_or_default();
        let index = Some(index);
        let fresh = Gpu::new(kind, name, total);
        let entry = Gpu { index, minor, capability, accounting, sample, has_display, has_fabric, ..fresh };
        if changes.is_new {
            info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "found {}", entry.name);
        }
        self.gpus.insert(gpu, entry);
        changes
    }

    /// Adds a GPU that a client named, if it is unknown. Returns whether it was added.
    ///
    /// # Errors
    /// The client's tenant has named too many GPUs that NVML does not list.
    pub(super) fn add_unlisted(&mut self, client: ClientId, gpu: GpuId, named: Gpu) -> Result<bool, Violation> {
        let Some(budget) = self.budget(client).filter(|_| !self.gpus.contains_key(&gpu)) else { return Ok(false) };
        let share = budget.take(What::Gpus, 1).ok_or(Violation::TooManyGpus)?;
        self.gpus.insert(gpu, Gpu { named_by: Some(share), ..named });
        Ok(true)
    }

    /// True if NVML does not list a GPU and no client uses it any more.
    pub(super) fn is_superfluous(&self, gpu: GpuId) -> bool {
        self.gpus.get(&gpu).is_some_and(|entry| entry.index.is_none()) && self.users_of_gpu(gpu).next().is_none()
    }

    /// The GPUs that NVML listed before and lists no longer. NVML never lists a GPU without an index:
    /// only clients have named it.
    pub(super) fn missing(&self, listed: &BTreeSet<GpuId>) -> Vec<GpuId> {
        let is_missing = |(id, gpu): &(&GpuId, &Gpu)| gpu.index.is_some() && !listed.contains(id);
        self.gpus.iter().filter(is_missing).map(|(id, _)| *id).collect()
    }

    /// GPUs that have disappeared and that the scheduler has forgotten, because no client uses them any
    /// more.
    pub(super) fn forgotten(&self) -> Vec<GpuId> {
        let is_over = |(id, gpu): &(&GpuId, &Gpu)| gpu.gone && !self.machine.is_known(**id);
        self.gpus.iter().filter(is_over).map(|(id, _)| *id).collect()
    }

    /// Records whether a GPU reports errors, and logs each change.
    pub(super) fn set_failing(&self, gpu: GpuId, why: Option<&String>) -> Option<Event> {
        let failing = why.is_some();
        let entry = self.gpus.get(&gpu).filter(|_| self.machine.is_failing(gpu) != failing)?;
        let (label, name) = (entry.label(gpu), &entry.name);
        match why {
            Some(why) => warn!(gpu = label, "{name} reports errors: {why}"),
            None => info!(gpu = label, "{name} no longer reports errors"),
        }
        Some(Event::Failing { gpu, failing })
    }

    /// Handles a GPU that NVML no longer lists.
    pub(super) fn lose(&mut self, gpu: GpuId) -> Event {
        let clients = self.users_of_gpu(gpu).count();
        if let Some(entry) = self.gpus.get_mut(&gpu) {
            (entry.gone, entry.index, entry.sample) = (true, None, None);
            let (label, name) = (entry.label(gpu), &entry.name);
            match clients {
                0 => info!(name: "gpu-gone", gpu = label, clients, "{name} is gone"),
                _ => warn!(name: "gpu-gone", gpu = label, clients, "{name} is gone, and programs still use it"),
            }
        }
        Event::GpuGone { gpu }
    }

    /// Records whether NVML answers queries.
    pub(super) fn set_nvml_state(&mut self, state: NvmlState) {
        match &state {
            NvmlState::Usable => info!(name: "nvml-usable", "NVML can be used"),
            NvmlState::Released => info!(name: "driver-released", "the driver was released"),
            NvmlState::Failed(e) => {
                info!(name: "no-nvml", "cannot use NVML, retrying: {e}. Without NVML, the scheduler finds a GPU only \
                    when a program uses it");
            }
        }
        self.nvml = Some(state);
    }

    /// Sends one client its limit on queued work for a GPU.
    pub(super) fn limit_run_ahead(&self, client: ClientId, gpu: GpuId) {
        let Some(slot) = self.clients.get(&client).and_then(|entry| entry.session.slot(gpu)) else { return };
        let has_display = self.gpus.get(&gpu).is_some_and(|gpu| gpu.has_display);
        let micros = if has_display { BESIDE_DISPLAY } else { Duration::ZERO };
        self.send(client, SchedulerMessage::RunAhead { slot, micros: micros.as_micros() as u32 });
    }
}
