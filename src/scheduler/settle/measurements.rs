//! What measurements say: how much other programs use, and what of clients' reports is true.

use crate::{api::*, machine::Machine, memory::Account, timers::Wake};
use std::collections::BTreeMap;

impl Machine {
    /// A measurement of what is not clients' mapped memory, which was begun then.
    pub(crate) fn overhead(&mut self, id: GpuId, begun: Time, bytes: u64, complete: bool) {
        let Some(gpu) = self.memory.get(&id) else { return };
        let missed = gpu.unmeasured.iter().copied().filter(|client| !self.has_context(*client, id, begun)).collect();
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        gpu.unmeasured = missed;
        gpu.measured = Some(bytes);
        gpu.incomplete = !complete;
        self.adjust_trial(id);
        self.touch(id);
    }

    pub(crate) fn link_found(&mut self, id: GpuId, rate: u64) {
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        gpu.rates.link_found(rate);
        self.touch(id);
    }

    pub(crate) fn unverified_for(&self, client: ClientId, id: GpuId) -> u64 {
        let user = self.clients.get(&client).map(|c| c.user);
        user.zip(self.memory.get(&id)).map_or(0, |(user, gpu)| gpu.ledger.unverified_for(user))
    }

    /// Bytes that are free for that client.
    pub(crate) fn free_for(&self, client: ClientId, id: GpuId) -> u64 {
        let free = self.memory.get(&id).map_or(0, |gpu| gpu.free(&self.settings));
        free.saturating_sub(self.unverified_for(client, id))
    }

    /// Bytes that those clients, or nobody, will have without any more being asked for: those on their way out, and what is
    /// free, be it that it has to be measured, which is asked for, or that it is too little to be given by itself.
    pub(crate) fn arriving(&mut self, id: GpuId, to: &[ClientId]) -> u64 {
        for client in to {
            self.request_verification(*client, id);
        }
        self.memory.get(&id).map_or(0, |gpu| gpu.ledger.evicting().saturating_add(gpu.free(&self.settings)))
    }

    /// How much is in doubt for that client, which waits for it.
    pub(crate) fn request_verification(&mut self, client: ClientId, id: GpuId) -> u64 {
        let unverified = self.unverified_for(client, id);
        let Some(gpu) = self.memory.get(&id).filter(|gpu| unverified > 0 && !gpu.asked) else { return unverified };
        // What was found is looked at again now and then, whoever waits.
        let mut accounts = gpu.clients.keys().filter_map(|client| gpu.ledger.account(*client));
        if accounts.any(|account| account.frees.is_unmeasured()) {
            self.measure(id);
        }
        unverified
    }

    /// Asks for a measurement, unless one is awaited.
    pub(crate) fn measure(&mut self, id: GpuId) {
        if let Some(gpu) = self.memory.get_mut(&id).filter(|gpu| !gpu.asked) {
            gpu.asked = true;
            self.effects.command(Command::Measure { gpu: id });
        }
    }

    pub(crate) fn present(&mut self, id: GpuId, begun: Time, free: Option<u64>, found: &BTreeMap<ClientId, Found>) {
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        gpu.asked = false;
        gpu.verifies |= !found.is_empty();
        for client in gpu.clients.keys().copied().collect::<Vec<_>>() {
            let found = found.get(&client).copied();
            self.change_account(client, id, |account| account.measured(begun, found));
            self.allow_what_stays(client, id);
            self.charge_as_known(client, id);
        }
        self.schedule_verification(id);
        if self.with_quota(|quota, cx, fx| quota.answer_held(cx, fx, id, begun)) {
            self.measure(id);
        }
        self.explain_failures(id, begun, free, found);
        self.touch(id);
    }

    /// Sees to it that doubts end.
    pub(crate) fn schedule_verification(&mut self, id: GpuId) {
        let Some(gpu) = self.memory.get(&id) else { return };
        let accounts = gpu.clients.keys().filter_map(|client| gpu.ledger.account(*client));
        let next = accounts.filter_map(Account::expires).min();
        self.effects.wake(Wake::Verification(id), next);
    }

    pub(crate) fn expire_unverified(&mut self, id: GpuId) {
        let now = self.now;
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        gpu.asked = false;
        for client in gpu.clients.keys().copied().collect::<Vec<_>>() {
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
