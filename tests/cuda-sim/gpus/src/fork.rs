//! In a forked child, closes the descriptors that hold the parent's locks.

use std::{
    cell::RefCell,
    os::fd::RawFd,
    sync::{
        Mutex, MutexGuard, Once,
        atomic::{AtomicBool, Ordering},
    },
};

static FORKED: AtomicBool = AtomicBool::new(false);
static HELD: Mutex<Vec<RawFd>> = Mutex::new(Vec::new());

thread_local! {
    /// The lock of the list while this thread forks. The lock keeps the child's copy of the list
    /// consistent.
    static FORKING: RefCell<Option<MutexGuard<'static, Vec<RawFd>>>> = const { RefCell::new(None) };
}

/// Whether this process was forked after the simulator was initialized. Like the driver, the
/// simulator does not work in such a process.
pub fn after_fork() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Registers `fd` to be closed in every forked child. A lock belongs to the open file description,
/// so a child with the descriptor would keep the lock of its dead parent.
pub(crate) fn close_in_child(fd: RawFd) {
    static HOOK: Once = Once::new();
    // SAFETY: the handlers are functions of this library, and glibc removes them if the library is
    // unloaded.
    HOOK.call_once(|| unsafe {
        libc::pthread_atfork(Some(before), Some(parent), Some(child));
    });
    held().push(fd);
}

fn held() -> MutexGuard<'static, Vec<RawFd>> {
    HELD.lock().unwrap_or_else(|e| e.into_inner())
}

extern "C" fn before() {
    FORKING.with(|forking| *forking.borrow_mut() = Some(held()));
}

extern "C" fn parent() {
    FORKING.with(|forking| drop(forking.borrow_mut().take()));
}

extern "C" fn child() {
    FORKED.store(true, Ordering::Relaxed);
    if let Some(mut held) = FORKING.with(|forking| forking.borrow_mut().take()) {
        for fd in held.drain(..) {
            // SAFETY: these descriptors belong to this library, and no code uses them in a forked
            // child.
            unsafe { libc::close(fd) };
        }
    }
}
