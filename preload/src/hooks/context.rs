//! Initialisation, contexts, captures and look-ups: calls that the library must know about, and that never wait for the lock.

use crate::{
    client, connection,
    copies::route,
    driver::{self, hook::hooks, types::*},
    gate,
    gpu::{self, Gpu, peers::couple, reservation},
    hooks::{self, deepbind, gated, lookup},
    memory::mover::Mover,
    registry::{pinned, pools, shared},
    sys::{
        sync::{Mutex, Rank},
        time::{self, Instant},
    },
    work::{self, capture},
};
use alloc::vec::Vec;
use core::{
    ffi::{c_char, c_void},
    time::Duration,
};

type P = *mut c_void;

/// The longest wait for memory for a context, and the interval between attempts.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(2);
const CONTEXT_RETRY: Duration = Duration::from_millis(5);

/// Creates a context on this GPU, which is known to the library afterwards.
pub(super) fn creating(device: CUdevice, place: *mut CUcontext, real: impl Fn() -> CUresult) -> CUresult {
    if !gate::is_active() {
        return real();
    }
    if !crate::sys::errno::preserved(|| Gpu::attach(device, shared::introduce)) {
        return ERROR_OUT_OF_MEMORY;
    }
    let begin = Instant::now();
    let create = || loop {
        // Room has been made, but a program that has just ended may still be releasing its memory.
        match real() {
            ERROR_OUT_OF_MEMORY if connection::is_connected() && begin.elapsed() < CONTEXT_TIMEOUT => {
                crate::sys::errno::preserved(|| time::sleep(CONTEXT_RETRY))
            }
            result => break result,
        }
    };
    let result = reservation::retried_on(|| gpu::by_ordinal(device).filter(|gpu| gpu.is_introduced()), create);
    // SAFETY: the driver has just written there.
    let context = unsafe { place.as_ref() }.filter(|_| result == SUCCESS);
    if let Some(context) = context {
        work::context_is_there(*context);
    }
    if let (Some(context), Some(gpu)) = (context, gpu::by_ordinal(device)) {
        crate::sys::errno::preserved(|| {
            gpu.add_context(*context);
            if gpu::are_several() {
                pools::now_in_use(gpu);
            }
            connection::wake();
        });
    }
    result
}

/// Destroys a context, while nothing of ours uses it or begins to.
fn destroying(
    gpu: Option<&Gpu>,
    context: CUcontext,
    real: impl FnOnce() -> CUresult,
    is_gone: impl FnOnce() -> bool,
) -> CUresult {
    let Some(gpu) = gpu.filter(|_| gate::is_active()) else { return real() };
    let begun = crate::sys::errno::preserved(|| {
        let leave = |space| Mover::leave(&gpu.moving, context, space, &|account| gpu.report(account));
        gpu.work.begin_destroying(context).then(|| gpu.space().map(leave))
    });
    let Some(left) = begun else { return real() };
    // The driver waits for work that may need the host, so nothing is held.
    let result = real();
    crate::sys::errno::preserved(|| {
        let is_gone = result == SUCCESS && is_gone();
        // No thread adds a context of this handle before all of the old one is forgotten.
        let mut mover = gpu.moving.lock();
        if is_gone {
            forget(gpu, context);
        }
        match left {
            Some(left) if is_gone => left.forget(),
            Some(left) => mover.come_back(left),
            None => {}
        }
        gpu.work.end_of_destroying(context, is_gone, result);
        drop(mover);
        connection::wake();
    });
    result
}

/// Forgets all that belonged to a context that is gone.
fn forget(gpu: &Gpu, context: CUcontext) {
    let is_last = gpu.work.is_last(context);
    capture::end_all_in(context);
    pinned::drop_context(gpu, context, is_last);
    shared::drop_context(gpu, context, is_last);
    if let Some(space) = gpu.space() {
        let mut guard = space.lock();
        let before = guard.account;
        guard.drop_context(context as usize, is_last);
        let after = guard.account;
        gpu.account_changed(&before, &after);
    }
}

/// The GPU of a known context.
fn gpu_of(context: CUcontext) -> Option<&'static Gpu> {
    if gate::is_active() { gpu::attached().find(|gpu| gpu.work.has_context(context)) } else { None }
}

