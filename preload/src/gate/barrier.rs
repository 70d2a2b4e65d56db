//! The asymmetric fence between a thread that passes a gate and the one that closes it.
//!
//! Passing is done a million times a second, closing a few times: `membarrier(2)` lets the closer pay for both, and a
//! passing thread needs no fence of its own. Where the kernel lacks it, both use an ordinary fence.

use core::{
    sync::atomic::{AtomicBool, Ordering, compiler_fence, fence},
    time::Duration,
};
use rustix::thread::{MembarrierCommand, membarrier};

/// Whether the passing side needs a fence of its own.
static HEAVY: AtomicBool = AtomicBool::new(true);
/// Whether the closing side needs more than its own.
static MEMBARRIER: AtomicBool = AtomicBool::new(false);

/// Once, before the first gate is closed.
pub fn init() {
    if membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok() {
        MEMBARRIER.store(true, Ordering::SeqCst);
        HEAVY.store(false, Ordering::SeqCst);
    }
}

/// Between "I am inside" and "is it open?".
#[inline]
pub fn light() {
    if HEAVY.load(Ordering::Relaxed) {
        fence(Ordering::SeqCst);
    } else {
        compiler_fence(Ordering::SeqCst);
    }
}

/// Between "it is closed" and "who is inside?".
pub fn heavy() {
    fence(Ordering::SeqCst);
    if MEMBARRIER.load(Ordering::Relaxed) && membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        // Registered, and yet refused (a seccomp filter set since): fall back, and wait until every thread that might
        // have passed with the light fence has long seen the store. Until then nobody else goes without waiting, either.
        HEAVY.store(true, Ordering::SeqCst);
        crate::sys::time::sleep(Duration::from_millis(10));
        MEMBARRIER.store(false, Ordering::SeqCst);
    }
}
