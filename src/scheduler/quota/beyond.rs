//! Limits that exceed a GPU, for managed memory, if a rule permits it, and the scarcity of host memory
//! that they may cause.

use super::{Context, Quota};
use crate::api::*;

impl Quota {
    /// Whether a client's limit may exceed the GPU. While such a client runs, the driver pages its managed
    /// memory, and no other client may have memory on the GPU. So memory that stays there prevents it.
    pub(super) fn may_exceed(&self, cx: Context, client: ClientId, id: GpuId) -> bool {
        cx.rules.may_exceed_gpu(client) && cx.gpus.can_be_whole(id, client)
    }

    /// Whether host memory would be scarce if every client used a whole GPU, and the memory beyond a GPU
    /// that it has requested.
    pub(super) fn would_be_scarce(&self) -> bool {
        // The sum is kept instead of computed, because every event asks, and one tenant may have thousands
        // of requests.
        debug_assert_eq!(self.requested_beyond, {
            let wanted = self.requests.iter().filter_map(|(id, client)| self.limit(*client, *id)?.wanted);
            wanted.map(|wanted| u128::from(wanted.beyond)).sum()
        });
        self.host.spare().is_none_or(|spare| u128::from(spare) < self.requested_beyond)
    }

    /// Marks all limits for recomputation if memory has become scarce or is no longer scarce. Must be
    /// called when `Host::most` may have changed.
    pub(super) fn check_scarcity(&mut self) {
        self.host.check_scarcity(self.would_be_scarce());
    }

    /// The bytes that a client whose managed memory may exceed the GPU has or has requested; 0 for other
    /// clients.
    pub(super) fn reach_beyond(&self, cx: Context, client: ClientId, id: GpuId) -> u64 {
        let limit = self.limit(client, id).filter(|_| cx.rules.may_exceed_gpu(client));
        limit.map_or(0, |limit| limit.needed(cx.now).max(limit.wanted.map_or(0, |wanted| wanted.bytes)))
    }
}
