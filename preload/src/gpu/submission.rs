//! Records the stream of each submission. The next submission to the same stream then passes the gate
//! with a few loads.

use super::Gpu;
use crate::{
    driver::types::*,
    gate::{self, Gate, epoch, threads::Slot},
    work::{self, Work, capture},
};
use core::sync::atomic::Ordering;
use nvshare_wire::MAX_SLOTS;

impl Gpu {
    /// Called before the program creates or uses a stream that synchronizes with the legacy stream.
    #[cold]
    pub fn expect_blocking_streams() {
        if gate::is_active() && work::first_blocking_stream() {
            super::attached().for_each(|gpu| gpu.work.mark_legacy_streams());
        }
    }

    /// Records the stream of a submission. Called inside the gate, after the driver has accepted the call.
    fn note(&'static self, slot: &Slot, stream: CUstream) {
        let epoch = epoch::now();
        self.work.note(stream);
        self.work.renew_marks(slot);
        let name = work::name_of(stream);
        // Only the thread itself can record points in its per-thread stream. So each submission to
        // that stream takes the slow path, which records a point.
        let may_last = stream != STREAM_PER_THREAD
            && name.is_some()
            && !work::is_marked_at_once(stream)
            && !capture::any()
            && !self.work.is_full()
            && self.work.peers() == 0
            && gate::is_active();
        slot.stream.set(name.unwrap_or_default());
        slot.gpu.set(core::ptr::from_ref(self).cast());
        slot.way.set(if may_last { epoch } else { epoch::NONE });
    }

    /// Whether this thread's last launch was to a stream with this name, in the current epoch.
    #[inline(always)]
    pub fn is_as_before(slot: &Slot, name: usize) -> bool {
        slot.is_current() && slot.stream.get() == name
    }

    /// Returns the GPU of this thread's last launch.
    ///
    /// # Safety
    /// The thread has launched before: [`is_as_before`](Self::is_as_before) has returned `true`.
    #[inline(always)]
    pub unsafe fn of_last_launch(slot: &Slot) -> &'static Self {
        // SAFETY: `note` has set the pointer to an entry of the static table of GPUs.
        unsafe { &*slot.gpu.get().cast::<Self>() }
    }

    /// Ends a call that submitted `weight` units of work. Leaves the gate and counts the work. Returns
    /// `result`, so that the caller need not save it across this call.
    #[cold]
    #[inline(never)]
    pub fn leave(&'static self, slot: &Slot, weight: u32, stream: CUstream, result: CUresult) -> CUresult {
        if weight > 0 {
            self.note(slot, stream);
        }
        Gate::leave(self.index, slot);
        if weight > 0 && Work::is_mark_due(slot, weight) {
            return self.mark(slot, stream, result);
        }
        result
    }

    /// Ends a call for which [`is_as_before`](Self::is_as_before) returned `true`.
    ///
    /// # Safety
    /// [`is_as_before`](Self::is_as_before) returned `true` for the call, which then entered the gate of
    /// the last launch's GPU.
    #[inline(always)]
    pub unsafe fn leave_as_before(
        slot: &Slot,
        weight: u32,
        stream: impl Fn() -> CUstream,
        result: CUresult,
    ) -> CUresult {
        // SAFETY: the thread has launched before: the caller's contract. A nested call does not change the
        // pointer.
        let gpu = || unsafe { Self::of_last_launch(slot) };
        if weight > 0 && !slot.is_current() {
            return gpu().leave(slot, weight, stream(), result);
        }
        let index = slot.at.load(Ordering::Relaxed);
        // SAFETY: `at` is the index of a GPU in the table, which has `MAX_SLOTS` entries. The
        // assertion saves a bounds check.
        unsafe { core::hint::assert_unchecked(index < MAX_SLOTS) };
        Gate::leave(index, slot);
        if weight > 0 && Work::is_mark_due(slot, weight) {
            return gpu().mark(slot, stream(), result);
        }
        result
    }

    #[cold]
    #[inline(never)]
    fn mark(&self, slot: &Slot, stream: CUstream, result: CUresult) -> CUresult {
        self.work.mark_submissions(slot, stream);
        result
    }
}
