//! The bytes of a GPU that can be charged to clients: its total size minus the reserve, contexts
//! and the memory of other programs.

use crate::{
    api::*,
    gpu::{Access, Gpu, Gpus},
    quota::Capacities,
};

/// The reserve and the estimated size of a context are each at most a GPU's size divided by this
/// number. Contexts are smaller on small GPUs.
const SMALLEST_PART: u64 = 16;
/// The highest limit, and the highest demand that counts (16 TiB). The cap keeps sums from
/// overflowing.
pub(super) const MOST: u64 = 1 << 44;

impl Gpu {
    /// Bytes that no client may use.
    pub(crate) fn reserve(&self, settings: &Settings) -> u64 {
        settings.reserve.min(self.total / SMALLEST_PART)
    }

    /// If a client has at most this many unverified bytes, they are assumed to be its context.
    pub(crate) fn ignored_unverified(&self) -> u64 {
        self.total / SMALLEST_PART
    }

    /// The estimated size of `count` unmeasured contexts.
    pub(crate) fn context_bytes(&self, settings: &Settings, count: usize) -> u64 {
        settings.context.min(self.total / SMALLEST_PART).saturating_mul(count as u64)
    }

    /// Bytes that may be charged to clients.
    pub(crate) fn capacity(&self, settings: &Settings) -> u64 {
        match self.access {
            Access::Turns => self.usable(settings).saturating_add(self.trial.map_or(0, |trial| trial.beyond)),
            Access::Gone => u64::MAX,
            Access::Suspended => 0,
        }
    }

    /// Updates the capacity. Returns whether requests that unevictable memory blocks may fit now.
    pub(crate) fn note_capacity(&mut self, settings: &Settings) -> bool {
        let capacity = self.capacity(settings);
        let before = std::mem::replace(&mut self.capacity, capacity);
        self.ledger.take_unevictable_fell() || self.capacity > before
    }

    /// The capacity without a [`Trial`](super::shortfall::Trial): the total minus the reserve and the
    /// overhead.
    pub(crate) fn usable(&self, settings: &Settings) -> u64 {
        self.all(settings).saturating_sub(self.overhead_wanted(settings))
    }

    /// The total and the lent bytes, minus the reserve.
    pub(super) fn all(&self, settings: &Settings) -> u64 {
        self.total.saturating_add(self.lent_bytes()).saturating_sub(self.reserve(settings))
    }

    /// Charges of checkpointed clients, which other clients use until the restores begin.
    pub(crate) fn lent_bytes(&self) -> u64 {
        let charges = self.lent.iter().filter_map(|client| Some(self.account(*client)?.charge));
        charges.fold(0, u64::saturating_add)
    }

    /// Like `usable`, but assumes that unmeasured contexts take no memory and that other programs
    /// do not grow. The next measurements will show the contexts and the growth.
    fn usable_as_measured(&self, settings: &Settings) -> u64 {
        let taken = self.measured.unwrap_or(0).saturating_add(self.others.in_rooms());
        self.total.saturating_sub(self.reserve(settings)).saturating_sub(taken)
    }

    /// Bytes set aside for contexts and other programs, including memory kept free for other
    /// programs.
    pub(crate) fn overhead(&self, settings: &Settings) -> u64 {
        self.all(settings).saturating_sub(self.usable(settings))
    }

    /// Like `overhead`, but may exceed the GPU's size.
    pub(crate) fn overhead_wanted(&self, settings: &Settings) -> u64 {
        let contexts = self.context_bytes(settings, self.unmeasured.len().saturating_sub(self.contexts.deferred()));
        let kept = self.others.kept();
        self.measured.unwrap_or(0).saturating_add(contexts).saturating_add(self.returning_bytes()).saturating_add(kept)
    }

    /// Bytes that the contexts of sleeping clients will need, except contexts that already have
    /// memory set aside. These bytes can be lent to clients, but not promised.
    fn away(&self) -> u64 {
        let returning = self.returning.map(|returning| returning.client);
        let is_set_aside = |client: &ClientId| Some(*client) == returning || self.overdue.contains_key(client);
        let away = self.away.iter().filter(|(client, _)| !is_set_aside(client));
        away.fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Bytes that can be promised to clients: the usable bytes without lent bytes.
    pub(crate) fn promisable(&self, settings: &Settings) -> u64 {
        let all = self.total.saturating_sub(self.reserve(settings));
        all.saturating_sub(self.overhead_wanted(settings)).saturating_sub(self.away())
    }

    /// Bytes that other clients keep on the GPU.
    pub(crate) fn pinned_by_others(&self, client: ClientId) -> u64 {
        let others = self.attachments.iter().filter(|(other, _)| **other != client);
        others.fold(0, |sum, (_, attachment)| sum.saturating_add(attachment.account().report.pinned))
    }

    /// Bytes that are neither charged nor reserved.
    pub(crate) fn free(&self, settings: &Settings) -> u64 {
        let kept = self.reservations.iter().fold(0u64, |sum, reservation| sum.saturating_add(reservation.secured));
        self.capacity(settings).saturating_sub(self.ledger.charged()).saturating_sub(kept)
    }
}

/// The quota's view of the GPUs.
pub(crate) struct GpuCapacities<'a> {
    pub gpus: &'a Gpus,
    pub settings: &'a Settings,
}

impl Capacities for GpuCapacities<'_> {
    fn total(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.total)
    }

    fn offer(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.promisable(self.settings).min(MOST))
    }

    fn offer_as_measured(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.usable_as_measured(self.settings).min(MOST))
    }

    fn offer_at_best(&self, gpu: GpuId) -> Option<u64> {
        let gpu = self.gpus.get(gpu).filter(|gpu| gpu.measured.is_some())?;
        Some(gpu.total.saturating_sub(gpu.reserve(self.settings)))
    }

    fn context(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.context_bytes(self.settings, 1))
    }

    fn can_be_whole(&self, gpu: GpuId, client: ClientId) -> bool {
        self.gpus
            .get(gpu)
            .is_some_and(|gpu| (gpu.has_only_clients || gpu.others.used() == 0) && gpu.pinned_by_others(client) == 0)
    }

    fn is_attaching(&self, gpu: GpuId) -> bool {
        self.gpus.get(gpu).is_some_and(|gpu| !gpu.contexts.is_empty())
    }
}