/// Ends one use of a context. Only the last destroys it: until then, whatever works in it goes on.
fn releasing(
    gpu: Option<&Gpu>,
    context: CUcontext,
    real: impl Fn() -> CUresult,
    is_gone: impl FnOnce() -> bool,
) -> CUresult {
    let others_left = gpu.filter(|_| gate::is_active()).and_then(|gpu| gpu.work.releasing_context(context, &real));
    others_left.unwrap_or_else(|| destroying(gpu, context, real, is_gone))
}

fn primary_of(gpu: Option<&Gpu>) -> CUcontext {
    gpu.and_then(Gpu::primary).unwrap_or(core::ptr::null_mut())
}

fn is_primary_gone(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: valid places.
    unsafe { driver::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) == SUCCESS && active == 0 }
}

fn releasing_primary(device: CUdevice, real: impl Fn() -> CUresult) -> CUresult {
    let gpu = gpu::by_ordinal(device);
    releasing(gpu, primary_of(gpu), real, || is_primary_gone(device))
}

/// Whoever else has retained it.
fn resetting_primary(device: CUdevice, real: impl FnOnce() -> CUresult) -> CUresult {
    let gpu = gpu::by_ordinal(device);
    destroying(gpu, primary_of(gpu), real, || is_primary_gone(device))
}

/// Retains the primary context of a GPU as if the program had. Returns whether that succeeded.
fn retain_primary(device: CUdevice) -> bool {
    let mut primary = core::ptr::null_mut();
    let place = &raw mut primary;
    // SAFETY: a valid place.
    let result = creating(device, place, || unsafe { driver::cuDevicePrimaryCtxRetain(place, device) });
    if let (SUCCESS, Some(gpu)) = (result, gpu::by_ordinal(device)) {
        gpu.set_primary(primary);
    }
    result == SUCCESS
}

/// Green contexts, each with the GPU whose primary context it belongs to. The primary context is retained as long, because a
/// fence or mark there also waits for the work of the green context.
static GREEN: Mutex<Vec<(usize, CUdevice)>> = Mutex::new(Rank::GreenContexts, Vec::new());

fn making_green(place: *const P, device: CUdevice, real: impl FnOnce() -> CUresult) -> CUresult {
    if gate::is_active() && !crate::sys::errno::preserved(|| Gpu::attach(device, shared::introduce)) {
        return ERROR_OUT_OF_MEMORY;
    }
    let result = real();
    // It is not added like others: the library learns of it by the first launch there.
    work::contexts_are_several();
    // SAFETY: the driver has just written there.
    if let (true, SUCCESS, Some(green)) = (gate::is_active(), result, unsafe { place.as_ref() })
        && crate::sys::errno::preserved(|| retain_primary(device))
    {
        GREEN.lock().push((*green as usize, device));
    }
    result
}

fn destroying_green(green: P, real: impl FnOnce() -> CUresult) -> CUresult {
    if !gate::is_active() {
        return real();
    }
    let mut context = core::ptr::null_mut();
    // SAFETY: a valid place, and the program's own green context.
    unsafe { driver::cuCtxFromGreenCtx(&mut context, green) };
    // Before it is destroyed, so that its work is not asked about afterwards. The primary context waits for that work as well.
    gpu::attached().for_each(|gpu| gpu.work.forget_foreign(context));
    let result = real();
    if result != SUCCESS {
        return result;
    }
    capture::end_all_in(context);
    let mut greens = GREEN.lock();
    let known = greens.iter().position(|(handle, _)| *handle == green as usize);
    let device = known.map(|at| greens.swap_remove(at).1);
    drop(greens);
    if let Some(device) = device {
        // SAFETY: retained when it was made.
        releasing_primary(device, || unsafe { driver::cuDevicePrimaryCtxRelease_v2(device) });
    }
    result
}

/// A capture refers to memory. So it begins, like work, when memory is on the GPU, and memory stays there until it ends.
fn beginning_capture(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    gated::naming_for(stream, || {
        if gate::is_active()
            && let Some(gpu) = gpu::of_stream(stream)
        {
            // The stream cannot be asked while it captures.
            gpu.work.mark_stream(stream);
        }
        capture::begin(stream, real)
    })
}

fn ending_capture(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    // It still captures if this was the wrong thread to end it.
    if capture::any() && !capture::is_capturing(stream) {
        capture::end(stream);
    }
    result
}

