//! Raises allowances: up to the clients' needs, and beyond their needs for holders that keep
//! growing.

use super::{Context, Gpu};
use crate::{api::*, effects::Effects};

/// A smaller credit is sent only if it meets the client's need. Otherwise it is not worth a
/// message.
const CREDIT_STEP: u64 = 2 << 20;
/// Bytes that a growing holder may map beyond its need. A holder allocates about this much within a
/// few milliseconds. The credit is at most one part in `AHEAD_PART` of the free bytes.
const AHEAD: u64 = 1 << 30;
const AHEAD_PART: u64 = 4;

impl Gpu {
    /// Sets an allowance and sends it to the client.
    pub fn allow(&mut self, cx: Context, fx: &mut Effects, client: ClientId, bytes: u64) {
        let messages = self.change_account(fx, client, |account| account.set(cx.now, bytes));
        for (seq, bytes) in messages.unwrap_or_default() {
            fx.command(Command::Allowance { client, gpu: self.id, seq, bytes });
        }
    }

    /// Allows memory that stays on the GPU anyway: a client's pinned memory, or all memory of a
    /// client that reconnected to a new scheduler. The charge does not rise.
    pub fn allow_resident(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        self.charge_checkpointed(cx, fx, client);
        let Some(account) = self.account(client) else { return };
        if account.awaits_measurement() {
            return;
        }
        let least = if account.is_new() { account.report.mapped } else { account.report.pinned };
        if account.allowance < least {
            self.allow(cx, fx, client, least);
        }
    }

    /// Charges a client that another program has checkpointed for the memory that its restore maps. No
    /// measurement can show this memory, and measurements may have refuted the client's report before the
    /// checkpoint was noticed. So the report is believed up to the memory that was once measured, or
    /// entirely if this scheduler started after the checkpoint, and as far as the memory fits beside
    /// memory that cannot be evicted.
    pub fn charge_checkpointed(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let is_checkpointed = cx.sleep.is_foreign(client) && self.away.contains_key(&client);
        let Some(account) = self.account(client).filter(|_| is_checkpointed) else { return };
        let claimed = account.claimed().min(if account.is_new() { u64::MAX } else { account.seen() });
        let others = self.ledger.unevictable().saturating_sub(self.unevictable_of(client));
        let limits = [cx.rules.memory_max(client, self.total), cx.rules.env_memory_max(client, self.total)];
        let limit = limits.into_iter().flatten().min().unwrap_or(u64::MAX);
        let bytes = claimed.min(limit).min(self.capacity(cx.settings).saturating_sub(others));
        if bytes > account.charge {
            self.allow(cx, fx, client, bytes);
        }
    }

    /// Takes back all evictable memory of a client.
    pub fn take_all(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let evictable = self.account(client).filter(|account| account.evictable() > 0);
        if let Some(pinned) = evictable.map(|account| account.report.pinned) {
            self.allow(cx, fx, client, pinned);
        }
    }

    /// The bytes that a client must be allowed in order to run: its demand plus its shortfall, up
    /// to the capacity. If its managed memory exceeds the GPU, memory that other clients keep there is
    /// left out.
    pub fn need(&self, cx: Context, client: ClientId) -> u64 {
        let (wanted, capacity) = (self.wanted(cx, client), self.capacity(cx.settings));
        if wanted > capacity && cx.rules.may_exceed_gpu(client) {
            return capacity.saturating_sub(self.pinned_by_others(client));
        }
        wanted.min(capacity)
    }

    /// The need, which may exceed the capacity.
    pub fn wanted(&self, cx: Context, client: ClientId) -> u64 {
        let Some(attachment) = self.attachments.get(&client) else { return 0 };
        let is_off = attachment.lock.hold.is_none() && cx.sleep.is_held_off(client);
        if is_off || attachment.faults_in(cx.settings) {
            return 0;
        }
        attachment.account().report.demand.saturating_add(self.shortfall(cx, client, attachment))
    }

    /// Raises an allowance towards the need as far as bytes are free, without evicting memory.
    /// Returns the bytes still lacking. `reserved_ahead` bytes are reserved for other clients: free
    /// bytes first, then bytes being freed.
    pub fn credit(&mut self, cx: Context, fx: &mut Effects, client: ClientId, reserved_ahead: u64) -> u64 {
        let need = self.need(cx, client);
        let Some(account) = self.account(client) else { return 0 };
        if account.awaits_measurement() {
            return need; // an allowance below the client's present memory would cause an eviction
        }
        // The earlier clients could not use these free bytes yet, because the bytes are unverified
        // or too few. So the bytes stay reserved for those clients.
        let reserved = reserved_ahead.min(self.free(cx.settings));
        let free = self.free_for(cx, client).saturating_sub(reserved);
        // The client is still charged for its bytes that are being evicted. The client may keep
        // these bytes, unless they are reserved for other clients.
        let unreserved = self.ledger.evicting().saturating_sub(reserved_ahead - reserved);
        let leaving = account.charge.saturating_sub(account.allowance).min(unreserved);
        let reach = account.allowance.saturating_add(leaving).saturating_add(free).min(need);
        if reach > account.allowance && (reach == need || reach - account.allowance >= CREDIT_STEP) {
            self.allow(cx, fx, client, reach);
        }
        need.saturating_sub(self.account(client).map_or(0, |account| account.allowance))
    }

    /// Allows growing holders to map more than they need, as far as bytes are free. The holders'
    /// allocations then need not wait for a message. The excess is taken back when other clients
    /// lack bytes ([`take_back_ahead`](Self::take_back_ahead)).
    pub fn credit_ahead(&mut self, cx: Context, fx: &mut Effects) {
        if !(self.contexts.is_empty() && self.reservations.is_empty()) {
            return;
        }
        for client in self.holders().collect::<Vec<_>>() {
            let Some(attachment) = self.attachments.get(&client) else { continue };
            let grows_now = attachment.keeps_growing(cx.now) && attachment.engine == Engine::Swap;
            let is_running = self.hold(client).is_some_and(|hold| hold.revoked.is_none());
            let allowance = attachment.account().allowance;
            let limit = cx.quota.limit(client, self.id).map_or(0, |limit| limit.limit);
            let ahead = self.ahead(cx, client);
            // Leaves most of the free bytes to other clients that grow or create a context.
            let free = self.free_for(cx, client);
            let most = AHEAD.min(free.saturating_add(ahead) / AHEAD_PART);
            if !(grows_now && is_running) || ahead > most / 2 {
                continue;
            }
            let reach = allowance.saturating_add((most - ahead).min(free)).min(limit);
            if reach >= allowance.saturating_add(CREDIT_STEP) {
                self.allow(cx, fx, client, reach);
            }
        }
    }

    /// Bytes that a client may map beyond its need.
    pub fn ahead(&self, cx: Context, client: ClientId) -> u64 {
        let Some(attachment) = self.attachments.get(&client) else { return 0 };
        let ahead = attachment.account().ahead();
        if ahead == 0 { 0 } else { ahead.saturating_sub(self.shortfall(cx, client, attachment)) }
    }
}
