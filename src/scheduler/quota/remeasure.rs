//! Limit requests that are held until a fresh measurement: those beyond what the last one left room for, or beyond what a rule
//! leaves beside a context of unknown size. Memory of other programs may have gone, and the context may be small.

use crate::{api::*, machine::Machine, timers::Wake};
use std::time::Duration;

/// How long a measurement is waited for.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);
/// A context can be told from what is beside it once nothing of that has moved for a moment.
const AT_REST: Duration = Duration::from_millis(100);

/// A wish that waits for a measurement.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct HeldRequest {
    bytes: u64,
    /// A measurement tells that was begun no sooner.
    since: Time,
}

impl Machine {
    /// Has a wish wait for a measurement; or says that there is no hope, however little others use.
    pub(crate) fn await_sample(&mut self, client: ClientId, id: GpuId, bytes: u64) -> bool {
        let (now, reserve) = (self.now, self.gpus.get(&id).map_or(0, |gpu| gpu.reserve(&self.settings)));
        let Some(gpu) = self.gpus.get_mut(&id) else { return false };
        if gpu.measured.is_none() || bytes > gpu.total.saturating_sub(reserve) {
            return false;
        }
        gpu.held_requests.insert(client, HeldRequest { bytes, since: now });
        self.schedule_samples(id);
        true
    }

    /// The same for one whose context counts for what it may have, and was not measured yet.
    pub(crate) fn await_context_sample(&mut self, client: ClientId, id: GpuId, bytes: u64) -> bool {
        let is_open = (self.memory_max(client, id).is_some() || self.client_memory_max(client, id).is_some())
            && self
                .attachment(client, id)
                .is_some_and(|attachment| attachment.context.is_none() && self.context(attachment, id) > 0);
        let since = self.now + AT_REST;
        let Some(gpu) = self.gpus.get_mut(&id).filter(|gpu| is_open && gpu.measured.is_some()) else { return false };
        // Who asks again asks for more or less of the same.
        let since = gpu.held_requests.get(&client).map_or(since, |before| before.since.min(since));
        gpu.held_requests.insert(client, HeldRequest { bytes, since });
        self.schedule_samples(id);
        true
    }

    /// Decides on those that a measurement has answered, which began then.
    pub(crate) fn answer_held_requests(&mut self, id: GpuId, begun: Time) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let answered: Vec<(ClientId, HeldRequest)> = gpu
            .held_requests
            .iter()
            .filter(|(_, held)| held.since <= begun)
            .map(|(client, held)| (*client, *held))
            .collect();
        gpu.held_requests.retain(|_, held| held.since > begun);
        for (client, held) in answered {
            self.request_limit(client, id, held.bytes, false);
        }
        self.schedule_samples(id);
    }

    pub(crate) fn held_requests_timed_out(&mut self, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.asked = false; // perhaps it will never be answered
        }
        self.answer_held_requests(id, self.now.saturating_sub(SAMPLE_TIMEOUT));
    }

    fn schedule_samples(&mut self, id: GpuId) {
        let now = self.now;
        let held_requests = || self.gpus.get(&id).into_iter().flat_map(|gpu| gpu.held_requests.values());
        let next =
            held_requests().map(|held| if held.since > now { held.since } else { held.since + SAMPLE_TIMEOUT }).min();
        let is_due = held_requests().any(|held| held.since <= now);
        self.timers.set(Wake::HeldRequests(id), next);
        if is_due {
            self.measure(id); // a measurement that began before does not tell
        }
    }
}
