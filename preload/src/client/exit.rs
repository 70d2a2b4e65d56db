//! The end of the process by `exit`: the driver's exit handlers need the process to be on its GPUs.

use crate::{driver::presence, sys::c};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// The longest time that an exit waits for the process to be awake. The process that has to wake it may be gone.
const MOST: Duration = Duration::from_secs(10);

static BEGUN: AtomicBool = AtomicBool::new(false);

/// Called when CUDA has been initialised, so that this handler runs before the driver's.
pub fn watch() {
    c::at_exit(at_exit);
}

/// Whether the process is exiting, so that it no longer sleeps.
pub fn has_begun() -> bool {
    BEGUN.load(Ordering::SeqCst)
}

extern "C" fn at_exit(_: *mut c_void) {
    BEGUN.store(true, Ordering::SeqCst);
    presence::wait_at_most(MOST);
}
