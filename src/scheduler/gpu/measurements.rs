//! Handles measurements of the memory that other programs use, and of clients' memory, which verify
//! the clients' reports.

use super::{Context, Gpu};
use crate::{api::*, effects::Effects};
use std::collections::BTreeMap;

impl Gpu {
    /// Handles a measurement of the overhead that began no earlier than `begun`.
    pub fn overhead_measured(
        &mut self,
        cx: Context,
        fx: &mut Effects,
        begun: Time,
        bytes: u64,
        others: u64,
        complete: bool,
    ) {
        let missed = self.unmeasured.iter().copied().filter(|client| !self.has_context(*client, begun)).collect();
        self.unmeasured = missed;
        self.measured = Some(bytes);
        if self.incomplete {
            self.others.begin_again();
        }
        self.others.measured(cx.now, self.total, others.min(bytes));
        self.incomplete = !complete;
        self.adjust_trial(cx.settings);
        fx.touch(self.id);
    }

    /// Records whether programs that are not clients use the GPU.
    pub fn other_programs(&mut self, fx: &mut Effects, present: bool) {
        if std::mem::replace(&mut self.has_only_clients, !present) == present {
            fx.touch(self.id);
        }
    }

    /// Records the rate of the GPU's link to the host, in bytes per second.
    pub fn link_found(&mut self, fx: &mut Effects, rate: u64) {
        self.rates.link_found(rate);
        fx.touch(self.id);
    }

    /// Handles a measurement of clients' memory.
    pub fn clients_measured(&mut self, cx: Context, fx: &mut Effects, begun: Time, found: &BTreeMap<ClientId, Found>) {
        self.measurement_requested = false;
        self.verifies |= !found.is_empty();
        for client in self.attachments.keys().copied().collect::<Vec<_>>() {
            let found = found.get(&client).copied();
            self.change_account(fx, client, |account| account.measured(begun, found));
            self.allow_resident(cx, fx, client);
            self.charge_as_known(cx, fx, client, found.is_some());
        }
        self.schedule_verification(fx);
    }
}
