//! Calls that connect the program to other APIs on the same GPU. Work submitted through these passes no gate, and may
//! use our memory. So from then on the library cannot know when the program's work is done, and the program's memory
//! stays where it is.

use super::{contexts, submit::naming};
use crate::{driver::types::*, gate, gpu};

/// Makes the call while the program's memory is on the GPU, where it stays from then on.
pub fn tied(call: impl FnOnce() -> CUresult) -> CUresult {
    naming(|| {
        let result = call();
        if result == SUCCESS {
            make_unevictable();
        }
        result
    })
}

/// Called before the program submits work that passes no gate: restores its memory to the GPU, where it stays.
pub fn tie() {
    let _ = tied(|| SUCCESS);
}

pub fn make_unevictable() {
    if gate::is_active() {
        crate::sys::errno::preserved(|| gpu::attached().for_each(gpu::Gpu::make_unevictable));
    }
}

/// Creates a context that another API shares. This happens outside the gate, because room for it may take a while.
pub fn creating_tied(device: CUdevice, context: *mut CUcontext, real: impl Fn() -> CUresult) -> CUresult {
    let result = contexts::creating(device, context, real);
    if result == SUCCESS { tied(|| SUCCESS) } else { result }
}
