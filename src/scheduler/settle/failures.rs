//! Requests that wait because mapping failed. `gpu::failures` decides how long they wait.

use crate::{
    api::*,
    gpu::{FAILURE_TIMEOUT, Gpu, Measurement},
    machine::Machine,
    queue::Blocked,
    timers::Wake,
};
use std::collections::BTreeMap;

impl Machine {
    /// Handles the release of a client whose mapping failed.
    pub(crate) fn mapping_failed(&mut self, client: ClientId, id: GpuId) {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        if gpu.mapping_failed(cx, fx, client) {
            self.delay_changed(client);
            self.measure_again(id); // a pending measurement may have begun before the failure
        }
    }

    /// Delays a client's request according to its failures.
    fn delay_changed(&mut self, client: ClientId) {
        let waiting = self.queues.waiting(client);
        let Some((entity, request)) = waiting.and_then(|entity| Some((entity, self.queues.request(entity)?))) else {
            return;
        };
        let until = request.wants.get(&client).map_or(self.now, |gpus| self.model().delayed_until(client, gpus));
        let blocked = request.blocked;
        if until > self.now {
            if !matches!(blocked, Some(Blocked::Absent)) {
                self.block(entity, Blocked::Until(until));
            }
        } else if matches!(blocked, Some(Blocked::Until(_))) && !self.model().is_delayed(entity) {
            self.enqueue(entity);
        }
    }

    /// Explains failures by a measurement that began at `begun`. `free`: the GPU's free bytes.
    /// `found`: the bytes of each client.
    pub(crate) fn explain_failures(
        &mut self,
        id: GpuId,
        begun: Time,
        free: Option<u64>,
        found: &BTreeMap<ClientId, Found>,
    ) {
        let in_use = self.gpus.get(id).map_or(0, Gpu::in_use);
        let clients: Vec<ClientId> =
            self.gpus.get(id).into_iter().flat_map(|gpu| gpu.attachments.keys().copied()).collect();
        for client in clients {
            let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
            if gpu.explain_failure(cx, fx, client, Measurement { begun, free, found, in_use }) {
                self.delay_changed(client);
            }
        }
        let is_explained = |gpu: &Gpu| gpu.attachments.values().all(|one| one.failures.unexplained.is_none());
        if self.gpus.get(id).is_some_and(is_explained) {
            self.effects.wake(Wake::Failures(id), None);
        }
    }

    /// Decides on failures whose measurement did not arrive in time.
    pub(crate) fn failures_are_unexplained(&mut self, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(id) {
            gpu.measurement_requested = false; // the answer may never come
        }
        self.explain_failures(id, self.now.saturating_sub(FAILURE_TIMEOUT), None, &BTreeMap::new());
    }
}