/// A stream that waits for an event of a capture joins the capture. A graph of streams of several GPUs is work of all of them.
fn waiting(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    if !(capture::any() && gate::is_active() && gpu::are_several()) || capture::is_capturing(stream) {
        return real();
    }
    let (result, joined) = capture::joining(stream, real);
    if let Some([Some(gpu), Some(other)]) = joined.map(|contexts| contexts.map(gpu::of_context)) {
        crate::sys::errno::preserved(|| couple(gpu, other));
    }
    result
}

/// Looks up the real function of every hook.
fn resolve_hooks() {
    hooks::all().for_each(|hook| {
        hook.real.find();
    });
}

hooks! { real, flavour;
    [cuInit] (flags: u32) {
        deepbind::look();
        if !crate::sys::errno::preserved(client::request_placement) {
            return ERROR_NO_DEVICE;
        }
        let result = real();
        if result != SUCCESS {
            crate::sys::errno::preserved(client::cancel_placement);
            return result;
        }
        if crate::sys::errno::preserved(|| client::start(resolve_hooks, hooks::shut_driver)) { result } else { ERROR_SYSTEM_NOT_READY }
    }

    // ---- look-ups ----
    [cuGetProcAddress] (name: *const c_char, function: *mut P, version: i32, flags: u64) {
        // SAFETY: the program's own pointer.
        unsafe { lookup::replace(real(), function) }
    }
    [cuGetProcAddress_v2] (name: *const c_char, function: *mut P, version: i32, flags: u64, status: P) {
        // SAFETY: the program's own pointer.
        unsafe { lookup::replace(real(), function) }
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
    [cuDevicePrimaryCtxRelease | cuDevicePrimaryCtxRelease_v2] (device: CUdevice) { releasing_primary(device, real) }
    [cuDevicePrimaryCtxReset | cuDevicePrimaryCtxReset_v2] (device: CUdevice) { resetting_primary(device, real) }
    [cuCtxCreate | cuCtxCreate_v2] (context: *mut CUcontext, flags: u32, device: CUdevice) { creating(device, context, real) }
    [cuCtxCreate_v3] (context: *mut CUcontext, affinity: P, n: i32, flags: u32, device: CUdevice) {
        creating(device, context, real)
    }
    [cuCtxCreate_v4] (context: *mut CUcontext, params: P, flags: u32, device: CUdevice) { creating(device, context, real) }
    [cuCtxDestroy | cuCtxDestroy_v2] (context: CUcontext) { destroying(gpu_of(context), context, real, || true) }
    [cuCtxAttach] (place: *mut CUcontext, flags: u32) {
        let result = real();
        // SAFETY: the driver has just written there.
        if let (SUCCESS, Some(context)) = (result, unsafe { place.as_ref() })
            && let Some(gpu) = gpu_of(*context)
        {
            gpu.work.add_context(*context);
        }
        result
    }
    [cuCtxDetach] (context: CUcontext) { releasing(gpu_of(context), context, real, || true) }
    [cuGreenCtxCreate] (place: *mut P, resources: P, device: CUdevice, flags: u32) { making_green(place, device, real) }
    [cuGreenCtxDestroy] (green: P) { destroying_green(green, real) }

    [cuCtxEnablePeerAccess] (peer: CUcontext, flags: u32) {
        let result = real();
        if result == SUCCESS {
            route::enabled(peer);
        }
        result
    }

    // ---- captures ----
    [cuStreamBeginCapture | cuStreamBeginCapture_ptsz] (stream: CUstream) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz] (stream: CUstream, mode: i32) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamBeginCaptureToGraph | cuStreamBeginCaptureToGraph_ptsz] (
        stream: CUstream, graph: CUgraph, dependencies: P, data: P, n: Size, mode: i32,
    ) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamBeginRecaptureToGraph | cuStreamBeginRecaptureToGraph_ptsz] (
        stream: CUstream, mode: i32, graph: CUgraph, changed: P, data: P,
    ) { beginning_capture(flavour.stream(stream), real) }
    [cuStreamWaitEvent | cuStreamWaitEvent_ptsz] (stream: CUstream, event: CUevent, flags: u32) {
        waiting(flavour.stream(stream), real)
    }
    [cuStreamEndCapture | cuStreamEndCapture_ptsz] (stream: CUstream, graph: P) { ending_capture(flavour.stream(stream), real) }
    [cuStreamDestroy | cuStreamDestroy_v2] (stream: CUstream) {
        capture::end(stream);
        if gate::is_active() {
            crate::sys::errno::preserved(|| gpu::attached().for_each(|gpu| gpu.work.forget_stream(stream)));
        }
        real()
    }
}
