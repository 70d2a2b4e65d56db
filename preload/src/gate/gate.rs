//! The gate of one GPU: open, a thread passes with one load; closed, it waits until the GPU lock and the memory are there.
//!
//! A thread marks itself *inside* before it looks whether the gate is open and leaves once its call has been submitted,
//! so when [`Gate::close`] sees nobody inside, nothing can slip out any more.
//!
//! `tests/gate-model` compiles this very file against modelled atomics, fences and sleeping, and walks through what
//! threads can do with it: what these comments claim is checked there.

use super::{
    atomic::{AtomicU32, Ordering, fence},
    barrier, futex, threads,
};
use core::time::Duration;

/// Why a gate is closed, as bits of its state; 0 is open.
pub mod closed {
    /// The client does not have the GPU lock.
    pub const LOCK: u32 = 1;
    /// Not all memory that the client needs is on the GPU.
    pub const MEMORY: u32 = 2;
    /// The client has been asked for the GPU lock, and what runs may need copies and flags from the host in order to end:
    /// kernels and graphs wait, other work does not.
    pub const KERNELS: u32 = 4;
    /// What keeps work that is no kernel from entering.
    pub const FOR_COPIES: u32 = LOCK | MEMORY;
    /// What keeps any work from entering.
    pub const FOR_ALL: u32 = LOCK | MEMORY | KERNELS;
}

#[derive(Debug)]
pub struct Gate {
    state: AtomicU32,
    /// Threads that wait.
    waiting: AtomicU32,
}

impl Gate {
    pub const fn new() -> Self {
        Self { state: AtomicU32::new(0), waiting: AtomicU32::new(0) }
    }

    /// Enters if the gate is closed for none of these reasons. On `true` the thread is inside and must
    /// [`leave`](Self::leave).
    #[inline]
    pub fn try_enter(&self, gpu: u32, slot: &threads::Slot, reasons: u32) -> bool {
        // Releasing, since who sees the thread here need not see that it left another gate before.
        slot.inside.store(gpu + 1, Ordering::Release);
        barrier::light();
        if self.state.load(Ordering::Acquire) & reasons == 0 {
            return true;
        }
        slot.inside.store(threads::OUTSIDE, Ordering::Release);
        false
    }

    #[inline]
    pub fn leave(gpu: u32, slot: &threads::Slot) {
        if let Some(count) = slot.submitted.get(gpu as usize) {
            // Only this thread writes it.
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
        }
        slot.inside.store(threads::OUTSIDE, Ordering::Release);
    }

    pub fn is_closed_for(&self, why: u32) -> bool {
        self.state.load(Ordering::Acquire) & why != 0
    }

    pub fn waiting(&self) -> u32 {
        self.waiting.load(Ordering::Acquire)
    }

    /// Waits for the state to change, once, if it is closed for one of these reasons; `before` runs after this thread
    /// counts as waiting.
    pub fn wait(&self, reasons: u32, timeout: Duration, before: impl FnOnce()) {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        // With the one in `close`: either that thread sees this one waiting, or `before` sees what it closed for.
        fence(Ordering::SeqCst);
        before();
        let state = self.state.load(Ordering::Acquire);
        if state & reasons != 0 {
            futex::wait(&self.state, state, timeout);
        }
        self.waiting.fetch_sub(1, Ordering::SeqCst);
    }

    /// From now on nobody enters; threads that are inside may still submit, until [`is_quiet`](Self::is_quiet).
    pub fn close(&self, why: u32) {
        self.state.fetch_or(why, Ordering::SeqCst);
        barrier::heavy();
    }

    /// Takes reasons away; with the last one the gate is open. Whoever waits looks again.
    pub fn open(&self, why: u32) {
        if self.state.fetch_and(!why, Ordering::SeqCst) & why != 0 {
            futex::wake_all(&self.state);
        }
    }

    /// Whether no thread is inside. Meaningful after [`close`](Self::close).
    pub fn is_quiet(gpu: u32) -> bool {
        threads::all().all(|slot| slot.inside.load(Ordering::Acquire) != gpu + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::sync::atomic::{AtomicBool, AtomicU64};

    /// Threads submit as fast as they can while the gate is closed and opened: once it is closed and nobody is inside, no
    /// submission happens until it is opened, and every thread goes on afterwards.
    #[test]
    fn nothing_slips_out_after_a_release() {
        static GATE: Gate = Gate::new();
        static RELEASED: AtomicBool = AtomicBool::new(false);
        static END: AtomicBool = AtomicBool::new(false);
        static SUBMITTED: AtomicU64 = AtomicU64::new(0);
        const GPU: u32 = 7;
        barrier::init();
        let submit = || {
            let slot = threads::mine();
            while !END.load(Ordering::Relaxed) {
                while !GATE.try_enter(GPU, slot, closed::FOR_ALL) {
                    GATE.wait(closed::FOR_ALL, Duration::from_millis(100), || {});
                }
                assert!(!RELEASED.load(Ordering::SeqCst), "submitted after a release");
                SUBMITTED.fetch_add(1, Ordering::Relaxed);
                Gate::leave(GPU, slot);
            }
        };
        let before = threads::submitted(GPU);
        std::thread::scope(|scope| {
            (0..4).for_each(|_| drop(scope.spawn(submit)));
            for round in 0..2000 {
                let why = if round % 2 == 0 { closed::LOCK } else { closed::MEMORY };
                GATE.close(why);
                while !Gate::is_quiet(GPU) {
                    std::hint::spin_loop();
                }
                RELEASED.store(true, Ordering::SeqCst);
                let count = SUBMITTED.load(Ordering::SeqCst);
                if round % 16 == 0 {
                    std::thread::sleep(Duration::from_micros(200));
                }
                assert_eq!(SUBMITTED.load(Ordering::SeqCst), count);
                RELEASED.store(false, Ordering::SeqCst);
                GATE.open(why);
                while round % 100 == 0 && SUBMITTED.load(Ordering::SeqCst) == count {
                    std::thread::yield_now();
                }
            }
            END.store(true, Ordering::SeqCst);
        });
        assert_eq!(threads::submitted(GPU) - before, SUBMITTED.load(Ordering::SeqCst), "each one is counted");
    }

    #[test]
    fn it_is_open_only_with_no_reason_left() {
        let gate = Gate::new();
        gate.close(closed::LOCK);
        gate.close(closed::MEMORY);
        gate.open(closed::LOCK);
        assert!(gate.is_closed_for(closed::MEMORY) && !gate.is_closed_for(closed::LOCK));
        gate.open(closed::MEMORY);
        assert!(!gate.is_closed_for(closed::FOR_ALL));
    }
}
