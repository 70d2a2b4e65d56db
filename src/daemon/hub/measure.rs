//! GPUs and their memory, as NVML sees them, and the host's memory.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tracing::{debug, info};

use super::{Gpu, Hub};
use crate::daemon::gpus::{Ask, GpuDescription, Report, Sample};
use crate::daemon::host::MemInfo;
use crate::daemon::overhead::{Attached, Overhead};
use crate::daemon::socket;
use crate::scheduler::{ClientId, Event, GpuId, SeatView, Time};

/// How long a client's report must have stood for its memory to count as at rest.
const AT_REST: Duration = Duration::from_millis(50);

/// Programs that ran under an earlier scheduler are back within this time; until then nobody is taken for a stranger.
const RETURN: Duration = Duration::from_secs(1);

/// A process that ends closes its connection first and frees its memory later; after this time it is a stranger.
const LEAVING: Duration = Duration::from_secs(5);

/// What a process has beyond what it says is taken for its context up to this part of a GPU.
const CONTEXT_PART: u64 = 16;

/// Memory moves in chunks of up to so many bytes: a client maps nothing for an allowance that is too small for its next one.
const CHUNK: u64 = 64 << 20;

impl Hub {
    fn gpus_found(&mut self, found: Vec<GpuDescription>) {
        for GpuDescription { gpu, kind, name, total, index, minor, link } in found {
            let known = self.gpus.get_mut(&gpu);
            let changed = known.as_ref().is_none_or(|known| known.total != total);
            match known {
                Some(known) => {
                    known.total = total;
                    (known.index, known.minor) = (Some(index), minor);
                    known.name = name;
                }
                None => {
                    let entry = Gpu { kind, name, total, index: Some(index), minor, overhead: Overhead::default() };
                    info!(name: "gpu-found", gpu = entry.label(gpu), bytes = total, "found {}", entry.name);
                    self.provide(gpu);
                    self.gpus.insert(gpu, entry);
                }
            }
            if changed {
                self.apply(Event::GpuFound { gpu, total });
                self.foretell_all();
                self.signals.limits.notify_one();
                if let Some(rate) = link {
                    self.apply(Event::GpuLink { gpu, rate });
                }
            }
        }
    }

    /// Looks how much memory the host has.
    pub fn sample_host(&mut self) {
        let Some(info) = MemInfo::read() else { return };
        let held = self.clients.values().flat_map(|c| c.uses.values()).fold(0u64, |sum, u| sum.saturating_add(u.host));
        if let Some(bytes) = self.host.sample(socket::now(), info, held, self.config.swap_max) {
            debug!(bytes, held, "host memory for what is swapped out");
            self.apply(Event::HostMemory { bytes });
        }
    }

    /// What NVML says.
    pub fn heard(&mut self, report: Report) {
        match report {
            Report::Gpus(found) => self.gpus_found(found),
            Report::Used(used) => {
                used.iter().for_each(|sample| self.measure(sample, None));
                self.signals.limits.notify_one();
            }
            Report::Traffic(seen) => self.traffic_seen(seen, socket::now()),
        }
    }

    /// What is in use, as NVML says or that client, whose own report is of the same moment.
    pub(super) fn measure(&mut self, sample: &Sample, by: Option<ClientId>) {
        let gpu = sample.gpu;
        let total = self.gpus.get(&gpu).map_or(0, |entry| entry.total);
        let mut attached = Vec::new();
        for view in self.machine.clients() {
            let Some(seat) = view.seats.iter().find(|seat| seat.gpu == gpu) else { continue };
            let Some(client) = self.clients.get(&view.client) else { continue };
            let changed = client.uses.get(&gpu).map_or(Time::ZERO, |usage| usage.changed);
            attached.push(Attached {
                client: view.client,
                pid: client.identity.pid.try_into().unwrap_or(0),
                is_new: !self.machine.has_context(view.client, gpu, sample.begun),
                mapped: seat.mapped,
                at_rest: by == Some(view.client)
                    || (changed + AT_REST <= sample.begun && !is_moving(seat) && seat.doubted <= total / CONTEXT_PART),
            });
        }
        let context = self.config.settings.context;
        let Some(entry) = self.gpus.get_mut(&gpu) else { return };
        let before = entry.overhead.told();
        let is_measured = entry.index.is_some();
        let settled = sample.begun >= self.started + RETURN;
        self.departed.retain(|_, left| sample.begun < *left + LEAVING);
        let departed = &self.departed;
        let clients: BTreeSet<u32> = attached.iter().map(|client| client.pid).collect();
        let complete =
            settled || sample.processes.keys().all(|pid| clients.contains(pid) || departed.contains_key(pid));
        let fellow = |pid| !settled || departed.contains_key(&pid);
        let told = sample.steady.then(|| entry.overhead.sample(sample, &attached, context, fellow)).flatten();
        // By the contexts as they are now known: what is one of them is not in doubt.
        let context = context.min(total / CONTEXT_PART);
        let present = entry.overhead.present(sample, &attached, context).filter(|_| is_measured);
        let contexts = entry.overhead.contexts().clone();
        self.apply(Event::Contexts { gpu, bytes: contexts });
        if let Some(bytes) = told {
            if before != Some(bytes) {
                debug!(gpu = %gpu.0, bytes, "used by others than clients");
            }
            // Also when it is what it was: the machine waits for a measurement that knows a new context.
            self.apply(Event::GpuOverhead { gpu, begun: sample.begun, bytes, complete });
        }
        if let Some(bytes) = present {
            self.apply(Event::Present { gpu, begun: sample.begun, bytes });
        }
    }

    /// What is on a GPU is in doubt, and somebody waits for it. Where nothing can be measured, clients are believed.
    pub(super) fn measure_anew(&mut self, gpu: GpuId, now: Time) -> Option<Event> {
        let measured = self.nvml.is_some() && self.gpus.get(&gpu).is_some_and(|entry| entry.index.is_some());
        if measured {
            self.ask_nvml(Ask::Sample);
            return None;
        }
        if !std::mem::replace(&mut self.believed, true) {
            info!("without NVML, programs are believed what memory they have freed, also where another user gets it");
        }
        Some(Event::Present { gpu, begun: now, bytes: BTreeMap::new() })
    }
}

/// Whether its memory is on the way in or out, so that what it reports is not what the GPU shows. A client maps as much
/// as it needs and may, holder or not.
fn is_moving(seat: &SeatView) -> bool {
    let evicting = seat.mapped > seat.allowance.max(seat.pinned);
    let (may, lacking) = (seat.allowance.saturating_sub(seat.mapped), seat.demand.saturating_sub(seat.mapped));
    evicting || (lacking > 0 && may >= CHUNK.min(lacking))
}
