//! Measurements of GPU memory and of host memory, reconciled with clients' reports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tracing::{debug, info};

use super::state::{ClientGpuStats, Core};
use crate::daemon::gpu::accounting::{Attached, Basis};
use crate::daemon::gpu::host_memory::{HostUse, MemInfo};
use crate::daemon::gpu::nvml::{Query, Report, Sample};
use crate::scheduler::{Event, GpuId, Time};
use crate::sys::clock;

/// Clients of an earlier daemon reconnect within this time. Until then, memory of unknown processes
/// does not count as overhead.
const RECONNECT_TIME: Duration = Duration::from_secs(1);

/// A client reports its memory within this time after attaching. Until the first report, the client may
/// have mapped any number of bytes.
const FIRST_REPORT_TIME: Duration = Duration::from_secs(1);

/// A process that exits closes its connection first, and the driver frees its memory within this time.
/// Memory that remains afterwards counts as another program's.
pub const EXIT_TIME: Duration = Duration::from_secs(5);

/// The fastest expected growth of other programs' memory, in bytes per second: the rate of a
/// program that loads its data.
const GROWTH: u64 = 1 << 30;
/// A GPU is sampled again before other programs can fill `1 / FREE_PARTS` of its free memory. The early
/// sample leaves time to evict clients' memory.
const FREE_PARTS: u64 = 4;
/// Minimum time between two samples. At this rate, sampling takes about 1 % of the NVML thread's time.
const SHORTEST_PERIOD: Duration = Duration::from_millis(100);

/// The estimate for a context that has not been measured is at most the GPU's size divided by this
/// number.
const CONTEXT_DIVISOR: u64 = 16;

/// The driver needs more memory than this for each CUDA context.
const SMALLEST_CONTEXT: u64 = 32 << 20;

impl Core {
    /// True if NVML has shown that a process has no memory on any GPU, and therefore no CUDA context. An
    /// empty list of processes does not prove this, but a GPU without memory in use does. `pid`: 0 if it is
    /// unknown.
    pub fn is_off_gpus(&self, pid: u32) -> bool {
        let is_off = |sample: &Sample| {
            let lists_others = |list: &BTreeMap<u32, u64>| !list.is_empty() && !list.contains_key(&pid);
            pid != 0 && sample.processes.as_ref().is_some_and(lists_others) || sample.used < SMALLEST_CONTEXT
        };
        let mut listed = self.gpus.values().filter(|gpu| gpu.index.is_some()).peekable();
        listed.peek().is_some() && listed.all(|gpu| gpu.sample.as_ref().is_some_and(is_off))
    }

    /// Measures host memory.
    pub fn sample_host(&mut self) {
        self.host_sampled = clock::now();
        let Some(info) = MemInfo::read() else { return };
        let held = self.clients.values().flat_map(|c| c.gpus.values()).fold(0u64, |sum, u| sum.saturating_add(u.host));
        if let Some(bytes) = self.host.sample(clock::now(), info, held, self.config.swap_max) {
            debug!(bytes, held, "measured the host memory that may hold swapped memory");
        }
        let swapped = self.machine.swapped();
        let host = HostUse { info, held, swapped };
        if let Some(bytes) = self.host_ahead.sample(clock::now(), host, self.config.swap_ahead) {
            match bytes {
                Some(bytes) => debug!(bytes, "measured the host memory that may be allocated in advance"),
                None => debug!("the host is short of memory"),
            }
            self.apply(Event::HostAhead { bytes });
        }
        self.balance_host();
    }

    /// True if clients may use host memory that they can give back. Host memory must then be watched,
    /// because other programs may need it.
    pub fn lends_host_memory(&self) -> bool {
        self.machine.is_ahead() || self.has_swap_files()
    }

    /// The longest sampling period that still leaves time to evict clients' memory before other programs
    /// run out of memory.
    pub fn sample_period(&self) -> Duration {
        let is_shared = |id: GpuId| self.machine.charged(id) > 0;
        let gpus = self.gpus.iter().filter(|(id, gpu)| gpu.has_others && !gpu.gone && is_shared(**id));
        let free = gpus.filter_map(|(_, gpu)| Some(gpu.total.saturating_sub(gpu.sample.as_ref()?.used))).min();
        let Some(free) = free else { return Duration::MAX };
        Duration::from_millis(free / FREE_PARTS / (GROWTH / 1000)).max(SHORTEST_PERIOD)
    }

    /// Handles a report of the NVML thread.
    pub fn nvml_report(&mut self, report: Report) {
        match report {
            Report::Gpus(listing) => self.gpus_listed(listing),
            Report::State(state) => self.nvml_is(state),
            Report::Used(used) => {
                for sample in used {
                    self.measure(&sample);
                    if let Some(entry) = self.gpus.get_mut(&sample.gpu) {
                        entry.sample = Some(sample);
                    }
                }
            }
            Report::Driver(versions) => self.driver_is(versions),
        }
    }

