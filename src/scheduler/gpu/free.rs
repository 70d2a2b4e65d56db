//! Bytes that are free for a client, and requests to measure frees that no measurement has confirmed.

use super::{Account, Context, Gpu};
use crate::{api::*, effects::Effects, timers::Wake};

impl Gpu {
    /// Unverified bytes that a client cannot use: the unverified bytes of other tenants' clients.
    /// During a restore, the result includes the bytes of the client's own tenant, because the
    /// restore lacks memory if such bytes are still in use.
    pub fn unverified_for(&self, cx: Context, client: ClientId) -> u64 {
        let Some(state) = cx.clients.get(&client) else { return 0 };
        let is_restoring = self.returning.is_some_and(|returning| returning.restored.is_some());
        match is_restoring || !self.overdue.is_empty() {
            true => self.ledger.unverified(),
            false => self.ledger.unverified_for(state.tenant),
        }
    }

    /// Bytes that are free for a client: not charged, reserved or unverified.
    pub fn free_for(&self, cx: Context, client: ClientId) -> u64 {
        self.free(cx.settings).saturating_sub(self.unverified_for(cx, client))
    }

    /// Bytes that will be available to these clients without further eviction: bytes being freed,
    /// and free bytes. Some free bytes are not credited yet, because they are too few or
    /// unverified. Requests a measurement of unverified bytes.
    pub fn arriving(&mut self, cx: Context, fx: &mut Effects, clients: &[ClientId]) -> u64 {
        for client in clients {
            self.request_verification(cx, fx, *client);
        }
        self.ledger.evicting().saturating_add(self.free(cx.settings))
    }

    /// Requests a measurement of the bytes that are unverified for a waiting client. Returns the
    /// number of unverified bytes.
    pub fn request_verification(&mut self, cx: Context, fx: &mut Effects, client: ClientId) -> u64 {
        let unverified = self.unverified_for(cx, client);
        if unverified > 0 {
            self.request_any_verification(fx);
        }
        unverified
    }

    /// Requests a measurement of unverified bytes that were never measured. Bytes that a
    /// measurement has found are measured again periodically in any case.
    pub fn request_any_verification(&mut self, fx: &mut Effects) {
        if !self.measurement_requested && self.accounts().any(|account| account.frees.is_unmeasured()) {
            self.measure(fx);
        }
    }

    /// Requests a measurement, unless one is pending.
    pub fn measure(&mut self, fx: &mut Effects) {
        if !std::mem::replace(&mut self.measurement_requested, true) {
            fx.command(Command::Measure { gpu: self.id });
        }
    }

    /// Requests a measurement even if one is pending. The pending one may have begun too early, or
    /// its answer may never arrive.
    pub fn measure_again(&mut self, fx: &mut Effects) {
        self.measurement_requested = false;
        self.measure(fx);
    }

    /// Sets the time at which the next unverified bytes expire.
    pub fn schedule_verification(&self, fx: &mut Effects) {
        fx.wake(Wake::Verification(self.id), self.accounts().filter_map(Account::expires).min());
    }

    /// Expires unverified frees that are older than their timeout.
    pub fn expire_unverified(&mut self, now: Time, fx: &mut Effects) {
        self.measurement_requested = false;
        for client in self.attachments.keys().copied().collect::<Vec<_>>() {
            let is_present = self.change_account(fx, client, |account| {
                account.measurement_is_late(now);
                account.frees.expire(now)
            });
            if is_present == Some(true) {
                fx.command(Command::EvictionBlocked { client, gpu: self.id, why: EvictionBlock::Unfreed });
            }
        }
        self.schedule_verification(fx);
        fx.touch(self.id);
    }
}
