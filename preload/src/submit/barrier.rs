//! The asymmetric fence between a thread that passes a gate and a thread that closes it.
//!
//! Threads pass a gate a million times per second and close it only a few times. With `membarrier(2)`,
//! the closing thread pays for both sides and a passing thread needs no fence. The kernel may lack or
//! refuse this system call, for example after the program has installed a seccomp filter. Both sides
//! then execute an ordinary fence, and a bit of the gate's state tells passing threads to do so.

use crate::sys::time;
use core::{
    sync::atomic::{AtomicBool, Ordering, fence},
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

/// The fence of the closing side, between the store of "the gate is closed" and the load of "is a
/// thread inside?". `Thread::approach` contains the fence of the passing side. Returns `false` if only
/// this thread was fenced, so that the passing side needs a fence too.
#[must_use]
pub fn heavy() -> bool {
    fence(Ordering::SeqCst);
    let is_done = MEMBARRIER.load(Ordering::Relaxed) && membarrier(MembarrierCommand::PrivateExpedited).is_ok();
    if !is_done {
        MEMBARRIER.store(false, Ordering::Relaxed);
    }
    is_done
}

/// Waits until this thread and all other threads see each other's earlier stores, although the
/// other threads executed no fence. A processor buffers a store for far less time than this wait.
/// When a processor stops running a thread, the thread's stores become visible.
pub fn wait_for_stores() {
    time::sleep_through(Duration::from_millis(10));
}
