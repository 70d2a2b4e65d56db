//! Calls that connect the program to other APIs on the same GPU. What these submit passes no gate, and may use our memory, so
//! from then on the library cannot know when the program's work is done, and the program's memory stays where it is.

use crate::{
    driver::{self, hook::hooks, types::*},
    gate, gpu,
    hooks::{context, gated::naming},
};
use core::ffi::c_void;

type P = *mut c_void;

/// Makes the call while the program's memory is on the GPU, where it stays from then on.
fn tied(call: impl FnOnce() -> CUresult) -> CUresult {
    naming(|| {
        let result = call();
        if result == SUCCESS {
            make_unevictable();
        }
        result
    })
}

/// The program is about to submit such work: brings its memory to the GPU, where it stays.
pub(super) fn tie() {
    let _ = tied(|| SUCCESS);
}

fn make_unevictable() {
    if gate::is_active() {
        crate::sys::errno::preserved(|| gpu::attached().for_each(gpu::Gpu::make_unevictable));
    }
}

/// Creates a context that another API shares. This happens outside the gate, because room for it may take a while.
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
