//! Hooks of initialisation, contexts, captures and lookups. These calls change state that the library
//! tracks, and never wait for the lock.

use crate::{
    calls::contexts::*,
    client,
    copies::route,
    driver::{after, types::*},
    gpu,
    lookup::{dlsym, table},
    submit::captures,
};
use core::ffi::{c_char, c_void};

type P = *mut c_void;

hooks! { always real, flavour;
    [cuInit] (flags: u32) {
        dlsym::look();
        if !crate::sys::errno::preserve(client::request_placement) {
            return ERROR_NO_DEVICE;
        }
        let result = real();
        if result != SUCCESS {
            crate::sys::errno::preserve(client::cancel_placement);
            return result;
        }
        if crate::sys::errno::preserve(client::start) { result } else { ERROR_SYSTEM_NOT_READY }
    }

    // ---- lookups ----
    [cuGetProcAddress] (name: *const c_char, function: *mut P, version: i32, flags: u64) {
        // SAFETY: `function` is the program's own pointer.
        unsafe { table::replace(real(), function) }
    }
    [cuGetProcAddress_v2] (name: *const c_char, function: *mut P, version: i32, flags: u64, status: P) {
        // SAFETY: `function` is the program's own pointer.
        unsafe { table::replace(real(), function) }
    }
}

hooks! { real, flavour;
    // ---- contexts ----
    [cuDevicePrimaryCtxRetain] (context: *mut CUcontext, device: CUdevice) {
        let result = create_context(device, context, real);
        // SAFETY: the driver has just written `context`.
        if let (SUCCESS, Some(context), Some(gpu)) = (result, unsafe { context.as_ref() }, gpu::by_ordinal(device)) {
            gpu.set_primary(*context);
        }
        result
    }
    [cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2] (device: CUdevice) { release_primary(device, real) }
    [cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2] (device: CUdevice) { reset_primary(device, real) }
    [cuCtxCreate | cuCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) { create_context(device, context, real) }
    [cuCtxCreate_v3] (context: *mut CUcontext, affinity: P, n: i32, flags: u32, device: CUdevice) {
        create_context(device, context, real)
    }
    [cuCtxCreate_v4] (context: *mut CUcontext, params: P, flags: u32, device: CUdevice) { create_context(device, context, real) }
    [cuCtxDestroy | cuCtxDestroy_v2] (context: CUcontext) { destroy_context(gpu_of(context), context, real, || true) }
    [cuCtxAttach] (place: *mut CUcontext, flags: u32) {
        let result = real();
        // SAFETY: the driver has just written `place`.
        if let (SUCCESS, Some(context)) = (result, unsafe { place.as_ref() })
            && let Some(gpu) = gpu_of(*context)
        {
            gpu.work.add_context(*context);
        }
        result
    }
    [cuCtxDetach] (context: CUcontext) { release_context(gpu_of(context), context, real, || true) }
    [cuGreenCtxCreate] (place: *mut P, resources: P, device: CUdevice, flags: u32) { make_green(place, device, real) }
    [cuGreenCtxDestroy] (green: P) { destroy_green(green, real) }

    [cuCtxEnablePeerAccess] (peer: CUcontext, flags: u32) {
        after(real(), || route::on_peer_access(peer))
    }

    // ---- captures ----
    [cuStreamBeginCapture | cuStreamBeginCapture_ptsz] (stream: CUstream) { begin_capture(flavour.stream(stream), real) }
    [cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz] (stream: CUstream, mode: i32) { begin_capture(flavour.stream(stream), real) }
    [cuStreamBeginCaptureToGraph | cuStreamBeginCaptureToGraph_ptsz] (
        stream: CUstream, graph: CUgraph, dependencies: P, data: P, n: Size, mode: i32,
    ) { begin_capture(flavour.stream(stream), real) }
    [cuStreamBeginRecaptureToGraph | cuStreamBeginRecaptureToGraph_ptsz] (
        stream: CUstream, mode: i32, graph: CUgraph, changed: P, data: P,
    ) { begin_capture(flavour.stream(stream), real) }
    [cuStreamWaitEvent | cuStreamWaitEvent_ptsz] (stream: CUstream, event: CUevent, flags: u32) {
        wait_for_event(flavour.stream(stream), real)
    }
    [cuStreamEndCapture | cuStreamEndCapture_ptsz] (stream: CUstream, graph: P) { end_capture(flavour.stream(stream), real) }
    [cuStreamDestroy | cuStreamDestroy_v2] (stream: CUstream) {
        captures::end(stream);
        gpu::in_use().for_each(|gpu| gpu.work.forget_stream(stream));
        real()
    }
}
