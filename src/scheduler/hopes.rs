//! Wishes for more than a GPU was last measured to have room for: what others used may have gone since, so they are refused
//! only after another measurement.

use super::{api::*, machine::Machine, timers::Wake};
use std::time::Duration;

/// How long a measurement is waited for.
const PATIENCE: Duration = Duration::from_millis(500);

/// A wish that waits for a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Hope {
    bytes: u64,
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
        let hopes = self.gpus.get(&id).into_iter().flat_map(|gpu| gpu.hopes.values());
        let next = hopes.map(|hope| hope.since + PATIENCE).min();
        self.timers.set(Wake::Hopes(id), next);
        if next.is_some() {
            self.measure(id); // a measurement that began before does not tell
        }
    }
}
