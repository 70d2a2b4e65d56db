//! The account of a GPU's memory: what follows from a change of it, and reporting it to the scheduler.

use super::Gpu;
use crate::{
    connection::{self, outbox},
    driver::{self, context::with_current, types::*},
    env::trace::trace,
    gate::closed,
    memory::account::Account,
};
use core::sync::atomic::Ordering;
use nvshare_wire::{ClientMessage, client as wire};

impl Gpu {
    /// Tells the scheduler how the account of bytes stands. Called with the space locked where it just changed, so that
    /// the newest report is the last.
    pub fn report(&self, account: &Account) {
        self.send_report(account, u64::MAX);
    }

    /// The same with what is free on the whole GPU just now: where the scheduler has no NVML, it learns from this what
    /// others use.
    pub fn report_measured(&self, account: &Account, context: CUcontext) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid places.
        let result = with_current(context as usize, || unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) });
        self.send_report(account, if result == Ok(SUCCESS) { free as u64 } else { u64::MAX });
    }

    fn send_report(&self, account: &Account, device_free: u64) {
        // Not before it: of a GPU that it does not know, a scheduler wants to hear nothing.
        let sent = self.is_introduced()
            && outbox::flush()
            && connection::send(&ClientMessage::Memory {
                slot: self.index,
                ack: account.ack,
                demand: account.demand + account.pinned,
                mapped: account.mapped + account.pinned,
                swapped: account.swapped,
                pinned: account.pinned + if account.unevictable { account.mapped } else { 0 },
                device_free,
                limit_ack: account.limit_seq,
                host: account.swapped + account.host_cache,
                counts: account.counts,
            });
        self.unreported.store(!sent, Ordering::SeqCst);
    }

    /// Whether the newest state of the account has yet to reach the scheduler.
    pub fn is_unreported(&self) -> bool {
        self.unreported.load(Ordering::SeqCst)
    }

    /// Nothing of the program can move any more: it gives this GPU work that passes no gate.
    pub fn make_unevictable(&self) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        if !core::mem::replace(&mut guard.account.unevictable, true) {
            trace!("GPU {}: work comes unseen from now on, so its memory stays", self.index);
            if self.is_introduced() {
                connection::send(&ClientMessage::Stuck {
                    gpus: 1 << self.index,
                    reason: wire::StuckReason::UntrackedWork,
                });
            }
            self.report(&guard.account);
        }
    }

    /// The program has more or less memory that cannot move.
    pub fn pin(&self, change: impl FnOnce(u64) -> u64) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        let before = guard.account;
        guard.account.pinned = change(before.pinned);
        let after = guard.account;
        self.account_changed(&before, &after);
    }

    /// An allocation here fails since there is to be no memory for it.
    pub fn count_refusal(&self) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        let before = guard.account;
        guard.account.counts.refused += 1;
        let after = guard.account;
        self.account_changed(&before, &after);
    }

    /// The scheduler says that so many bytes cannot be mapped at once, which this client needs.
    pub fn deny_mapping(&self, bytes: u64) {
        self.unmappable.store(bytes, Ordering::SeqCst);
    }

    /// Whether memory that was allocated and never used will not come: what waits for it fails with out of memory.
    #[cold]
    pub fn is_mapping_denied(&self) -> bool {
        let bytes = self.unmappable.load(Ordering::SeqCst);
        if bytes == 0 {
            return false;
        }
        let needs = |account: Account| account.demand + account.pinned - account.freeing;
        let is = self.account().is_some_and(|account| account.exceeds_peak() && needs(account) >= bytes);
        if !is {
            self.forget_denial(bytes);
        }
        is
    }

    /// That denial has been acted on, or no longer holds.
    fn forget_denial(&self, bytes: u64) {
        let _ = self.unmappable.compare_exchange(bytes, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// An allocation that will not come was undone, or the scheduler has something else to say.
    pub fn forget_denials(&self) {
        self.forget_denial(self.unmappable.load(Ordering::SeqCst));
    }

    /// Before the lock's part of the gate opens: the memory's part must be as the account is.
    pub fn close_if_lacking(&self) {
        if let Some(space) = self.space()
            && !space.lock().account.can_run()
        {
            self.gate.close(closed::MEMORY);
        }
    }

    /// After the account changed by an allocation or a free: closes the gate if memory is lacking, and reports. Only the
    /// client's thread opens it again, which knows of the copies under way.
    pub fn account_changed(&self, before: &Account, after: &Account) {
        if !after.can_run() {
            self.gate.close(closed::MEMORY);
            if after.may_grow() {
                connection::wake(); // the scheduler has nothing more to say: mapping failed where it should not have
            }
        } else if self.gate.is_closed_for(closed::MEMORY) {
            connection::wake();
        }
        if before != after {
            self.report(after);
            if self.is_unreported() && connection::is_connected() {
                connection::wake();
            }
        }
    }
}
