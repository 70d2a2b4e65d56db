//! The asymmetric fence between a thread that passes a gate and the thread that closes it.
//!
//! Threads pass a gate a million times a second and close it a few times: with `membarrier(2)` the closing thread pays for
//! both, and a passing thread needs no fence. Where the kernel lacks it, both use an ordinary fence.

use core::{
    sync::atomic::{AtomicBool, Ordering, compiler_fence, fence},
    time::Duration,
};
use rustix::thread::{MembarrierCommand, membarrier};

/// Whether the passing side needs a fence.
static HEAVY: AtomicBool = AtomicBool::new(true);
/// Whether the closing side needs `membarrier` in addition to its fence.
static MEMBARRIER: AtomicBool = AtomicBool::new(false);

/// Called once, before the first gate is closed.
pub fn init() {
    if membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok() {
        MEMBARRIER.store(true, Ordering::SeqCst);
        HEAVY.store(false, Ordering::SeqCst);
    }
}

/// The passing side: between the store of "I am inside" and the load of "is it open?".
#[inline]
pub fn light() {
    if HEAVY.load(Ordering::Relaxed) {
        fence(Ordering::SeqCst);
    } else {
        compiler_fence(Ordering::SeqCst);
    }
}

/// The closing side: between the store of "it is closed" and the load of "which threads are inside?".
pub fn heavy() {
    fence(Ordering::SeqCst);
    if MEMBARRIER.load(Ordering::Relaxed) && membarrier(MembarrierCommand::PrivateExpedited).is_err() {
        // `membarrier` was registered and yet refused, perhaps by a seccomp filter installed since. From now on the passing
        // side uses its fence; every thread that may have passed without one has seen the store after this sleep. Until then
        // other closers sleep, too.
        HEAVY.store(true, Ordering::SeqCst);
        crate::sys::time::sleep(Duration::from_millis(10));
        MEMBARRIER.store(false, Ordering::SeqCst);
    }
}
