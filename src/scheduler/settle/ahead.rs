//! Asks clients to allocate host memory ahead of evictions. At the first eviction of memory,
//! allocating host memory takes longer than copying. So a client whose memory on a GPU has not
//! changed for a while is asked to allocate host memory beforehand. The daemon limits the total to
//! the amount that the host can spare.

use crate::{api::*, gpu::Account, machine::Machine, timers::Wake};
use std::time::Duration;

/// How long a client's memory has to be unchanged. Programs that end soon, or are still allocating,
/// would gain nothing from an earlier request.
const AT_REST: Duration = Duration::from_secs(3);

impl Machine {
    /// Records that a client's memory on a GPU has changed.
    pub(crate) fn memory_changed(&mut self, client: ClientId, id: GpuId) {
        self.effects.wake(Wake::Ahead(client, id), Some(self.now + AT_REST));
    }

    /// Asks a client whose memory is unchanged to allocate host memory for it.
    pub(crate) fn ask_ahead(&mut self, client: ClientId, id: GpuId) {
        let Some(attachment) = self.gpus.attachment(client, id) else { return };
        if attachment.engine != Engine::Swap || attachment.eviction_block.is_some() {
            return;
        }
        let on_gpu = |account: &Account| account.report.mapped.saturating_sub(account.report.pinned);
        let bytes = self.gpus.account(client, id).map_or(0, on_gpu);
        if let Some(bytes) = self.quota.ahead(client, id, bytes) {
            self.effects.command(Command::Prepare { client, gpu: id, bytes });
        }
    }

    /// Sets the host memory that may be allocated ahead.
    pub(crate) fn host_ahead(&mut self, bytes: Option<u64>) {
        if self.with_quota(|quota, cx, fx| quota.host_ahead(cx, fx, bytes)) {
            let at = Some(self.now + AT_REST);
            for (id, gpu) in self.gpus.iter() {
                gpu.attachments.keys().for_each(|client| self.effects.wake(Wake::Ahead(*client, id), at));
            }
        }
    }
}
