//! Raises allowances: towards what clients need, and beyond it for holders that keep growing.

use crate::{
    api::*,
    machine::Machine,
    memory::{Account, ClientMemory, GpuMemory},
};

/// A credit that completes nothing and is smaller is not worth a message.
const CREDIT_STEP: u64 = 2 << 20;
/// What a holder that keeps growing may map beyond what it needs: what it allocates in some milliseconds, but no larger part
/// of what is free than one in so many.
const AHEAD: u64 = 1 << 30;
const AHEAD_PART: u64 = 4;

impl Machine {
    /// Sets an allowance and tells its client.
    pub(crate) fn allow(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        let now = self.now;
        for (seq, bytes) in self.change_account(client, id, |account| account.set(now, bytes)).unwrap_or_default() {
            self.effects.command(Command::Allowance { client, gpu: id, seq, bytes });
        }
    }

    /// A client that comes back to a new scheduler has memory there already; and what is pinned stays, so it is allowed.
    /// Neither raises the charge.
    pub(crate) fn allow_what_stays(&mut self, client: ClientId, id: GpuId) {
        let Some(account) = self.account(client, id) else { return };
        if account.awaits_measurement() {
            return;
        }
        let least = if account.is_new() { account.report.mapped } else { account.report.pinned };
        if account.allowance < least {
            self.allow(client, id, least);
        }
    }

    /// The bytes without which this client cannot run there.
    pub(crate) fn need(&self, client: ClientId, id: GpuId) -> u64 {
        let (Some(memory), Some(gpu)) = (self.memory_of(client, id), self.memory.get(&id)) else { return 0 };
        if memory.engine == Engine::Managed && self.settings.anti_thrash == AntiThrash::Off {
            return 0; // pages fault in and out as they may
        }
        gpu.ledger
            .account(client)
            .map_or(0, |account| account.report.demand)
            .saturating_add(self.shortfall(client, id))
            .min(gpu.capacity(&self.settings))
    }

    /// Raises an allowance towards the need as far as bytes are free, evicting nobody. Says what is still lacking. `owed`:
    /// bytes that are spoken for, of those that are free and then of those on their way out.
    pub(crate) fn credit(&mut self, client: ClientId, id: GpuId, owed: u64) -> u64 {
        let need = self.need(client, id);
        let Some(gpu) = self.memory.get(&id) else { return 0 };
        let Some(account) = gpu.ledger.account(client) else { return 0 };
        if account.awaits_measurement() {
            return need; // an allowance of less than it has would have it evict
        }
        // What is free still and not given to those before it is in doubt for them, or too little by itself: theirs all the same.
        let spoken = owed.min(gpu.free(&self.settings));
        let free = self.free_for(client, id).saturating_sub(spoken);
        // Bytes that were asked back and have not left yet are still charged: they can be left where they are, unless
        // somebody else counts on them.
        let uncounted = gpu.ledger.evicting().saturating_sub(owed - spoken);
        let leaving = account.charge.saturating_sub(account.allowance).min(uncounted);
        let reach = account.allowance.saturating_add(leaving).saturating_add(free).min(need);
        if reach > account.allowance && (reach == need || reach - account.allowance >= CREDIT_STEP) {
            self.allow(client, id, reach);
        }
        need.saturating_sub(self.account(client, id).map_or(0, |account| account.allowance))
    }

    /// Lets holders that keep growing map more than they need, as far as bytes are free: so their allocations wait for no
    /// message. It is taken back when other clients lack bytes ([`take_back_ahead`](Self::take_back_ahead)).
    pub(crate) fn credit_ahead(&mut self, id: GpuId) {
        let is_idle = |gpu: &GpuMemory| gpu.contexts.is_empty() && gpu.reservations.is_empty();
        if !self.memory.get(&id).is_some_and(is_idle) {
            return;
        }
        for client in self.lock.holders(id).collect::<Vec<_>>() {
            let keeps_growing = |memory: &ClientMemory| memory.keeps_growing(self.now) && memory.engine == Engine::Swap;
            let grows_now = self.memory_of(client, id).is_some_and(keeps_growing);
            let is_running = self.lock.hold(client, id).is_some_and(|hold| hold.revoked.is_none());
            let allowance = self.account(client, id).map_or(0, |account| account.allowance);
            let limit = self.quota.limit(client, id).map_or(0, |limit| limit.limit);
            let ahead = self.ahead(client, id);
            // Most of what is free is left to others that grow, or create a context.
            let free = self.free_for(client, id);
            let most = AHEAD.min(free.saturating_add(ahead) / AHEAD_PART);
            if !(grows_now && is_running) || ahead > most / 2 {
                continue;
            }
            let reach = allowance.saturating_add((most - ahead).min(free)).min(limit);
            if reach >= allowance.saturating_add(CREDIT_STEP) {
                self.allow(client, id, reach);
            }
        }
    }

    /// Bytes that a client may map and does not need.
    pub(crate) fn ahead(&self, client: ClientId, id: GpuId) -> u64 {
        let ahead = self.account(client, id).map_or(0, Account::ahead);
        if ahead == 0 { 0 } else { ahead.saturating_sub(self.shortfall(client, id)) }
    }
}
