//! Hooks of calls after which another API on the same GPU may use this library's memory.
//!
//! Registered and imported resources of graphics APIs are the driver's own memory, which does not
//! move. A graphics API that is given this library's memory gets it as an exported handle
//! ([`crate::calls::export`]), and only that memory stays on the GPU. So these calls are not hooked.

use crate::{
    calls::{contexts::create_context, interop::call_and_tie},
    driver::{self, hook::hooks, types::*},
    submit,
};
use core::ffi::c_void;

type P = *mut c_void;

hooks! { real, flavour;
    // The producer presents frames in its own memory by address, and the consumer reads them later.
    [cuEGLStreamProducerConnect] (connection: P, stream: P, width: i32, height: i32) { call_and_tie(real) }
    [cuStreamBeginCaptureToCig | cuStreamBeginCaptureToCig_ptsz] (stream: CUstream, params: P) { call_and_tie(real) }
    [cuGLCtxCreate | cuGLCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) {
        create_context(device, context, real)
    }
    [cuVDPAUCtxCreate | cuVDPAUCtxCreate_v2] (
        context: *mut CUcontext, flags: u32, device: CUdevice, display: u32, lookup: P,
    ) { create_context(device, context, real) }
    [cuGetExportTable] (table: P, id: *const [u8; 16]) {
        if submit::is_active() && driver::has_untracked_library() { call_and_tie(real) } else { real() }
    }
}
