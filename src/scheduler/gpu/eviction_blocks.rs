//! Memory that cannot be evicted although its client does not run. The reason is a full host, a
//! broken context, or a client that does not answer. The memory counts as unevictable, and the
//! scheduler evicts memory of other clients instead.

use super::{Account, ClientLock, Context, Gpu, Hold, ledger::Evictability};
use crate::{api::*, effects::Effects, timers::Wake};
use std::time::Duration;

/// The first and the longest delay before a client is asked again to evict. The delay doubles with
/// each failure.
const AGAIN: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(10));
/// An eviction is late if it makes no progress for this long, or for `LATE_TIMES` times its
/// expected duration, whichever is longer.
const LATE: Duration = Duration::from_secs(3);
const LATE_TIMES: u32 = 4;
/// How long an undrainable holder may leave allowed memory unused. A library waits no longer than this
/// until it may map the memory of an allocation (`BACKING_TIMEOUT` in `preload/src/calls/allocate.rs`).
const UNUSED: Duration = Duration::from_secs(60);

impl Gpu {
    /// Why none of a client's memory can be evicted now. `None`: the memory can be evicted.
    pub fn eviction_block(&self, cx: Context, client: ClientId) -> Option<EvictionBlock> {
        let state = cx.clients.get(&client)?;
        let attachment = self.attachments.get(&client)?;
        match attachment.eviction_block {
            _ if cx.sleep.is_foreign(client) => Some(EvictionBlock::Foreign),
            _ if state.stopped => Some(EvictionBlock::Stopped),
            _ if self.hold(client).is_some_and(Hold::is_undrainable) => Some(EvictionBlock::Undrainable),
            block => block,
        }
    }

    /// Updates the client's state in the ledger after its hold or its eviction block has changed,
    /// and marks the GPU.
    pub fn lock_changed(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        fx.touch(self.id);
        let block = self.eviction_block(cx, client);
        let Some(attachment) = self.attachments.get_mut(&client) else { return };
        let now = match block {
            Some(_) => Evictability::Unevictable,
            None if attachment.lock.hold.is_some() => Evictability::Running,
            None => Evictability::Idle(attachment.lock.last_run),
        };
        self.ledger.set_state(client, &mut attachment.entry, now);
    }

    /// Handles a client's report that it has abandoned an eviction.
    pub fn cannot_evict(&mut self, cx: Context, fx: &mut Effects, client: ClientId, why: EvictionBlock) {
        let Some(attachment) = self.attachments.get_mut(&client) else { return };
        attachment.eviction_backoff = (attachment.eviction_backoff * 2).clamp(AGAIN.0, AGAIN.1);
        let until = attachment.eviction_backoff;
        self.block_eviction(cx, fx, client, why);
        fx.wake(Wake::Eviction(client, self.id), Some(cx.now + until));
        self.stop_evicting(cx, fx, client);
        fx.touch(self.id);
    }

    /// Raises a client's allowance to its present memory. The charge does not rise.
    pub fn stop_evicting(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let Some(account) = self.account(client) else { return };
        let mapped = account.report.mapped;
        if account.allowance < mapped {
            self.allow(cx, fx, client, mapped);
        }
    }

    fn block_eviction(&mut self, cx: Context, fx: &mut Effects, client: ClientId, why: EvictionBlock) {
        let Some(attachment) = self.attachments.get_mut(&client) else { return };
        let before = attachment.eviction_block.replace(why);
        self.lock_changed(cx, fx, client);
        if before != Some(why) {
            fx.command(Command::EvictionBlocked { client, gpu: self.id, why });
        }
    }

    /// Ends the block on evicting a client's memory.
    pub fn unblock_eviction(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let attachment = self.attachments.get_mut(&client);
        if attachment.is_some_and(|attachment| attachment.eviction_block.take().is_some()) {
            self.lock_changed(cx, fx, client);
        }
    }

    /// Updates the block after a report. The block of a late eviction ends once the eviction
    /// progresses or is complete.
    pub fn update_eviction_block(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        let Some(attachment) = self.attachments.get_mut(&client) else { return };
        let account = attachment.entry.account();
        let (done, fits) = (account.eviction.is_none(), account.report.mapped <= account.allowance);
        let progresses = account.eviction.as_ref().is_some_and(|eviction| eviction.progress == cx.now);
        let late = attachment.eviction_block == Some(EvictionBlock::Late);
        if done && fits && attachment.eviction_block.is_none() {
            attachment.eviction_backoff = Duration::ZERO;
        }
        if late && (done || progresses) {
            self.unblock_eviction(cx, fx, client);
        }
    }

    /// When the client's pending eviction will be late. `None`: no eviction is pending, or the
    /// eviction is already blocked.
    pub fn late_at(&self, client: ClientId) -> Option<Time> {
        let attachment = self.attachments.get(&client)?;
        let account = attachment.account();
        let eviction = account.eviction.as_ref().filter(|_| attachment.eviction_block.is_none())?;
        let rest = account.report.mapped.saturating_sub(account.allowance);
        Some(eviction.progress.saturating_add(LATE.max(self.rates.moving(rest).saturating_mul(LATE_TIMES))))
    }

    /// Blocks the eviction of a client that is late.
    pub fn eviction_is_late(&mut self, cx: Context, fx: &mut Effects, client: ClientId) {
        self.charge_as_known(cx, fx, client, false);
        self.block_eviction(cx, fx, client, EvictionBlock::Late);
    }

    /// Whether an undrainable holder has left a part of its allowed memory unused for [`UNUSED`].
    /// Further raises don't restart that time, because a holder could ask for a little more each
    /// minute. So a holder whose memory arrives in parts can lose it too.
    fn hoards(&self, now: Time, client: ClientId) -> bool {
        let revoked = self.hold(client).and_then(|hold| hold.revoked);
        let unused = self.account(client).and_then(Account::unused_since);
        revoked.zip(unused).is_some_and(|(revoked, unused)| revoked.first.max(unused) + UNUSED <= now)
    }

    /// Lowers the charge of a client to the client's known memory, if the client does not answer an
    /// eviction or a revoke, or hoards memory. Otherwise the client could withhold bytes that it is
    /// allowed but has not mapped. `is_measured`: the client was just measured. Otherwise what it had at
    /// its last measurement says nothing about the memory that it uses now.
    pub fn charge_as_known(&mut self, cx: Context, fx: &mut Effects, client: ClientId, is_measured: bool) {
        let now = cx.now;
        // Another program has checkpointed the client, and its restore needs the whole charge.
        let Some(account) = self.account(client).filter(|_| !cx.sleep.is_foreign(client)) else { return };
        let is_undrainable = self.hold(client).is_some_and(Hold::is_undrainable);
        let may_need_memory = self.lock(client).is_some_and(ClientLock::may_need_memory);
        let hoards = is_measured && may_need_memory && self.hoards(now, client);
        let has = match is_undrainable {
            true if may_need_memory && !hoards => None,
            true => account.less_than_charged(),
            false => account.unanswered(now),
        };
        let Some(has) = has else { return };
        let allowance = account.allowance;
        if let Some(attachment) = self.attachments.get_mut(&client).filter(|_| hoards) {
            attachment.lock.hoards = true;
        }
        if has < allowance {
            self.allow(cx, fx, client, has);
        }
        self.change_account(fx, client, |account| account.charge_as_known(now));
        fx.touch(self.id);
    }
}
