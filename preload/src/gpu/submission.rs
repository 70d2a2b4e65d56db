//! Noting which stream a submission went to, so that the next one to the same stream passes with a few loads.

use super::Gpu;
use crate::{
    driver::types::*,
    gate::{
        self, epoch,
        threads::{OUTSIDE, Slot},
    },
    work::{self, capture},
};
use core::sync::atomic::Ordering;

impl Gpu {
    /// The program is about to make or use a stream that waits for the legacy stream, and the other way round.
    #[cold]
    pub fn expect_blocking_streams() {
        if gate::is_active() && work::first_blocking_stream() {
            super::attached().for_each(|gpu| gpu.work.mark_legacy_streams());
        }
    }

    /// Notes the stream of a submission, unless it is known. Called inside the gate, after the driver has accepted the call.
    #[inline]
    pub fn note(&'static self, slot: &Slot, stream: CUstream) {
        let epoch = epoch::now();
        if slot.way.load(Ordering::Relaxed) != epoch || slot.stream.load(Ordering::Relaxed) != work::name_of(stream) {
            self.note_anew(slot, stream, epoch);
        }
    }

    #[inline(never)]
    fn note_anew(&'static self, slot: &Slot, stream: CUstream, epoch: u64) {
        self.work.note(stream);
        // Only the thread itself can record a point in its per-thread stream, so each submission records its own.
        let may_last = stream != STREAM_PER_THREAD
            && !work::is_marked_at_once(stream)
            && !capture::any()
            && !self.work.is_full()
            && self.work.peers() == 0
            && gate::is_active();
        slot.stream.store(work::name_of(stream), Ordering::Relaxed);
        slot.gpu.store(core::ptr::from_ref(self).cast_mut().cast(), Ordering::Relaxed);
        slot.way.store(if may_last { epoch } else { epoch::NONE }, Ordering::Relaxed);
    }

    /// The GPU of this thread's last launch, if it went to this stream and nothing relevant has changed since.
    #[inline]
    pub fn of_last_launch(slot: &Slot, stream: CUstream) -> Option<&'static Gpu> {
        let is_as_before = slot.way.load(Ordering::Relaxed) == epoch::now()
            && slot.stream.load(Ordering::Relaxed) == work::name_of(stream)
            && slot.inside.load(Ordering::Relaxed) == OUTSIDE;
        // SAFETY: NULL, or one of the table of GPUs.
        unsafe { slot.gpu.load(Ordering::Relaxed).cast::<Gpu>().as_ref() }.filter(|_| is_as_before)
    }
}
