//! The host memory that limits count on, and what makes limits out of date.

use crate::api::GpuId;
use std::collections::BTreeSet;

#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Host {
    /// `None`: there is no bound.
    bytes: Option<u64>,
    /// Bytes in host memory if every client used a whole GPU, over all GPUs.
    pub most: u64,
    /// Bytes in host memory if every client used its limit.
    pub committed: u64,
    /// There is less than `most`.
    scarce: bool,
    /// An allocation waits for what others need now.
    pub awaited: bool,
    /// GPUs on which something changed that limits depend on; while host memory is scarce that concerns all GPUs.
    changed: BTreeSet<GpuId>,
    all_changed: bool,
}

impl Host {
    pub fn found(&mut self, bytes: u64) {
        if self.bytes.replace(bytes) != Some(bytes) {
            self.all_changed = true;
        }
    }

    pub fn bytes(&self) -> Option<u64> {
        self.bytes
    }

    /// What limits have to share, where there is too little for all.
    pub fn budget(&self) -> Option<u64> {
        self.bytes.filter(|_| self.scarce)
    }

    pub fn is_scarce(&self) -> bool {
        self.scarce
    }

    fn would_be_scarce(&self) -> bool {
        self.bytes.is_some_and(|bytes| bytes < self.most)
    }

    /// `most` may have changed.
    pub fn check_scarcity(&mut self) {
        self.all_changed |= self.would_be_scarce() != self.scarce;
    }

    /// What changed since this was last called: `None` for all GPUs. Returns that, and whether memory was scarce before.
    pub fn take_changed(&mut self) -> (Option<BTreeSet<GpuId>>, bool) {
        let changed = std::mem::take(&mut self.changed);
        let all = std::mem::take(&mut self.all_changed);
        let scarce = self.would_be_scarce();
        let before = std::mem::replace(&mut self.scarce, scarce);
        ((!all).then_some(changed), before)
    }

    pub fn has_changed(&self) -> bool {
        self.all_changed || !self.changed.is_empty()
    }

    pub fn mark_changed(&mut self, id: GpuId) {
        self.changed.insert(id);
    }

    pub fn mark_all_changed(&mut self) {
        self.all_changed = true;
    }

    /// A client needs less than before.
    pub fn is_needed_less(&mut self) {
        self.all_changed |= self.scarce && self.awaited;
    }

    /// Fewer bytes are committed, or more needed, than was known.
    pub fn loosened(&mut self) {
        self.all_changed |= self.scarce;
    }
}
