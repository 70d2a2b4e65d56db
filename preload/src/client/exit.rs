//! Exit of the process. The driver's exit handlers need the process to be on its GPUs. So `exit`
//! waits until the process is back on them, for at most `MOST`. The child of a fork does not wait.

use crate::{driver::presence, sys::c};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// The longest time that an exit waits for the process to be awake. The process that has to wake this
/// one may be gone.
const MOST: Duration = Duration::from_secs(10);

static BEGUN: AtomicBool = AtomicBool::new(false);

/// Registers the exit handler. Called after CUDA has been initialised, so that this handler runs before
/// the driver's.
pub fn watch() {
    c::at_exit(at_exit);
}

/// Whether the process is exiting. An exiting process no longer goes to sleep.
pub fn has_begun() -> bool {
    BEGUN.load(Ordering::SeqCst)
}

extern "C" fn at_exit(_: *mut c_void) {
    BEGUN.store(true, Ordering::SeqCst);
    presence::wait_at_most(MOST);
}
