//! Other APIs on the same GPU: what they submit passes no gate, and may use memory of ours. So the calls that tie one to
//! this program are where the library learns that it can never know the program's work to be done. From then on the
//! program's memory stays where it is.

use crate::{
    driver::{self, types::*},
    gate, gpu,
    hooks::{context, gated::naming, hooks},
};
use core::ffi::c_void;

type P = *mut c_void;

/// Makes the call with the program's memory on the GPU, where it then stays.
fn tied(call: impl FnOnce() -> CUresult) -> CUresult {
    naming(|| {
        let result = call();
        if result == SUCCESS {
            make_unevictable();
        }
        result
    })
}

fn make_unevictable() {
    if gate::is_active() {
        crate::sys::errno::preserved(|| gpu::attached().for_each(gpu::Gpu::make_unevictable));
    }
}

/// A context that another API shares. Room for it may take a while, so it is not made inside the gate.
fn creating_tied(device: CUdevice, context: *mut CUcontext, real: impl Fn() -> CUresult) -> CUresult {
    let result = context::creating(device, context, real);
    if result == SUCCESS { tied(|| SUCCESS) } else { result }
}

hooks! { real, flavour;
    [cuGraphicsGLRegisterBuffer] (resource: P, buffer: u32, flags: u32) { tied(real) }
    [cuGraphicsGLRegisterImage] (resource: P, image: u32, target: u32, flags: u32) { tied(real) }
    [cuGraphicsEGLRegisterImage] (resource: P, image: P, flags: u32) { tied(real) }
    [cuGraphicsVDPAURegisterVideoSurface | cuGraphicsVDPAURegisterOutputSurface] (resource: P, surface: u32, flags: u32) { tied(real) }
    [cuGLRegisterBufferObject] (buffer: u32) { tied(real) }
    [cuEGLStreamConsumerConnect] (connection: P, stream: P) { tied(real) }
    [cuEGLStreamConsumerConnectWithFlags] (connection: P, stream: P, flags: u32) { tied(real) }
    [cuEGLStreamProducerConnect] (connection: P, stream: P, width: i32, height: i32) { tied(real) }
    [cuImportExternalMemory | cuImportExternalSemaphore] (place: P, description: P) { tied(real) }
    [cuStreamBeginCaptureToCig | cuStreamBeginCaptureToCig_ptsz] (stream: CUstream, params: P) { tied(real) }
    [cuGLCtxCreate | cuGLCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) {
        creating_tied(device, context, real)
    }
    [cuVDPAUCtxCreate | cuVDPAUCtxCreate_v2] (
        context: *mut CUcontext, flags: u32, device: CUdevice, display: u32, lookup: P,
    ) { creating_tied(device, context, real) }
    [cuGetExportTable] (table: P, id: *const [u8; 16]) {
        if gate::is_active() && driver::has_untracked_library() { tied(real) } else { real() }
    }
}
