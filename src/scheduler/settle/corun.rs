//! Co-running in mode `auto`: clients hold the lock together. Programs that leave the GPU idle
//! between launches lose up to half of the GPU's time by taking turns. Programs that keep the GPU
//! busy lose some of the GPU's time by running at the same time.
//!
//! A client reports its utilization. The client can measure it only while no client outside its
//! gang holds the lock. The scheduler believes a report for a while. After that, the clients take
//! short turns again, each long enough for a new measurement.

use crate::{api::*, machine::Machine, policy::utilization::FULL};

impl Machine {
    /// Handles a client's report of its utilization. A value above `FULL` means that the client
    /// wants the GPU alone.
    pub(crate) fn utilization(&mut self, client: ClientId, id: GpuId, permille: u32) {
        // Work of the client's gang members at the same time can only raise the measured value.
        let entity = self.gpus.hold(client, id).map(|hold| hold.entity);
        let is_alone = entity.is_some() && self.gpus.holds_on(id).all(|(_, hold)| Some(hold.entity) == entity);
        let is_measured = permille > FULL || is_alone;
        let Some(history) = self.gpus.history_mut(client, id).filter(|_| is_measured) else { return };
        history.utilization.reported(permille);
        self.touch(id);
    }

    /// Discards the utilization that holders reported before they started to run together.
    pub(crate) fn forget_utilization(&mut self, id: GpuId) {
        for client in self.gpus.running_on(id).collect::<Vec<_>>() {
            if let Some(history) = self.gpus.history_mut(client, id) {
                history.utilization.forget();
            }
        }
    }
}
