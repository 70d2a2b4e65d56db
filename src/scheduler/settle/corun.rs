//! Co-running: holding the lock together, in mode `auto`. Programs that leave the GPU idle between launches lose half
//! of it by taking turns; programs that keep it busy lose some of it by running at the same time. A client reports its
//! utilization, which it can measure only while no client outside its gang holds the lock. A report is believed for a
//! while; then the clients take short turns again, long enough to measure anew.

use crate::{api::*, machine::Machine, policy::utilization::FULL};

impl Machine {
    /// Handles a client's report of its utilization. A value above `FULL` means that it wants the GPU alone.
    pub(crate) fn utilization(&mut self, client: ClientId, id: GpuId, permille: u32) {
        // Work that its gang members run at the same time can only raise the measured value.
        let entity = self.gpus.hold(client, id).map(|hold| hold.entity);
        let is_alone = entity.is_some() && self.gpus.holds_on(id).all(|(_, hold)| Some(hold.entity) == entity);
        let is_measured = permille > FULL || is_alone;
        let Some(history) = self.gpus.history_mut(client, id).filter(|_| is_measured) else { return };
        history.utilization.reported(permille);
        self.touch(id);
    }

    /// Discards the utilization that holders reported before they ran together.
    pub(crate) fn forget_utilization(&mut self, id: GpuId) {
        for client in self.gpus.running_on(id).collect::<Vec<_>>() {
            if let Some(history) = self.gpus.history_mut(client, id) {
                history.utilization.forget();
            }
        }
    }
}
