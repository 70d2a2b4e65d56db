//! The end of the process by `exit`: what the driver does then must find the process on its GPUs.

use crate::{driver::presence, sys::c};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

/// The longest wait of an exit for the process to be back. Whoever has to bring it back may be gone for good.
const MOST: Duration = Duration::from_secs(10);

static BEGUN: AtomicBool = AtomicBool::new(false);

/// Called when CUDA has been initialised, so that this runs before what the driver has registered.
pub fn watch() {
    c::at_exit(at_exit);
}

/// Whether the process is ending, so that it does not sleep any more.
pub fn has_begun() -> bool {
    BEGUN.load(Ordering::SeqCst)
}

extern "C" fn at_exit(_: *mut c_void) {
    BEGUN.store(true, Ordering::SeqCst);
    presence::wait_at_most(MOST);
}
