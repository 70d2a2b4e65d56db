//! Hooks of calls that connect the program to other APIs, such as OpenGL, on the same GPU.

use crate::{
    calls::interop::{call_and_tie, create_tied},
    driver::{self, hook::hooks, types::*},
    submit,
};
use core::ffi::c_void;

type P = *mut c_void;

hooks! { real, flavour;
    [cuGraphicsGLRegisterBuffer] (resource: P, buffer: u32, flags: u32) { call_and_tie(real) }
    [cuGraphicsGLRegisterImage] (resource: P, image: u32, target: u32, flags: u32) { call_and_tie(real) }
    [cuGraphicsEGLRegisterImage] (resource: P, image: P, flags: u32) { call_and_tie(real) }
    [cuGraphicsVDPAURegisterVideoSurface | cuGraphicsVDPAURegisterOutputSurface] (resource: P, surface: u32, flags: u32) { call_and_tie(real) }
    [cuGLRegisterBufferObject] (buffer: u32) { call_and_tie(real) }
    [cuEGLStreamConsumerConnect] (connection: P, stream: P) { call_and_tie(real) }
    [cuEGLStreamConsumerConnectWithFlags] (connection: P, stream: P, flags: u32) { call_and_tie(real) }
    [cuEGLStreamProducerConnect] (connection: P, stream: P, width: i32, height: i32) { call_and_tie(real) }
    [cuImportExternalMemory | cuImportExternalSemaphore] (place: P, description: P) { call_and_tie(real) }
    [cuStreamBeginCaptureToCig | cuStreamBeginCaptureToCig_ptsz] (stream: CUstream, params: P) { call_and_tie(real) }
    [cuGLCtxCreate | cuGLCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) {
        create_tied(device, context, real)
    }
    [cuVDPAUCtxCreate | cuVDPAUCtxCreate_v2] (
        context: *mut CUcontext, flags: u32, device: CUdevice, display: u32, lookup: P,
    ) { create_tied(device, context, real) }
    [cuGetExportTable] (table: P, id: *const [u8; 16]) {
        if submit::is_active() && driver::has_untracked_library() { call_and_tie(real) } else { real() }
    }
}
