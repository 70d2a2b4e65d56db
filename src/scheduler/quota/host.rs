//! The host memory that limits rely on, and the record of which limits are out of date.

use crate::api::GpuId;
use std::collections::BTreeSet;

/// The host memory that limits rely on, and which limits are out of date.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct Host {
    /// Bytes of host memory that limits may rely on. `None`: unbounded.
    bytes: Option<u64>,
    /// Bytes that would be in host memory if every client used a whole GPU, summed over all GPUs.
    pub most: u64,
    /// Bytes that would be in host memory if every client used its whole limit.
    pub committed: u64,
    /// `bytes` was less than `most` when limits were last computed.
    scarce: bool,
    /// An allocation is waiting for other clients to free memory.
    pub awaited: bool,
    /// GPUs whose limits have to be recomputed. While host memory is scarce, a change on one GPU
    /// affects all GPUs.
    changed: BTreeSet<GpuId>,
    /// GPUs with newly attached clients that have no computed limit, and GPUs that clients have
    /// detached. The other clients' limits change only if memory is scarce or limited by rules.
    joined: BTreeSet<GpuId>,
    all_changed: bool,
    /// Committed bytes have changed while memory is scarce, so limits can rise further.
    freed: bool,
    /// A demand has changed since limits were last computed. A changed demand alone does not
    /// trigger a recomputation.
    demand_changed: bool,
}

impl Host {
    /// Sets the bytes that limits may rely on.
    pub fn found(&mut self, bytes: u64) {
        if self.bytes.replace(bytes) != Some(bytes) {
            self.all_changed = true;
        }
    }

    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// The host memory that limits have to share. `None`: host memory suffices for all clients.
    pub fn budget(&self) -> Option<u64> {
        self.bytes.filter(|_| self.scarce)
    }

    pub fn is_scarce(&self) -> bool {
        self.scarce
    }

    /// Bytes that remain if every client uses a whole GPU. `None`: memory is scarce then.
    /// `Some(u64::MAX)`: host memory is unbounded.
    pub fn spare(&self) -> Option<u64> {
        self.bytes.map_or(Some(u64::MAX), |bytes| bytes.checked_sub(self.most))
    }

    /// Marks all limits for recomputation if memory has become scarce or is no longer scarce.
    pub fn check_scarcity(&mut self, is_scarce: bool) {
        self.all_changed |= is_scarce != self.scarce;
    }

    pub fn take_joined(&mut self) -> BTreeSet<GpuId> {
        std::mem::take(&mut self.joined)
    }

    /// Returns the GPUs whose limits have to be recomputed (`None`: all GPUs), and clears the list.
    /// Also returns whether memory was scarce before.
    pub fn take_changed(&mut self, is_scarce: bool) -> (Option<BTreeSet<GpuId>>, bool) {
        let changed = std::mem::take(&mut self.changed);
        let all = std::mem::take(&mut self.all_changed);
        self.demand_changed = false;
        let before = std::mem::replace(&mut self.scarce, is_scarce);
        ((!all).then_some(changed), before)
    }

    pub fn has_changed(&self) -> bool {
        self.freed || self.all_changed || !self.changed.is_empty() || !self.joined.is_empty()
    }

    /// Whether limits have to be recomputed. If not, they only have to be raised towards their
    /// computed targets.
    pub fn is_out_of_date(&self) -> bool {
        self.all_changed || self.demand_changed || !self.changed.is_empty() || !self.joined.is_empty()
    }

    /// Returns and clears `freed`.
    pub fn take_freed(&mut self) -> bool {
        std::mem::take(&mut self.freed)
    }

    pub fn mark_changed(&mut self, id: GpuId) {
        self.changed.insert(id);
    }

    pub fn mark_joined(&mut self, id: GpuId) {
        self.joined.insert(id);
    }

    pub fn mark_all_changed(&mut self) {
        self.all_changed = true;
    }

    /// Marks all limits for recomputation after a demand has changed, if memory is scarce and an
    /// allocation waits for memory.
    pub fn demand_changed(&mut self) {
        self.demand_changed = true;
        self.all_changed |= self.scarce && self.awaited;
    }

    /// Marks all limits for recomputation if memory is scarce, because an unresponsive client
    /// answers again.
    pub fn answers_again(&mut self) {
        self.all_changed |= self.scarce;
    }

    /// If memory is scarce, lets limits rise further. Called after committed bytes have changed.
    pub fn committed_changed(&mut self) {
        self.freed |= self.scarce;
    }
}
