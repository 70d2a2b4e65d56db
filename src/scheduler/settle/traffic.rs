//! Traffic between a GPU and the host: samples for the thrashing detector, and what follows when clients thrash.
//!
//! Engine `swap` cannot thrash: clients that do not fit together are not granted together. Managed memory can, in mode
//! `off` and while an undrainable holder runs beside others.

use crate::{
    api::*,
    machine::Machine,
    thrash::{Change, Detector, Sample},
    timers::Wake,
};

/// A client maps nothing until its allowance suffices for its next chunk, of up to this many bytes.
const CHUNK: u64 = 64 << 20;

impl Machine {
    /// The GPUs for which `Event::Traffic` is wanted, about every second.
    pub fn watched(&self) -> GpuSet {
        let is_watched = |id: &GpuId| self.thrashes(*id) || self.is_crowded(*id);
        self.memory.keys().copied().filter(is_watched).collect()
    }

    /// The sample that this traffic of a GPU amounts to now. `None`: the GPU is unknown.
    pub fn sample(&self, id: GpuId, traffic: Traffic) -> Option<Sample> {
        let gpu = self.memory.get(&id)?;
        Some(Sample {
            at: self.now,
            traffic,
            demand: self.demand_together(id),
            capacity: gpu.capacity(&self.settings),
            link: gpu.rates.link(),
            is_ordered: self.has_memory_moved(id),
            can_be_ended: self.settings.anti_thrash == AntiThrash::Auto,
        })
    }

    pub(crate) fn traffic(&mut self, id: GpuId, traffic: Traffic) {
        let Some(sample) = self.sample(id, traffic) else { return };
        let change = self.thrash.entry(id).or_default().sample(&sample);
        self.thrashing(id, change);
    }

    pub(crate) fn thrashes(&self, id: GpuId) -> bool {
        self.thrash.get(&id).is_some_and(Detector::thrashes)
    }

    /// Whether clients that thrashed on a GPU are still to take turns.
    pub(crate) fn keeps_apart(&self, id: GpuId) -> bool {
        self.thrash.get(&id).is_some_and(|detector| detector.keeps_apart(self.now))
    }

    pub(crate) fn look_at_traffic(&mut self, id: GpuId) {
        let now = self.now;
        let Some(detector) = self.thrash.get_mut(&id) else { return };
        let change = detector.look(now);
        self.thrashing(id, change);
        self.touch(id); // clients may be allowed to run together again
    }

    fn thrashing(&mut self, id: GpuId, change: Option<Change>) {
        let deadline = self.thrash.get(&id).and_then(|detector| detector.deadline(self.now));
        self.effects.wake(Wake::Thrash(id), deadline);
        if let Some(change) = change {
            let demand = self.demand_together(id);
            self.effects.command(Command::Thrashing { gpu: id, begins: change == Change::Begins, demand });
            self.touch(id);
        }
    }

    fn is_crowded(&self, id: GpuId) -> bool {
        self.memory.get(&id).is_some_and(|gpu| self.demand_together(id) > gpu.capacity(&self.settings))
    }

    /// Bytes that the holders of a GPU need together; 0 where none runs beside another, or where none can page-fault.
    fn demand_together(&self, id: GpuId) -> u64 {
        let running = self.lock.holds_on(id).filter(|(_, hold)| !hold.suspended).filter_map(|(client, _)| {
            Some((self.memory_of(client, id)?.engine, self.account(client, id)?.report.demand))
        });
        let running: Vec<(Engine, u64)> = running.collect();
        let can_fault = running.iter().any(|(engine, _)| *engine == Engine::Managed);
        if running.len() < 2 || !(can_fault || self.settings.anti_thrash == AntiThrash::Off) {
            return 0;
        }
        running.iter().fold(0, |sum, (_, demand)| sum.saturating_add(*demand))
    }

    /// Whether memory is being moved out or in because of allowances.
    fn has_memory_moved(&self, id: GpuId) -> bool {
        let Some(gpu) = self.memory.get(&id) else { return false };
        let is_mapping = |client: &ClientId| {
            let Some(account) = gpu.ledger.account(*client) else { return false };
            let MemoryReport { demand, mapped, .. } = account.report;
            let lacking = account.allowance.min(demand).saturating_sub(mapped);
            lacking >= CHUNK && self.eviction_block(*client, id).is_none()
        };
        gpu.ledger.evicting() > 0 || gpu.clients.keys().any(is_mapping)
    }
}
