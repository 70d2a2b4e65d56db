//! Measurements of GPU memory, reconciled with clients' reports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tracing::{debug, info};

use super::model::{Client, ClientGpuStats, Gpu, Listing, Model};
use crate::daemon::gpu::accounting::{Attached, Basis, Extent};
use crate::daemon::gpu::nvml::Sample;
use crate::scheduler::{ClientId, Command, Engine, Event, GpuId, SleepPhase, Time};

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

impl Model {
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

    /// The clients whose processes another program may have checkpointed, restored or unlocked: NVML lists a
    /// process no longer, or lists a checkpointed process again, or a process was locked.
    ///
    /// A process can be checkpointed before any measurement lists it, so reported memory counts as well. Where
    /// NVML hides processes, each client is returned once.
    pub(super) fn changed_processes(&mut self, sample: &Sample) -> Vec<ClientId> {
        let Some(list) = &sample.processes else { return Vec::new() };
        let machine = &self.machine;
        let has_changed = |(id, client): (&ClientId, &mut Client)| {
            let stats = client.gpus.get_mut(&sample.gpu)?;
            let is_listed = list.contains_key(&u32::try_from(client.identity.pid).ok()?);
            let has_memory = || machine.resident_and_swapped(*id, sample.gpu).is_some_and(|(bytes, _)| bytes > 0);
            let is_missed =
                !is_listed && (stats.listing == Listing::Listed || stats.listing == Listing::Unknown && has_memory());
            match is_listed {
                true => stats.listing = Listing::Listed,
                false if is_missed => stats.listing = Listing::Missed,
                false => {}
            }
            let has_changed = match machine.sleep_of(*id).phase {
                SleepPhase::Checkpointed | SleepPhase::Lent => is_listed,
                // Other programs unlock and checkpoint a locked process without a sign, and may hang before or
                // after a restore.
                SleepPhase::Locked => true,
                SleepPhase::Restoring => machine.is_foreign(*id),
                SleepPhase::Awake => is_missed,
                _ => false,
            };
            has_changed.then_some(*id)
        };
        self.clients.iter_mut().filter_map(has_changed).collect()
    }

    /// Has a client whose process could not be inspected returned by [`changed_processes`](Self::changed_processes)
    /// again.
    pub(super) fn look_again(&mut self, client: ClientId) {
        let gpus = self.clients.get_mut(&client).into_iter().flat_map(|client| client.gpus.values_mut());
        gpus.filter(|stats| stats.listing == Listing::Missed).for_each(|stats| stats.listing = Listing::Listed);
    }

    /// The longest sampling period that still leaves time to evict clients' memory before other programs
    /// run out of memory.
    pub fn sample_period(&self) -> Duration {
        let is_shared = |id: GpuId| self.machine.charged(id) > 0;
        let free = |(id, gpu): (&GpuId, &Gpu)| {
            let sample = gpu.sample.as_ref().filter(|_| !gpu.gone && is_shared(*id))?;
            let grows = gpu.has_others || sample.graphics > 0;
            grows.then(|| gpu.total.saturating_sub(sample.used).saturating_add(gpu.evicted))
        };
        let Some(free) = self.gpus.iter().filter_map(free).min() else { return Duration::MAX };
        Duration::from_millis(free / FREE_PARTS / (GROWTH / 1000)).max(SHORTEST_PERIOD)
    }

    /// Handles a measurement of the memory in use on a GPU, by NVML or by a client. `adopted`: the bytes that
    /// count for a client, but that another program allocated. Returns the events for the scheduler.
    pub(super) fn measure(&mut self, sample: &Sample, adopted: impl Fn(ClientId) -> u64) -> Vec<Event> {
        let attached = self.extents(sample, adopted);
        let guess = self.config.settings.context.min(self.total(sample.gpu) / CONTEXT_DIVISOR);
        let gpu = sample.gpu;
        let faulted_in = self.faulted_in(gpu);
        let Some(entry) = self.gpus.get_mut(&gpu) else { return Vec::new() };
        let before = (entry.accounting.overhead(), entry.accounting.basis());
        let is_measured = entry.index.is_some();
        let settled = sample.begun >= self.started + RECONNECT_TIME;
        self.departed.forget(sample.begun.saturating_sub(EXIT_TIME));
        let clients: BTreeSet<u32> = attached.iter().map(|client| client.pid).collect();
        let is_own = |pid| !settled || self.departed.contains(pid);
        let is_known = |pid: &u32| clients.contains(pid) || self.departed.contains(*pid);
        let is_all_known = sample.processes.iter().flat_map(BTreeMap::keys).all(is_known);
        let complete = settled || is_all_known;
        let absent = if complete { self.departed.managed(gpu).saturating_add(faulted_in) } else { u64::MAX };
        let overhead = match sample.steady {
            true => entry.accounting.sample(sample, &attached, guess, absent, is_own),
            false => None,
        };
        entry.evicted = entry.accounting.evicted(sample, &attached);
        let (free, evicted) = (entry.total.saturating_sub(sample.used), entry.evicted);
        let found = entry.accounting.found(sample, &attached, guess).filter(|_| is_measured);
        if !settled {
            entry.accounting.forget_total();
        }
        let basis = entry.accounting.basis();
        if is_measured && overhead.is_some() && before.1 != basis {
            info!(name: "accounting", gpu = entry.label(gpu), basis = basis.name(), "{}", basis.in_words());
        }
        // If NVML lists no processes, other programs may be using the GPU.
        entry.has_others = !(settled && is_all_known && basis == Basis::Processes);
        let mut events = vec![
            Event::OtherPrograms { gpu, present: entry.has_others },
            Event::ContextSizes { gpu, bytes: entry.accounting.contexts().clone() },
        ];
        if let Some(bytes) = overhead {
            if before.0 != Some(bytes) {
                debug!(gpu = %gpu.0, bytes, "overhead");
            }
            let others = entry.accounting.others();
            // Sent even if unchanged: the scheduler may wait for a measurement that includes a new context.
            events.push(Event::GpuOverhead { gpu, begun: sample.begun, bytes, others, complete });
        }
        if let Some(found) = found {
            let free = Some(free).filter(|_| sample.steady);
            events.push(Event::Measured { gpu, begun: sample.begun, free, evicted, found });
        }
        events
    }

