//! The effects of a change of a GPU's memory account: closing the gate, and reporting to the scheduler.

use super::Gpu;
use crate::{
    connection::{self, outbox},
    driver::{self, context::with_current, types::*},
    env::trace::trace,
    gate::closed,
    memory::account::Account,
    sys::rank::{self, Rank},
};
use core::sync::atomic::Ordering;
use nvshare_wire::{ClientMessage, client as wire};

impl Gpu {
    /// Reports the account to the scheduler. Called after a change, with the space still locked, so that
    /// the last report has the latest state.
    pub fn report(&self, account: &Account) {
        self.send_report(account, u64::MAX);
    }

    /// Reports the account and the bytes that are free on the device. A scheduler without NVML
    /// computes the memory use of other programs from the free bytes. The caller holds the mover's
    /// lock, so that the context is not destroyed.
    pub fn report_measured(&self, account: &Account, context: CUcontext) {
        debug_assert!(rank::holds(Rank::Mover), "the program may destroy the context at any time");
        let (mut free, mut total) = (0, 0);
        // SAFETY: `free` and `total` outlive the call.
        let result = with_current(context as usize, || unsafe { driver::cuMemGetInfo_v2(&mut free, &mut total) });
        self.send_report(account, if result == Ok(SUCCESS) { free as u64 } else { u64::MAX });
    }

    fn send_report(&self, account: &Account, device_free: u64) {
        // The scheduler rejects reports about a GPU that has not been introduced.
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
                host: account.host(),
                counts: account.counts,
                in_file: account.in_file,
            });
        self.unreported.store(!sent, Ordering::SeqCst);
    }

    /// Whether the latest state of the account has not been sent yet.
    pub fn is_unreported(&self) -> bool {
        self.unreported.load(Ordering::SeqCst)
    }

    /// Keeps all memory on the GPU permanently, because the program submits work that passes no gate.
    pub fn make_unevictable(&self) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        if !core::mem::replace(&mut guard.account.unevictable, true) {
            trace!("GPU {}: keeping memory on the GPU, because some work bypasses the gate", self.index);
            self.explain_unevictable();
            self.report(&guard.account);
        }
    }

    /// Tells the scheduler why all memory stays on the GPU. If the GPU has not been introduced yet, its
    /// introduction calls this function again.
    pub(super) fn explain_unevictable(&self) {
        if self.is_introduced() {
            let reason = wire::StuckReason::UntrackedWork;
            connection::send(&ClientMessage::Stuck { gpus: 1 << self.index, reason });
        }
    }

    /// Changes the number of pinned bytes.
    pub fn pin(&self, change: impl FnOnce(u64) -> u64) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        let before = guard.account;
        guard.account.pinned = change(before.pinned);
        let after = guard.account;
        self.account_changed(&before, &after);
    }

    /// Counts an allocation that fails for lack of memory.
    pub fn count_refusal(&self) {
        let Some(space) = self.space() else { return };
        let mut guard = space.lock();
        let before = guard.account;
        guard.account.counts.refused += 1;
        let after = guard.account;
        self.account_changed(&before, &after);
    }

    /// Records that, according to the scheduler, this client's `bytes` bytes cannot be mapped together.
    pub fn deny_mapping(&self, bytes: u64) {
        self.unmappable.store(bytes, Ordering::SeqCst);
    }

    /// Whether memory that was allocated but never used cannot be mapped. Calls that wait for this memory
    /// then fail with `CUDA_ERROR_OUT_OF_MEMORY`.
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

    /// Whether contents of this GPU's memory are lost. Calls that could use the contents then fail,
    /// as after an uncorrectable error of the GPU's memory. No process recovers from such an error
    /// either.
    #[cold]
    pub fn has_lost_memory(&self) -> bool {
        self.account().is_some_and(|account| account.is_lost)
    }

    /// Forgets this denial, which has been handled or is no longer valid.
    fn forget_denial(&self, bytes: u64) {
        let _ = self.unmappable.compare_exchange(bytes, 0, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// Forgets any denial, because the denied allocation was undone or the scheduler has sent a new
    /// answer.
    pub fn forget_denials(&self) {
        self.forget_denial(self.unmappable.load(Ordering::SeqCst));
    }

    /// Called before the gate opens for the lock. Closes the gate for memory if memory is missing.
    pub fn close_if_lacking(&self) {
        if let Some(space) = self.space()
            && !space.lock().account.can_run()
        {
            self.gate.close(closed::MEMORY);
        }
    }

    /// Called after an allocation or a free changed the account. Closes the gate if memory is missing, and
    /// reports the account. Only the client's thread, which knows the copies in flight, opens the gate
    /// again.
    pub fn account_changed(&self, before: &Account, after: &Account) {
        if !after.can_run() {
            self.gate.close(closed::MEMORY);
            if after.may_grow() {
                connection::wake(); // mapping failed, and no message of the scheduler will follow
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
