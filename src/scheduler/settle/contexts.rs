//! Admission of CUDA contexts. A client that is about to create a context waits for room on the
//! GPU, but at most for [`ATTACH_TIMEOUT`]. A deferred client waits longer (see `gpu::contexts`).

use crate::{api::*, machine::Machine, quota::FIRST_LIMIT_TIMEOUT};
use std::time::Duration;

/// How long an attaching client waits for room. After that time the client is admitted without
/// room, and the driver decides.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(2);

/// How long attaching and waking clients wait for another client's restore. The limit is needed
/// because a stopped process can delay its restore indefinitely.
pub(super) const RESTORE: Duration = Duration::from_secs(10);

impl Machine {
    /// Admits attaching clients that have room or have waited long enough. Returns the time of the
    /// next check.
    pub(crate) fn answer_attaching(&mut self, id: GpuId) -> Option<Time> {
        loop {
            let (gpu, cx, fx) = self.gpu_mut(id)?;
            gpu.count_deferred(cx);
            if gpu.contexts.is_empty() {
                return None;
            }
            let Some((client, since, behind)) = gpu.contexts.first() else {
                gpu.notify_deferred(fx);
                return gpu.refuse_contexts(cx, fx);
            };
            // During a restore, no client is admitted without room. Otherwise the restore could run
            // out of memory and fail permanently.
            let restored = gpu.returning.and_then(|returning| returning.restored).map(|since| since + RESTORE);
            let deadline = restored.map_or(since + ATTACH_TIMEOUT, |restored| restored.max(since + ATTACH_TIMEOUT));
            // The capacity excludes the contexts of all waiting clients. The contexts behind this
            // client's do not exist yet, so their bytes are added.
            let behind = gpu.context_bytes(cx.settings, behind);
            let unverified = gpu.request_verification(cx, fx, client);
            let room =
                gpu.capacity(cx.settings).saturating_add(behind) >= gpu.ledger.charged().saturating_add(unverified);
            let reserved = gpu.total.saturating_sub(gpu.reserve(cx.settings))
                < gpu.overhead_wanted(cx.settings).saturating_sub(behind);
            if (!room || reserved || gpu.incomplete) && cx.now < deadline {
                return Some(deadline);
            }
            // Returns here because limits have to be recomputed first. The old limits may rely on
            // the room of contexts that were deferred until now.
            if cx.quota.has_changed() {
                return None;
            }
            let committed = since + FIRST_LIMIT_TIMEOUT;
            if !cx.quota.has_first_limit(client, id) && cx.now < committed {
                return Some(committed);
            }
            gpu.contexts.pop();
            gpu.attachments.get_mut(&client)?.attached = Some(cx.now);
            fx.command(Command::Attached { client, gpu: id });
            let is_drained = gpu.drained;
            self.with_quota(|quota, cx, fx| quota.admit(cx, fx, client, id));
            if is_drained {
                self.drain_client(client); // the client's context predates this scheduler
            }
        }
    }
}
