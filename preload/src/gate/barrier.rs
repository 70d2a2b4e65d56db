//! The asymmetric fence between a thread that passes a gate and the thread that closes it.
//!
//! Threads pass a gate a million times a second and close it a few times: with `membarrier(2)` the closing thread pays
//! for both sides, and a passing thread needs no fence. If the kernel lacks or refuses that system call, perhaps
//! because of a seccomp filter that the program has installed since, both sides use an ordinary fence: the state of the
//! gate tells the passing thread to do so.

use crate::sys::time;
use core::{
    sync::atomic::{AtomicBool, Ordering, compiler_fence, fence},
    time::Duration,
};
use rustix::thread::{MembarrierCommand, membarrier};

/// Whether the kernel supports `membarrier(2)` and has not refused it so far.
static MEMBARRIER: AtomicBool = AtomicBool::new(false);

/// Called once, before the first gate is closed.
pub fn init() {
    MEMBARRIER.store(membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok(), Ordering::SeqCst);
}

/// Acts as if the kernel refused `membarrier(2)` from now on.
#[cfg(test)]
pub fn refuse() {
    MEMBARRIER.store(false, Ordering::SeqCst);
}

/// The passing side: between the store of "I am inside" and the load of "is it open?".
#[inline]
pub fn light() {
    compiler_fence(Ordering::SeqCst);
}

/// The closing side: between the store of "it is closed" and the load of "is a thread inside?". `false` if it
/// fenced only this thread, so that the passing side needs a fence too.
#[must_use]
pub fn heavy() -> bool {
    fence(Ordering::SeqCst);
    let is_done = MEMBARRIER.load(Ordering::Relaxed) && membarrier(MembarrierCommand::PrivateExpedited).is_ok();
    if !is_done {
        MEMBARRIER.store(false, Ordering::Relaxed);
    }
    is_done
}

/// Waits until all other threads see this thread's stores, and their own earlier stores are visible here, although they
/// executed no fence. A processor buffers a store for far less time, and when it stops running a thread, it makes the
/// thread's stores visible.
pub fn settle() {
    time::sleep_through(Duration::from_millis(10));
}
