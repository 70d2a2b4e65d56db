//! Resources of graphics APIs that the program registers or imports. Their memory is the driver's own,
//! and does not move. Whether the driver's checkpoint restores them was never tried. So a program that
//! had such a resource once does not sleep, although its other memory moves.

use crate::driver::{after, types::CUresult};
use core::sync::atomic::{AtomicBool, Ordering};

static ANY: AtomicBool = AtomicBool::new(false);

/// Notes the resource if the call succeeds.
pub fn note(call: impl FnOnce() -> CUresult) -> CUresult {
    after(call(), || ANY.store(true, Ordering::Relaxed))
}

/// Whether the program has ever registered or imported such a resource.
pub fn any() -> bool {
    ANY.load(Ordering::Relaxed)
}
