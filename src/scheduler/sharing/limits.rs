//! The limits on clients' memory, and the measurements and evictions that follow from them.

use super::Sharing;
use crate::{api::*, gpu::AT_REST, queue::Blocked, timers::Wake};
use std::collections::BTreeMap;

impl Sharing<'_> {
    /// Handles a client's report of its memory. Returns whether the client has attached the GPU.
    pub fn reported(&mut self, client: ClientId, id: GpuId, report: MemoryReport) -> bool {
        let reported = self.with_gpu(id, |gpu, cx, fx| gpu.reported(cx, fx, client, report));
        let Some(report) = reported.flatten() else { return false };
        self.with_quota(|quota, cx, _| quota.reported(cx, client, id, report.limit_ack, report.demand));
        self.check(client); // the report may be a late answer to a revoke or an eviction
        // The client's need may have changed, and its blocked request may now be servable.
        self.with_requests(|requests| requests.retry(client, |blocked| blocked == Blocked::Pinned(id)));
        true
    }

    /// Handles a client's request for a higher limit.
    pub fn request_limit(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        // A client allocates only in a context.
        self.with_gpu(id, |gpu, cx, _| gpu.used_by(cx.now, client, false));
        if self.with_quota(|quota, cx, fx| quota.request(cx, fx, client, id, bytes)) {
            self.measure(id);
        }
    }

    /// Handles the timeout of a measurement that limit requests wait for.
    pub fn held_requests_timed_out(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, _| gpu.measurement_requested = false); // it may never arrive
        if self.with_quota(|quota, cx, fx| quota.held_requests_timed_out(cx, fx, id)) {
            self.measure(id);
        }
    }

    /// Handles a measurement of clients' memory. `evicted`: bytes in use that the driver gives to plain
    /// allocations.
    pub fn measured(
        &mut self,
        id: GpuId,
        begun: Time,
        (free, evicted): (Option<u64>, u64),
        found: &BTreeMap<ClientId, Found>,
    ) {
        if self.with_gpu(id, |gpu, cx, fx| gpu.clients_measured(cx, fx, begun, found)).is_none() {
            return;
        }
        if self.with_quota(|quota, cx, fx| quota.answer_held(cx, fx, id, begun)) {
            self.measure(id);
        }
        self.with_gpu(id, |gpu, cx, _| gpu.returning_measured(cx.settings, begun, free));
        let available = free.map(|free| free.saturating_add(evicted));
        self.explain_failures(id, begun, available, found);
        self.effects.touch(id);
    }

    /// Asks a client whose memory is unchanged to allocate host memory for it. At the first eviction
    /// of memory, allocating host memory takes longer than copying.
    pub fn ask_ahead(&mut self, client: ClientId, id: GpuId) {
        let bytes = self.gpus.get(id).and_then(|gpu| gpu.unchanged_memory(client));
        if let Some(bytes) = bytes.and_then(|bytes| self.quota.ahead(client, id, bytes)) {
            self.effects.command(Command::Prepare { client, gpu: id, bytes });
        }
    }

    /// Sets the host memory that may be allocated ahead.
    pub fn host_ahead(&mut self, bytes: Option<u64>) {
        if self.with_quota(|quota, cx, fx| quota.host_ahead(cx, fx, bytes)) {
            let at = Some(self.now + AT_REST);
            for (id, gpu) in self.gpus.iter() {
                gpu.attachments.keys().for_each(|client| self.effects.wake(Wake::Ahead(*client, id), at));
            }
        }
    }

    /// Updates a client's limits for its sleep. Sets room aside on the GPU that the client will be
    /// moved to, and on the GPUs that it may be moved back to.
    pub fn limit_sleeper(&mut self, client: ClientId) {
        // A client that another program has locked acknowledges no lower limit.
        let is_asleep = self.sleep.view(client).phase != SleepPhase::Awake && !self.sleep.is_foreign(client);
        let (goes, back) = self.model().expected(client);
        self.with_quota(|quota, cx, fx| {
            quota.set_asleep(cx, fx, client, is_asleep);
            quota.expect(cx, client, &goes, &back);
        });
    }

    /// Releases the room for the contexts of a client that never needs them again.
    pub fn forget_contexts(&mut self, client: ClientId) {
        for id in self.gpus.of_client(client) {
            self.with_gpu(id, |gpu, _, _| gpu.away.get_mut(&client).into_iter().for_each(|bytes| *bytes = 0));
            self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
        }
    }

    /// Applies a change of the bounds on a client's memory. Evicts memory beyond the bounds from
    /// GPUs on which the client does not run. Notifies the client of the bounds, and later of its
    /// new limits.
    pub fn bounds_changed(&mut self, client: ClientId) {
        for id in self.quota.gpus_of(client) {
            self.quota.mark_changed(id);
            self.swap_surplus(client, id);
            self.with_quota(|quota, cx, fx| quota.tell_again(cx, fx, client, id));
        }
    }
}
