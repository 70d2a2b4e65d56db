//! Raises allowances: towards the clients' needs, and beyond them for holders that keep growing.

use crate::{
    api::*,
    gpu::{Account, Attachment, Gpu},
    machine::Machine,
};

/// A smaller credit that does not meet a client's need is not worth a message.
const CREDIT_STEP: u64 = 2 << 20;
/// Bytes that a holder that keeps growing may map beyond its need: its allocations of some milliseconds, but no more
/// than this part of the free bytes.
const AHEAD: u64 = 1 << 30;
const AHEAD_PART: u64 = 4;

impl Machine {
    /// Sets an allowance and sends it to the client.
    pub(crate) fn allow(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        let now = self.now;
        for (seq, bytes) in self.change_account(client, id, |account| account.set(now, bytes)).unwrap_or_default() {
            self.effects.command(Command::Allowance { client, gpu: id, seq, bytes });
        }
    }

    /// Allows memory that stays on the GPU anyway: pinned memory, and all memory of a client that reconnected to a new
    /// scheduler. Neither raises the charge.
    pub(crate) fn allow_resident(&mut self, client: ClientId, id: GpuId) {
        let Some(account) = self.account(client, id) else { return };
        if account.awaits_measurement() {
            return;
        }
        let least = if account.is_new() { account.report.mapped } else { account.report.pinned };
        if account.allowance < least {
            self.allow(client, id, least);
        }
    }

    /// Whether a client runs without its memory on the GPU: its pages fault in and out.
    pub(crate) fn faults_in(&self, client: ClientId, id: GpuId) -> bool {
        self.settings.anti_thrash == AntiThrash::Off
            && self.attachment(client, id).is_some_and(|attachment| attachment.engine == Engine::Managed)
    }

    /// The bytes that a client must be allowed in order to run on a GPU: its demand and its shortfall, up to the
    /// capacity.
    pub(crate) fn need(&self, client: ClientId, id: GpuId) -> u64 {
        let is_off = self.sleep.is_held_off(client) && self.gpus.hold(client, id).is_none();
        let Some(gpu) = self.gpus.get(id).filter(|_| !is_off && !self.faults_in(client, id)) else { return 0 };
        gpu.account(client)
            .map_or(0, |account| account.report.demand)
            .saturating_add(self.shortfall(client, id))
            .min(gpu.capacity(&self.settings))
    }

    /// Raises an allowance towards the need as far as bytes are free, without evicting. Returns the bytes still
    /// lacking. `reserved_ahead` bytes, first of the free ones and then of the bytes being freed, are reserved for
    /// other clients.
    pub(crate) fn credit(&mut self, client: ClientId, id: GpuId, reserved_ahead: u64) -> u64 {
        let need = self.need(client, id);
        let Some(gpu) = self.gpus.get(id) else { return 0 };
        let Some(account) = gpu.account(client) else { return 0 };
        if account.awaits_measurement() {
            return need; // an allowance below its present memory would make it evict
        }
        // Free bytes that were not given to the clients before it are unverified for them, or too few: they stay
        // reserved for them.
        let reserved = reserved_ahead.min(gpu.free(&self.settings));
        let free = self.free_for(client, id).saturating_sub(reserved);
        // Bytes of the client that are being evicted are still charged to it: they may stay, unless they are reserved
        // for others.
        let unreserved = gpu.ledger.evicting().saturating_sub(reserved_ahead - reserved);
        let leaving = account.charge.saturating_sub(account.allowance).min(unreserved);
        let reach = account.allowance.saturating_add(leaving).saturating_add(free).min(need);
        if reach > account.allowance && (reach == need || reach - account.allowance >= CREDIT_STEP) {
            self.allow(client, id, reach);
        }
        need.saturating_sub(self.account(client, id).map_or(0, |account| account.allowance))
    }

    /// Allows holders that keep growing to map more than they need, as far as bytes are free, so that their allocations
    /// wait for no message. The excess is taken back when other clients lack bytes
    /// ([`take_back_ahead`](Self::take_back_ahead)).
    pub(crate) fn credit_ahead(&mut self, id: GpuId) {
        let is_idle = |gpu: &Gpu| gpu.contexts.is_empty() && gpu.reservations.is_empty();
        if !self.gpus.get(id).is_some_and(is_idle) {
            return;
        }
        for client in self.gpus.holders(id).collect::<Vec<_>>() {
            let keeps_growing =
                |attachment: &Attachment| attachment.keeps_growing(self.now) && attachment.engine == Engine::Swap;
            let grows_now = self.attachment(client, id).is_some_and(keeps_growing);
            let is_running = self.gpus.hold(client, id).is_some_and(|hold| hold.revoked.is_none());
            let allowance = self.account(client, id).map_or(0, |account| account.allowance);
            let limit = self.quota.limit(client, id).map_or(0, |limit| limit.limit);
            let ahead = self.ahead(client, id);
            // Most of the free bytes are left to others that grow, or create a context.
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

    /// Bytes that a client may map beyond its need.
    pub(crate) fn ahead(&self, client: ClientId, id: GpuId) -> u64 {
        let ahead = self.account(client, id).map_or(0, Account::ahead);
        if ahead == 0 { 0 } else { ahead.saturating_sub(self.shortfall(client, id)) }
    }
}
