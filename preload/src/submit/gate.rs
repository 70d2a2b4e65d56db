//! The slow half of the gate: closing and opening it, and waiting at it. The fast half is in
//! [`fast`](super::fast).

use super::{
    atomic::{AtomicU32, Ordering, compiler_fence, fence},
    barrier,
    fast::{FENCED, Gate, OUTSIDE, Thread, epoch},
    threads,
};
use crate::sys::futex;
use core::time::Duration;

/// `FENCED` was set long ago: every thread sees it, and the marks of threads that entered earlier
/// without a fence are visible.
const VISIBLE: u32 = 1 << 31;

impl Thread {
    /// Moves the calling thread, which owns this value and counts as inside, to the gate of this GPU.
    /// Returns whether the thread was at another gate before.
    pub(super) fn move_to(&self, gpu: u32) -> bool {
        let moves = self.at.load(Ordering::Relaxed) != gpu;
        if moves {
            self.at.store(gpu, Ordering::Release);
            self.epoch.set(epoch::NONE); // the last launch was at the other gate
        }
        moves
    }
}

impl Gate {
    pub const fn new() -> Self {
        Self { state: AtomicU32::new(0) }
    }

    /// Enters this gate of GPU `gpu`, unless the gate is closed for one of these reasons. A thread
    /// that gets `true` is inside and must call [`leave`](Thread::leave). `here` is the stack pointer
    /// of the function that calls the driver, or of one of its callers.
    pub fn try_enter(&self, gpu: u32, thread: &Thread, here: usize, reasons: u32) -> bool {
        thread.approach(here);
        if thread.move_to(gpu) {
            compiler_fence(Ordering::SeqCst);
        }
        let entered = self.lets_in(reasons);
        if !entered {
            thread.retreat();
        }
        entered
    }

    pub fn is_closed_for(&self, why: u32) -> bool {
        self.state.load(Ordering::Acquire) & why != 0
    }

    /// Waits once for a change of this gate of GPU `gpu`, if the gate is closed for one of these reasons.
    /// `before` runs after the thread has been counted as waiting.
    pub fn wait(
        &self,
        gpu: u32,
        thread: &Thread,
        what: threads::Waits,
        reasons: u32,
        timeout: Duration,
        before: impl FnOnce(),
    ) {
        thread.begin_waiting(gpu, what, timeout);
        // Pairs with the fence in `close`: either the closing thread sees this thread waiting, or `before`
        // sees the reason.
        fence(Ordering::SeqCst);
        before();
        let state = self.state.load(Ordering::Acquire);
        if state & reasons != 0 {
            futex::wait(&self.state, state, timeout);
        }
        thread.end_waiting();
    }

    /// Closes the gate: no thread enters from now on. Threads inside may still submit work until
    /// [`is_quiet`](Self::is_quiet) returns `true`.
    pub fn close(&self, why: u32) {
        let before = self.state.fetch_or(why, Ordering::SeqCst);
        if !barrier::heavy() && before & VISIBLE == 0 {
            // While `VISIBLE` is not set, every closing thread waits for stores, even if another
            // thread has already set `FENCED`.
            self.state.fetch_or(FENCED, Ordering::SeqCst);
            barrier::wait_for_stores();
            self.state.fetch_or(VISIBLE, Ordering::SeqCst);
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
        threads::all()
            .all(|thread| thread.inside.load(Ordering::Acquire) == OUTSIDE || thread.at.load(Ordering::Acquire) != gpu)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        submit::{closed, threads::Waits},
        sys::thread::stack_pointer,
    };
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
            let thread = threads::mine();
            while !END.load(Ordering::Relaxed) {
                while !GATE.try_enter(GPU, thread, stack_pointer(), closed::FOR_ALL) {
                    GATE.wait(GPU, thread, Waits::WithWork, closed::FOR_ALL, Duration::from_millis(100), || {});
                }
                assert!(!RELEASED.load(Ordering::SeqCst), "submitted after a release");
                SUBMITTED.fetch_add(1, Ordering::Relaxed);
                thread.leave(GPU);
            }
        };
        let before = threads::submissions(GPU);
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
        assert_eq!(threads::submissions(GPU) - before, SUBMITTED.load(Ordering::SeqCst), "each one is counted");
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