    /// Process IDs of programs that use a GPU and are not clients, as of its newest measurement.
    pub(super) fn others_on(&self, gpu: &Gpu) -> Vec<u32> {
        let Some(sample) = gpu.sample.as_ref().filter(|sample| sample.begun >= self.started + RECONNECT_TIME) else {
            return Vec::new();
        };
        let clients: BTreeSet<i32> = self.clients.values().map(|client| client.identity.pid).collect();
        let is_other =
            |pid: &u32| !self.departed.contains(*pid) && i32::try_from(*pid).is_ok_and(|pid| !clients.contains(&pid));
        sample.processes.iter().flat_map(BTreeMap::keys).copied().filter(is_other).collect()
    }

    /// The bounds on the memory that each client had mapped on a GPU when it was measured.
    fn extents(&self, sample: &Sample, adopted: impl Fn(ClientId) -> u64) -> Vec<Attached> {
        let gpu = sample.gpu;
        let extent = |(id, client): (&ClientId, &Client)| {
            // A client that never reports must not block the measurement of other programs' memory.
            let tells =
                |stats: &&ClientGpuStats| stats.report.is_some() || sample.begun < stats.attached + FIRST_REPORT_TIME;
            let extent = self.machine.extent(*id, gpu)?;
            let stats = client.gpus.get(&gpu).filter(tells);
            let unreported = Extent { least: extent.0, most: extent.1, ..Extent::default() };
            let extent = stats.map_or(unreported, |stats| stats.history.at(sample.begun));
            let Extent { least, most, managed, managed_mapped, unmapped } = extent;
            let pid = client.identity.pid.try_into().unwrap_or(0);
            let is_new = !self.machine.has_context(*id, gpu, sample.begun);
            let adopted = adopted(*id);
            Some(Attached { client: *id, pid, least, most, managed, managed_mapped, unmapped, adopted, is_new })
        };
        self.clients.iter().filter_map(extent).collect()
    }

    /// The most managed bytes beyond clients' charges that page faults may have brought onto a GPU (engine
    /// `managed`): they find only memory that is not charged.
    fn faulted_in(&self, gpu: GpuId) -> u64 {
        let faults = |id: &ClientId| self.machine.engine(*id, gpu) == Some(Engine::Managed);
        let beyond = self.clients.iter().filter(|(id, _)| faults(id)).filter_map(|(_, client)| client.gpus.get(&gpu));
        let beyond = beyond.fold(0u64, |sum, stats| sum.saturating_add(stats.claims.disbelieved()));
        let overhead = self.gpus.get(&gpu).and_then(|gpu| gpu.accounting.overhead()).unwrap_or(0);
        beyond.min(self.total(gpu).saturating_sub(overhead).saturating_sub(self.machine.charged(gpu)))
    }

    /// The events that accept clients' reports as measured, for the GPUs that NVML listed and cannot measure
    /// now. The scheduler may be waiting for a measurement that will not arrive.
    pub(super) fn unmeasured(&self, now: Time) -> Vec<Event> {
        let listed = self.gpus.iter().filter(|(_, gpu)| gpu.index.is_some() && !self.is_nvml_usable());
        listed.map(|(id, _)| unmeasured(*id, now)).collect()
    }
}

/// The client and the GPU of a report, which changes the bounds on the client's memory.
pub(super) fn reporter(event: &Event) -> Option<(ClientId, GpuId)> {
    if let Event::Memory { client, gpu, .. } = event { Some((*client, *gpu)) } else { None }
}

/// The client and the GPU of an allowance, which changes the bounds on the client's memory.
pub(super) fn allowed(command: &Command) -> Option<(ClientId, GpuId)> {
    if let Command::Allowance { client, gpu, .. } = command { Some((*client, *gpu)) } else { None }
}

/// The event that accepts clients' reports as measured, for a GPU that cannot be measured.
pub(super) fn unmeasured(gpu: GpuId, now: Time) -> Event {
    Event::Measured { gpu, begun: now, free: None, evicted: 0, found: BTreeMap::new() }
}
