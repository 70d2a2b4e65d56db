//! The gate of one GPU. A thread passes an open gate with one load. At a closed gate, the thread waits
//! for the GPU lock and the memory.
//!
//! A thread marks itself as *inside* before it checks whether the gate is open, and leaves after the
//! driver has accepted its call. So when [`Gate::close`] has returned and no thread is inside, no
//! submission is in progress. One fence separates the mark from the check. Another separates closing
//! the gate from looking for threads inside ([`barrier`]).
//!
//! `tests/gate-model` compiles this file with modelled atomics, fences and sleeping. It explores all
//! interleavings and so verifies the claims in these comments.

use super::{
    atomic::{AtomicU32, Ordering, fence},
    barrier, futex, threads,
};
use core::time::Duration;

/// The reasons for which a gate is closed, as bits of its state. The gate is open if no reason is set.
pub mod closed {
    /// The client does not have the GPU lock.
    pub const LOCK: u32 = 1;
    /// Part of the client's memory is not on the GPU.
    pub const MEMORY: u32 = 2;
    /// The GPU lock is being revoked. Kernels and graphs wait. Copies and flag writes still pass, because
    /// running work may need them in order to end.
    pub const KERNELS: u32 = 4;
    /// The reasons that stop copies, memsets and flag writes.
    pub const FOR_COPIES: u32 = LOCK | MEMORY;
    /// The reasons that stop any work.
    pub const FOR_ALL: u32 = LOCK | MEMORY | KERNELS;
}

/// Not a reason. This bit tells entering threads to execute a fence themselves, because
/// `membarrier(2)` has failed in the closing thread. Entering threads read the state anyway. The
/// bit is never cleared.
const FENCED: u32 = 1 << 30;
/// `FENCED` was set long ago: every thread sees it, and the marks of threads that entered earlier
/// without a fence are visible.
const SETTLED: u32 = 1 << 31;

#[derive(Debug)]
pub struct Gate {
    state: AtomicU32,
}

impl Gate {
    pub const fn new() -> Self {
        Self { state: AtomicU32::new(0) }
    }

    /// Enters this gate of GPU `gpu`, unless the gate is closed for one of these reasons. A thread
    /// that gets `true` is inside and must call [`leave`](Self::leave). `here` is the stack pointer
    /// of the function that calls the driver, or of one of its callers.
    pub fn try_enter(&self, gpu: u32, slot: &threads::Slot, here: usize, reasons: u32) -> bool {
        Self::approach(slot, here);
        if slot.turn_to(gpu) {
            barrier::light();
        }
        let entered = self.lets_in(reasons);
        if !entered {
            Self::turn_back(slot);
        }
        entered
    }

    /// The first half of entering the gate of the thread's GPU (`Slot::at`). From now on, the thread counts
    /// as inside. The second half is [`lets_in`](Self::lets_in). If that returns `false`, the thread must
    /// call [`turn_back`](Self::turn_back).
    #[inline(always)]
    pub fn approach(slot: &threads::Slot, here: usize) {
        // Release order suffices: a thread that sees this mark need not see that the marked thread
        // has left its previous gate.
        slot.inside.store(here, Ordering::Release);
        barrier::light();
    }

    /// Whether the gate lets in a thread that has called [`approach`](Self::approach).
    #[inline(always)]
    pub fn lets_in(&self, reasons: u32) -> bool {
        if self.state.load(Ordering::Acquire) & (reasons | FENCED) == 0 {
            return true;
        }
        // This fence is needed only if the gate is `FENCED`. If the gate is closed, the cost does not matter.
        fence(Ordering::SeqCst);
        self.state.load(Ordering::Acquire) & reasons == 0
    }

    /// Undoes [`approach`](Self::approach). The thread has submitted nothing.
    #[inline(always)]
    pub fn turn_back(slot: &threads::Slot) {
        slot.inside.store(threads::OUTSIDE, Ordering::Release);
    }

