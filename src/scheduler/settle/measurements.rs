//! Handles measurements that affect more than their GPU: they decide on held limit requests,
//! restores and failed mappings.

use crate::{api::*, machine::Machine};
use std::collections::BTreeMap;

impl Machine {
    /// Handles a measurement of clients' memory.
    pub(crate) fn clients_measured(
        &mut self,
        id: GpuId,
        begun: Time,
        free: Option<u64>,
        found: &BTreeMap<ClientId, Found>,
    ) {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        gpu.clients_measured(cx, fx, begun, found);
        if self.with_quota(|quota, cx, fx| quota.answer_held(cx, fx, id, begun)) {
            self.measure(id);
        }
        if let Some((gpu, cx, _)) = self.gpu_mut(id) {
            gpu.returning_measured(cx.settings, begun, free);
        }
        self.explain_failures(id, begun, free, found);
        self.touch(id);
    }
}