    /// Handles a measurement of the memory in use on a GPU, by NVML or by a client.
    pub(super) fn measure(&mut self, sample: &Sample) {
        let gpu = sample.gpu;
        let mut attached = Vec::new();
        for view in self.machine.clients() {
            let Some(extent) = self.machine.extent(view.client, gpu) else { continue };
            let Some(client) = self.clients.get(&view.client) else { continue };
            // A client that never reports must not block the measurement of other programs' memory.
            let tells =
                |stats: &&ClientGpuStats| stats.report.is_some() || sample.begun < stats.attached + FIRST_REPORT_TIME;
            let stats = client.gpus.get(&gpu).filter(tells);
            let (least, most) = stats.map_or(extent, |stats| stats.history.at(sample.begun));
            attached.push(Attached {
                client: view.client,
                pid: client.identity.pid.try_into().unwrap_or(0),
                least,
                most,
                adopted: self.shared_memory.adopted_by(view.client, gpu),
                is_new: !self.machine.has_context(view.client, gpu, sample.begun),
            });
        }
        let context = self.config.settings.context;
        let Some(entry) = self.gpus.get_mut(&gpu) else { return };
        let total = entry.total;
        let before = (entry.accounting.overhead(), entry.accounting.basis());
        let is_measured = entry.index.is_some();
        let settled = sample.begun >= self.started + RECONNECT_TIME;
        self.departed.retain(|_, left| sample.begun < *left + EXIT_TIME);
        let departed = &self.departed;
        let clients: BTreeSet<u32> = attached.iter().map(|client| client.pid).collect();
        let processes = || sample.processes.iter().flat_map(BTreeMap::keys);
        let complete = settled || processes().all(|pid| clients.contains(pid) || departed.contains_key(pid));
        let is_own = |pid| !settled || departed.contains_key(&pid);
        let is_known = |pid: &u32| clients.contains(pid) || departed.contains_key(pid);
        let all_known = settled && processes().all(is_known);
        let guess = context.min(total / CONTEXT_DIVISOR);
        let overhead = match sample.steady {
            true => entry.accounting.sample(sample, &attached, guess, is_own),
            false => None,
        };
        let found = entry.accounting.found(sample, &attached, guess).filter(|_| is_measured);
        if !settled {
            entry.accounting.forget_total();
        }
        let (contexts, basis) = (entry.accounting.contexts().clone(), entry.accounting.basis());
        let others = entry.accounting.others();
        if is_measured && overhead.is_some() && before.1 != basis {
            info!(name: "accounting", gpu = entry.label(gpu), basis = basis.name(), "{}", basis.in_words());
        }
        // If NVML lists no processes, other programs may be using the GPU.
        let present = !(all_known && basis == Basis::Processes);
        entry.has_others = present;
        self.apply(Event::OtherPrograms { gpu, present });
        self.apply(Event::ContextSizes { gpu, bytes: contexts });
        if let Some(bytes) = overhead {
            if before.0 != Some(bytes) {
                debug!(gpu = %gpu.0, bytes, "overhead");
            }
            // Sent even if unchanged: the scheduler may wait for a measurement that includes a new context.
            self.apply(Event::GpuOverhead { gpu, begun: sample.begun, bytes, others, complete });
        }
        if let Some(found) = found {
            let free = Some(total.saturating_sub(sample.used)).filter(|_| sample.steady);
            self.apply(Event::Measured { gpu, begun: sample.begun, free, found });
            let now = clock::now();
            attached.iter().for_each(|client| self.record_extent(client.client, gpu, now));
        }
    }

    /// Requests a new measurement of a GPU for the scheduler. If NVML cannot measure the GPU, returns an
    /// event that accepts clients' reports as measured.
    pub(super) fn remeasure(&mut self, gpu: GpuId, now: Time) -> Option<Event> {
        if self.gpus.get(&gpu).is_some_and(|entry| self.is_measured(entry)) {
            self.query_nvml(Query::Sample);
            return None;
        }
        if !std::mem::replace(&mut self.logged_unverified, true) {
            info!(
                "cannot verify programs' reports of freed memory without NVML. The scheduler may grant that memory to \
                 another user's programs without verification"
            );
        }
        Some(unmeasured(gpu, now))
    }
}

/// The event that accepts clients' reports as measured, for a GPU that cannot be measured.
pub(super) fn unmeasured(gpu: GpuId, now: Time) -> Event {
    Event::Measured { gpu, begun: now, free: None, found: BTreeMap::new() }
}
