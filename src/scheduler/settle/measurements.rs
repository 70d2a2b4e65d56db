//! Takes measurements: the memory that other programs use, and the truth of clients' reports.

use crate::{api::*, gpu::Account, machine::Machine, timers::Wake};
use std::collections::BTreeMap;

impl Machine {
    /// Takes a measurement of the overhead that began no earlier than `begun`.
    pub(crate) fn overhead_measured(&mut self, id: GpuId, begun: Time, bytes: u64, others: u64, complete: bool) {
        let now = self.now;
        let Some(gpu) = self.gpus.get(id) else { return };
        let missed = gpu.unmeasured.iter().copied().filter(|client| !self.has_context(*client, id, begun)).collect();
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.unmeasured = missed;
        gpu.measured = Some(bytes);
        if gpu.incomplete {
            gpu.others.begin_again();
        }
        gpu.others.measured(now, gpu.total, others.min(bytes));
        gpu.incomplete = !complete;
        self.adjust_trial(id);
        self.touch(id);
    }

    pub(crate) fn other_programs(&mut self, id: GpuId, present: bool) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        if std::mem::replace(&mut gpu.has_only_clients, !present) == present {
            self.touch(id);
        }
    }

    pub(crate) fn link_found(&mut self, id: GpuId, rate: u64) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.rates.link_found(rate);
        self.touch(id);
    }

    /// Bytes of other tenants' clients that are unverified for this client. During a restore, bytes of its own tenant
    /// count too: if they are still there, memory that takes their place is missing for the restore.
    pub(crate) fn unverified_for(&self, client: ClientId, id: GpuId) -> u64 {
        let Some((state, gpu)) = self.clients.get(&client).zip(self.gpus.get(id)) else { return 0 };
        let is_restoring = gpu.returning.is_some_and(|returning| returning.restored.is_some());
        match is_restoring || !gpu.overdue.is_empty() {
            true => gpu.ledger.unverified(),
            false => gpu.ledger.unverified_for(state.tenant),
        }
    }

    /// Bytes that are free for a client: not charged, reserved or unverified.
    pub(crate) fn free_for(&self, client: ClientId, id: GpuId) -> u64 {
        let free = self.gpus.get(id).map_or(0, |gpu| gpu.free(&self.settings));
        free.saturating_sub(self.unverified_for(client, id))
    }

    /// Bytes that will be available to these clients without evicting more: bytes being freed, and free bytes that
    /// still have to be measured, which is requested, or are too few to be credited by themselves.
    pub(crate) fn arriving(&mut self, id: GpuId, clients: &[ClientId]) -> u64 {
        for client in clients {
            self.request_verification(*client, id);
        }
        self.gpus.get(id).map_or(0, |gpu| gpu.ledger.evicting().saturating_add(gpu.free(&self.settings)))
    }

    /// Requests a measurement of the bytes that are unverified for a waiting client. Returns those bytes.
    pub(crate) fn request_verification(&mut self, client: ClientId, id: GpuId) -> u64 {
        let unverified = self.unverified_for(client, id);
        if unverified > 0 {
            self.request_any_verification(id);
        }
        unverified
    }

    /// Requests a measurement of unverified bytes that were not measured yet. Bytes that a measurement did find are measured again
    /// from time to time anyway.
    pub(crate) fn request_any_verification(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get(id).filter(|gpu| !gpu.measurement_requested) else { return };
        if gpu.accounts().any(|account| account.frees.is_unmeasured()) {
            self.measure(id);
        }
    }

    /// Requests a measurement, unless one is awaited.
    pub(crate) fn measure(&mut self, id: GpuId) {
        if let Some(gpu) = self.gpus.get_mut(id).filter(|gpu| !gpu.measurement_requested) {
            gpu.measurement_requested = true;
            self.effects.command(Command::Measure { gpu: id });
        }
    }

    /// Takes a measurement of clients' memory.
    pub(crate) fn clients_measured(
        &mut self,
        id: GpuId,
        begun: Time,
        free: Option<u64>,
        found: &BTreeMap<ClientId, Found>,
    ) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.measurement_requested = false;
        gpu.verifies |= !found.is_empty();
        for client in gpu.attachments.keys().copied().collect::<Vec<_>>() {
            let found = found.get(&client).copied();
            self.change_account(client, id, |account| account.measured(begun, found));
            self.allow_resident(client, id);
            self.charge_as_known(client, id);
        }
        self.schedule_verification(id);
        if self.with_quota(|quota, cx, fx| quota.answer_held(cx, fx, id, begun)) {
            self.measure(id);
        }
        self.returning_measured(id, begun, free);
        self.explain_failures(id, begun, free, found);
        self.touch(id);
    }

    /// Sets the time at which the next unverified bytes expire.
    pub(crate) fn schedule_verification(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get(id) else { return };
        let accounts = gpu.accounts();
        let next = accounts.filter_map(Account::expires).min();
        self.effects.wake(Wake::Verification(id), next);
    }

    /// Ends unverified frees whose time has come.
    pub(crate) fn expire_unverified(&mut self, id: GpuId) {
        let now = self.now;
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.measurement_requested = false;
        for client in gpu.attachments.keys().copied().collect::<Vec<_>>() {
            let is_present = self.change_account(client, id, |account| {
                account.measurement_is_late(now);
                account.frees.expire(now)
            });
            if is_present == Some(true) {
                self.effects.command(Command::EvictionBlocked { client, gpu: id, why: EvictionBlock::Unfreed });
            }
        }
        self.schedule_verification(id);
        self.touch(id);
    }
}