    /// Leaves the gate of this GPU. The calling thread is inside and has submitted work.
    #[inline]
    pub fn leave(gpu: u32, slot: &threads::Slot) {
        if let Some(count) = slot.submitted.get(gpu as usize) {
            // Only this thread writes the counter.
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
        slot.inside.store(threads::OUTSIDE, Ordering::Release);
    }

    pub fn is_closed_for(&self, why: u32) -> bool {
        self.state.load(Ordering::Acquire) & why != 0
    }

    /// Waits once for a change of this gate of GPU `gpu`, if the gate is closed for one of these reasons.
    /// `before` runs after the thread has been counted as waiting.
    pub fn wait(
        &self,
        gpu: u32,
        slot: &threads::Slot,
        what: threads::Waits,
        reasons: u32,
        timeout: Duration,
        before: impl FnOnce(),
    ) {
        slot.begin_waiting(gpu, what, timeout);
        // Pairs with the fence in `close`: either the closing thread sees this thread waiting, or `before`
        // sees the reason.
        fence(Ordering::SeqCst);
        before();
        let state = self.state.load(Ordering::Acquire);
        if state & reasons != 0 {
            futex::wait(&self.state, state, timeout);
        }
        slot.end_waiting();
    }

    /// Closes the gate: no thread enters from now on. Threads inside may still submit work until
    /// [`is_quiet`](Self::is_quiet) returns `true`.
    pub fn close(&self, why: u32) {
        let before = self.state.fetch_or(why, Ordering::SeqCst);
        if !barrier::heavy() && before & SETTLED == 0 {
            // While `SETTLED` is not set, every closing thread waits in `settle`, even if another
            // thread has already set `FENCED`.
            self.state.fetch_or(FENCED, Ordering::SeqCst);
            barrier::settle();
            self.state.fetch_or(SETTLED, Ordering::SeqCst);
        }
    }

    /// Removes these reasons. If none is left, the gate is open. Waiting threads check the state again.
    pub fn open(&self, why: u32) {
        if self.state.fetch_and(!why, Ordering::SeqCst) & why != 0 {
            futex::wake_all(&self.state);
        }
    }

    /// Whether no thread is inside. Meaningful only after [`close`](Self::close).
    pub fn is_quiet(gpu: u32) -> bool {
        // The order of the two loads matters. A thread changes `at` only after it has left its
        // previous gate. So if a thread is inside this gate, the first load finds it inside and the
        // second load finds `gpu`.
        threads::all().all(|slot| {
            slot.inside.load(Ordering::Acquire) == threads::OUTSIDE || slot.at.load(Ordering::Acquire) != gpu
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{gate::threads::Waits, sys::thread};
    use core::sync::atomic::{AtomicBool, AtomicU64};
    use std::time::Instant;

    /// Spins until the condition holds. Fails after a deadline.
    #[track_caller]
    fn until(is_so: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        while !is_so() {
            assert!(Instant::now() < deadline, "it never is");
            std::thread::yield_now();
        }
    }

    /// Threads submit as fast as they can while the gate closes and opens. After the gate has closed and no
    /// thread is inside, no submission happens until it opens. Then every thread continues. From the middle
    /// of the test on, the kernel refuses `membarrier(2)`.
    #[test]
    fn no_submission_happens_after_a_release() {
        static GATE: Gate = Gate::new();
        static RELEASED: AtomicBool = AtomicBool::new(false);
        static END: AtomicBool = AtomicBool::new(false);
        static SUBMITTED: AtomicU64 = AtomicU64::new(0);
        /// Ends the threads even if an assertion fails.
        struct Ends;
        impl Drop for Ends {
            fn drop(&mut self) {
                END.store(true, Ordering::SeqCst);
            }
        }
        const GPU: u32 = 7;
        barrier::init();
        let submit = || {
            let slot = threads::mine();
            while !END.load(Ordering::Relaxed) {
                while !GATE.try_enter(GPU, slot, thread::stack_pointer(), closed::FOR_ALL) {
                    GATE.wait(GPU, slot, Waits::WithWork, closed::FOR_ALL, Duration::from_millis(100), || {});
                }
                assert!(!RELEASED.load(Ordering::SeqCst), "submitted after a release");
                SUBMITTED.fetch_add(1, Ordering::Relaxed);
                Gate::leave(GPU, slot);
            }
        };
        let before = threads::submitted(GPU);
        std::thread::scope(|scope| {
            let _ends = Ends;
            (0..4).for_each(|_| drop(scope.spawn(submit)));
            for round in 0..2000 {
                if round == 1000 {
                    barrier::refuse();
                }
                let why = if round % 2 == 0 { closed::LOCK } else { closed::MEMORY };
                GATE.close(why);
                until(|| Gate::is_quiet(GPU));
                RELEASED.store(true, Ordering::SeqCst);
                let count = SUBMITTED.load(Ordering::SeqCst);
                if round % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
                assert_eq!(SUBMITTED.load(Ordering::SeqCst), count);
                RELEASED.store(false, Ordering::SeqCst);
                GATE.open(why);
                if round % 100 == 0 {
                    until(|| SUBMITTED.load(Ordering::SeqCst) > count);
                }
            }
        });
        assert_eq!(threads::submitted(GPU) - before, SUBMITTED.load(Ordering::SeqCst), "each one is counted");
    }

    #[test]
    fn a_gate_opens_when_its_last_reason_is_removed() {
        let gate = Gate::new();
        gate.close(closed::LOCK);
        gate.close(closed::MEMORY);
        gate.open(closed::LOCK);
        assert!(gate.is_closed_for(closed::MEMORY) && !gate.is_closed_for(closed::LOCK));
        gate.open(closed::MEMORY);
        assert!(!gate.is_closed_for(closed::FOR_ALL));
    }
}
