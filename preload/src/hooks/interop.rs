//! Hooks of calls that connect the program to another API on the same GPU.
//!
//! Registered and imported resources of graphics APIs are the driver's own memory, which does not
//! move: these calls are only noted. A graphics API that is given this library's memory gets it as an
//! exported handle ([`crate::calls::export`]), and only that memory stays on the GPU.

use crate::{
    calls::{contexts::create_context, interop::call_and_tie},
    driver::{self, types::*},
    registry::graphics::note,
};
use core::ffi::c_void;

type P = *mut c_void;

hooks! { real, flavour;
    // The producer presents frames in its own memory by address, and the consumer reads them later.
    [cuEGLStreamProducerConnect] (connection: P, stream: P, width: i32, height: i32) { call_and_tie(real) }
    [cuStreamBeginCaptureToCig | cuStreamBeginCaptureToCig_ptsz] (stream: CUstream, params: P) { call_and_tie(real) }
    [cuGLCtxCreate | cuGLCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) {
        note(|| create_context(device, context, real))
    }
    [cuVDPAUCtxCreate | cuVDPAUCtxCreate_v2] (
        context: *mut CUcontext, flags: u32, device: CUdevice, display: u32, lookup: P,
    ) { note(|| create_context(device, context, real)) }
    [cuGraphicsGLRegisterBuffer] (resource: P, buffer: u32, flags: u32) { note(real) }
    [cuGraphicsGLRegisterImage] (resource: P, image: u32, target: u32, flags: u32) { note(real) }
    [cuGraphicsEGLRegisterImage] (resource: P, image: P, flags: u32) { note(real) }
    [cuGraphicsVDPAURegisterVideoSurface | cuGraphicsVDPAURegisterOutputSurface] (resource: P, surface: u32, flags: u32) { note(real) }
    [cuGLRegisterBufferObject] (buffer: u32) { note(real) }
    [cuEGLStreamConsumerConnect] (connection: P, stream: P) { note(real) }
    [cuEGLStreamConsumerConnectWithFlags] (connection: P, stream: P, flags: u32) { note(real) }
    [cuImportExternalMemory | cuImportExternalSemaphore] (place: P, description: P) { note(real) }
    [cuGetExportTable] (table: P, id: *const [u8; 16]) {
        if driver::has_untracked_library() { call_and_tie(real) } else { real() }
    }
}
