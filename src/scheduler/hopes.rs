//! Wishes for more than a GPU was last measured to have room for, or than a rule leaves beside a context that was not measured
//! yet: they are refused only after another measurement. What others used may have gone, and the context may be small.

use super::{api::*, machine::Machine, timers::Wake};
use std::time::Duration;

/// How long a measurement is waited for.
const PATIENCE: Duration = Duration::from_millis(500);
/// A context can be told from what is beside it once nothing of that has moved for a moment.
const AT_REST: Duration = Duration::from_millis(100);

/// A wish that waits for a measurement.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(super) struct Hope {
    bytes: u64,
    /// A measurement tells that was begun no sooner.
    since: Time,
}

impl Machine {
    /// Has a wish wait for a measurement; or says that there is no hope, however little others use.
    pub(super) fn hope(&mut self, client: ClientId, id: GpuId, bytes: u64) -> bool {
        let (now, reserve) = (self.now, self.gpus.get(&id).map_or(0, |gpu| gpu.reserve(&self.settings)));
        let Some(gpu) = self.gpus.get_mut(&id) else { return false };
        if gpu.measured.is_none() || bytes > gpu.total.saturating_sub(reserve) {
            return false;
        }
        gpu.hopes.insert(client, Hope { bytes, since: now });
        self.look_after_hopes(id);
        true
    }

    /// The same for one whose context counts for what it may have, and was not measured yet.
    pub(super) fn hope_for_context(&mut self, client: ClientId, id: GpuId, bytes: u64) -> bool {
        let is_open = (self.memory_max(client, id).is_some() || self.own_memory_max(client, id).is_some())
            && self.seat(client, id).is_some_and(|seat| seat.context.is_none() && self.context(seat, id) > 0);
        let since = self.now + AT_REST;
        let Some(gpu) = self.gpus.get_mut(&id).filter(|gpu| is_open && gpu.measured.is_some()) else { return false };
        // Who asks again asks for more or less of the same.
        let since = gpu.hopes.get(&client).map_or(since, |before| before.since.min(since));
        gpu.hopes.insert(client, Hope { bytes, since });
        self.look_after_hopes(id);
        true
    }

    /// Decides on those that a measurement has answered, which began then.
    pub(super) fn end_hopes(&mut self, id: GpuId, begun: Time) {
        let Some(gpu) = self.gpus.get_mut(&id) else { return };
        let answered: Vec<(ClientId, Hope)> =
            gpu.hopes.iter().filter(|(_, hope)| hope.since <= begun).map(|(client, hope)| (*client, *hope)).collect();
        gpu.hopes.retain(|_, hope| hope.since > begun);
        for (client, hope) in answered {
            self.wish(client, id, hope.bytes, false);
        }
        self.look_after_hopes(id);
    }

    pub(super) fn hopes_are_late(&mut self, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(&id) {
            gpu.asked = false; // perhaps it will never be answered
        }
        self.end_hopes(id, self.now.saturating_sub(PATIENCE));
    }

    fn look_after_hopes(&mut self, id: GpuId) {
        let now = self.now;
        let hopes = || self.gpus.get(&id).into_iter().flat_map(|gpu| gpu.hopes.values());
        let next = hopes().map(|hope| if hope.since > now { hope.since } else { hope.since + PATIENCE }).min();
        let is_due = hopes().any(|hope| hope.since <= now);
        self.timers.set(Wake::Hopes(id), next);
        if is_due {
            self.measure(id); // a measurement that began before does not tell
        }
    }
}
