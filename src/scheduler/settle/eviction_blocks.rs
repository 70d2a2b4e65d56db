//! Memory that cannot leave its GPU although its client does not run: the host is full, a context is broken, or the
//! client does not answer. It counts as unevictable, so other clients are asked for theirs, until it can leave again.

use crate::{
    api::*,
    gpu::{ClientLock, Hold},
    machine::Machine,
    timers::Wake,
};
use std::time::Duration;

/// A client that could not evict is asked again after the first of these times; the delay doubles with each attempt, up
/// to the second.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// An eviction without progress is late after this, or after `LATE_TIMES` times its expected duration if that is
/// longer.
const LATE: Duration = Duration::from_secs(3);
const LATE_TIMES: u32 = 4;

impl Machine {
    /// Why no memory of a client can leave a GPU now. `None`: it can.
    pub(crate) fn eviction_block(&self, client: ClientId, id: GpuId) -> Option<EvictionBlock> {
        let state = self.clients.get(&client)?;
        let attachment = self.attachment(client, id)?;
        match attachment.eviction_block {
            _ if state.stopped => Some(EvictionBlock::Stopped),
            _ if self.gpus.hold(client, id).is_some_and(Hold::is_undrainable) => Some(EvictionBlock::Undrainable),
            block => block,
        }
    }

    /// Handles a client's report that it could not carry out an eviction and has given it up.
    pub(crate) fn cannot_evict(&mut self, client: ClientId, gpus: &GpuSet, why: EvictionBlock) {
        for id in gpus {
            let Some(attachment) = self.attachment_mut(client, *id) else { continue };
            attachment.eviction_backoff = (attachment.eviction_backoff * 2).clamp(AGAIN.0, AGAIN.1);
            let until = attachment.eviction_backoff;
            self.block_eviction(client, *id, why);
            self.effects.wake(Wake::Eviction(client, *id), Some(self.now + until));
            self.stop_evicting(client, *id);
            self.touch(*id);
        }
    }

    /// Allows a client its present memory, so that the charge does not rise.
    pub(crate) fn stop_evicting(&mut self, client: ClientId, id: GpuId) {
        let Some(account) = self.account(client, id) else { return };
        let mapped = account.report.mapped;
        if account.allowance < mapped {
            self.allow(client, id, mapped);
        }
    }

    fn block_eviction(&mut self, client: ClientId, id: GpuId, why: EvictionBlock) {
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        let before = attachment.eviction_block.replace(why);
        self.lock_changed(client, id);
        if before != Some(why) {
            self.effects.command(Command::EvictionBlocked { client, gpu: id, why });
        }
    }

    /// Ends the block on evicting a client's memory.
    pub(crate) fn unblock_eviction(&mut self, client: ClientId, id: GpuId) {
        if self.attachment_mut(client, id).is_some_and(|attachment| attachment.eviction_block.take().is_some()) {
            self.lock_changed(client, id);
        }
    }

    /// Updates the block after a report: an eviction that was late, or failed before, may be complete.
    pub(crate) fn update_eviction_block(&mut self, client: ClientId, id: GpuId) {
        let now = self.now;
        let Some(account) = self.account(client, id) else { return };
        let (done, fits) = (account.eviction.is_none(), account.report.mapped <= account.allowance);
        let progresses = account.eviction.as_ref().is_some_and(|eviction| eviction.progress == now);
        let Some(attachment) = self.attachment_mut(client, id) else { return };
        let late = attachment.eviction_block == Some(EvictionBlock::Late);
        if done && fits && attachment.eviction_block.is_none() {
            attachment.eviction_backoff = Duration::ZERO;
        }
        if late && (done || progresses) {
            self.unblock_eviction(client, id);
        }
    }

    /// When the eviction that a client was asked for will be late. `None`: it was not asked for one, or is blocked
    /// already.
    pub(crate) fn late_at(&self, client: ClientId, id: GpuId) -> Option<Time> {
        let (attachment, gpu) = (self.attachment(client, id)?, self.gpus.get(id)?);
        let account = gpu.account(client)?;
        let eviction = account.eviction.as_ref().filter(|_| attachment.eviction_block.is_none())?;
        let rest = account.report.mapped.saturating_sub(account.allowance);
        Some(eviction.progress.saturating_add(LATE.max(gpu.rates.moving(rest).saturating_mul(LATE_TIMES))))
    }

    /// Blocks an eviction that is late.
    pub(crate) fn eviction_is_late(&mut self, client: ClientId, id: GpuId) {
        self.charge_as_known(client, id);
        self.block_eviction(client, id, EvictionBlock::Late);
    }

    /// Lowers the charge of a client that does not answer an eviction or a revoke to its known memory: it cannot keep
    /// allowances that it has not mapped from other clients.
    pub(crate) fn charge_as_known(&mut self, client: ClientId, id: GpuId) {
        let now = self.now;
        let Some(account) = self.account(client, id) else { return };
        let is_undrainable = self.gpus.hold(client, id).is_some_and(Hold::is_undrainable);
        let has = match is_undrainable {
            true if self.gpus.lock(client, id).is_some_and(ClientLock::may_need_memory) => None,
            true => account.less_than_charged(),
            false => account.unanswered(now),
        };
        let Some(has) = has else { return };
        if has < account.allowance {
            self.allow(client, id, has);
        }
        self.change_account(client, id, |account| account.charge_as_known(now));
        self.touch(id);
    }
}
