//! Initialisation, contexts, captures and look-ups: what the library must know about, and lets happen at once.

use crate::{
    capture, client,
    cuda::*,
    gpu::{self, Gpu},
    hooks::{gated, hooks},
    loader,
    memory::space::current_context,
};
use core::ffi::{c_char, c_void};

type P = *mut c_void;

/// A context is about to be made on that GPU; afterwards it is known.
fn creating(device: CUdevice, place: *mut CUcontext, real: impl FnOnce() -> CUresult) -> CUresult {
    if !client::is_on() {
        return real();
    }
    crate::errno::preserved(|| Gpu::attach(device));
    let result = real();
    // SAFETY: the driver has just written there.
    if let (SUCCESS, Some(context), Some(gpu)) = (result, unsafe { place.as_ref() }, gpu::by_ordinal(device)) {
        gpu.work.add_context(*context);
    }
    result
}

/// A context is about to go: nothing of ours may be using it, and nothing may begin to.
fn destroying(
    gpu: Option<&Gpu>,
    context: CUcontext,
    real: impl FnOnce() -> CUresult,
    is_gone: impl FnOnce() -> bool,
) -> CUresult {
    let Some(gpu) = gpu.filter(|_| client::is_on()) else { return real() };
    let _no_move = gpu.moving.lock();
    let (result, last) = gpu.work.without(context, || {
        let result = real();
        (result, result == SUCCESS && is_gone())
    });
    if let (Some(last), Some(space)) = (last, gpu.space()) {
        let mut guard = space.lock();
        let before = guard.account;
        guard.drop_context(context as usize, last);
        let after = guard.account;
        gpu.account_changed(&before, &after);
    }
    result
}

fn destroying_primary(device: CUdevice, real: impl FnOnce() -> CUresult) -> CUresult {
    let gpu = gpu::by_ordinal(device);
    let context = gpu.and_then(|g| g.primary()).unwrap_or(core::ptr::null_mut());
    destroying(gpu, context, real, || {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: valid places.
        unsafe { crate::driver::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) == SUCCESS && active == 0 }
    })
}

/// A capture refers to memory, so it begins, like work, when that is there; it stays there until the capture ends.
fn beginning_capture(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    gated::gated(stream, gated::ONE, || capture::begin(stream, real))
}

/// A stream that the legacy stream does not wait for is one that a fence may have to know.
fn making_stream(place: *const CUstream, flags: u32, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    // SAFETY: the driver has just written there.
    if let (SUCCESS, Some(stream), true) =
        (result, unsafe { place.as_ref() }, client::is_on() && flags & STREAM_NON_BLOCKING != 0)
        && let (Some(gpu), Ok(context)) = (gpu::current(), current_context())
    {
        gpu.work.add_stream(context, *stream);
    }
    result
}

fn ending_capture(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    // It goes on only where this was the wrong thread to end it.
    if capture::any() && !capture::is_capturing(stream) {
        capture::end(stream);
    }
    result
}

hooks! { real, flavour;
    [cuInit] (flags: u32) {
        let result = real();
        if result != SUCCESS || crate::errno::preserved(client::start) { result } else { ERROR_SYSTEM_NOT_READY }
    }

    // ---- look-ups ----
    [cuGetProcAddress] (name: *const c_char, function: *mut P, version: i32, flags: u64) {
        // SAFETY: the program's own pointer.
        unsafe { loader::replace(real(), function) }
    }
    [cuGetProcAddress_v2] (name: *const c_char, function: *mut P, version: i32, flags: u64, status: P) {
        // SAFETY: the program's own pointer.
        unsafe { loader::replace(real(), function) }
    }

    // ---- contexts ----
    [cuDevicePrimaryCtxRetain] (context: *mut CUcontext, device: CUdevice) {
        let result = creating(device, context, real);
        // SAFETY: the driver has just written there.
        if let (SUCCESS, Some(context), Some(gpu)) = (result, unsafe { context.as_ref() }, gpu::by_ordinal(device)) {
            gpu.set_primary(*context);
        }
        result
    }
    [cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2 | cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2] (
        device: CUdevice,
    ) { destroying_primary(device, real) }
    [cuCtxCreate | cuCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) { creating(device, context, real) }
    [cuCtxCreate_v3] (context: *mut CUcontext, affinity: P, n: i32, flags: u32, device: CUdevice) {
        creating(device, context, real)
    }
    [cuCtxCreate_v4] (context: *mut CUcontext, params: P, flags: u32, device: CUdevice) { creating(device, context, real) }
    [cuCtxDestroy | cuCtxDestroy_v2 | cuCtxDetach] (context: CUcontext) {
        let gpu = if client::is_on() { gpu::attached().find(|g| g.work.has_context(context)) } else { None };
        destroying(gpu, context, real, || true)
    }

    // ---- captures ----
    [cuStreamBeginCapture | cuStreamBeginCapture_ptsz] (stream: CUstream) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz] (stream: CUstream, mode: i32) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamBeginCaptureToGraph | cuStreamBeginCaptureToGraph_ptsz] (
        stream: CUstream, graph: CUgraph, dependencies: P, data: P, n: Size, mode: i32,
    ) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamEndCapture | cuStreamEndCapture_ptsz] (stream: CUstream, graph: P) { ending_capture(flavour.stream(stream), real) }
    [cuStreamDestroy | cuStreamDestroy_v2] (stream: CUstream) {
        capture::end(stream);
        if client::is_on() {
            gpu::attached().for_each(|gpu| gpu.work.remove_stream(stream));
        }
        real()
    }
    [cuStreamCreate] (stream: *mut CUstream, flags: u32) { making_stream(stream, flags, real) }
    [cuStreamCreateWithPriority] (stream: *mut CUstream, flags: u32, priority: i32) { making_stream(stream, flags, real) }
}
