//! Exit of the process. The driver's exit handlers need the process to be on its GPUs. So the exit
//! of a sleeping process waits for at most `MOST` until the process is awake. The child of a fork
//! does not wait.

use crate::{connection::presence, sys::c};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// The longest time that an exit waits. The scheduler that could wake the process may have ended.
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
