//! Creating and destroying contexts, and stream captures. The library must know about these calls. They
//! never wait for the GPU lock.

use super::access::with_memory_of;
use crate::{
    connection,
    driver::{self, query, types::*},
    gpu::{self, Gpu, peers::couple, reservation},
    memory::mover::Mover,
    registry::{driver_memory, pools, shared},
    submit::{self, captures},
    sys::{
        sync::{Mutex, Rank},
        time::{self, Instant},
    },
};
use alloc::vec::Vec;
use core::{ffi::c_void, time::Duration};

type P = *mut c_void;

/// The longest wait for memory for a context, and the interval between attempts.
const CONTEXT_TIMEOUT: Duration = Duration::from_secs(2);
const CONTEXT_RETRY: Duration = Duration::from_millis(5);

/// Creates a context on this GPU, and registers it with the library.
pub fn create_context(device: CUdevice, place: *mut CUcontext, real: impl Fn() -> CUresult) -> CUresult {
    if !Gpu::attach(device, shared::introduce) {
        return ERROR_OUT_OF_MEMORY;
    }
    let begin = Instant::now();
    let create = || loop {
        // The scheduler has made room, but a program that has just ended may still be releasing its memory.
        match real() {
            ERROR_OUT_OF_MEMORY if connection::is_connected() && begin.elapsed() < CONTEXT_TIMEOUT => {
                time::sleep(CONTEXT_RETRY)
            }
            result => break result,
        }
    };
    let result = reservation::retry_on(|| gpu::by_ordinal(device).filter(|gpu| gpu.is_introduced()), create);
    // SAFETY: the driver has just written the context there.
    let context = unsafe { place.as_ref() }.filter(|_| result == SUCCESS);
    if let Some(context) = context {
        submit::target::add_context(*context);
    }
    if let (Some(context), Some(gpu)) = (context, gpu::by_ordinal(device)) {
        gpu.add_context(*context);
        if gpu::are_several() {
            pools::on_first_use(gpu);
        }
        connection::wake();
    }
    result
}

/// Destroys a context. No thread of this library uses the context during the call.
pub fn destroy_context(
    gpu: Option<&Gpu>,
    context: CUcontext,
    real: impl FnOnce() -> CUresult,
    is_gone: impl FnOnce() -> bool,
) -> CUresult {
    let Some(gpu) = gpu else { return real() };
    if !gpu.work.begin_destroying(context) {
        return real();
    }
    let left = gpu.space().map(|space| gpu.report_after(space, || Mover::leave(&gpu.moving, context, space)));
    // The driver waits for the context's work, and that work may need another thread of the
    // program. So this thread holds no lock.
    let result = real();
    let is_gone = result == SUCCESS && is_gone();
    // The mover stays locked, so that no thread adds a new context with this handle before the
    // old context is forgotten.
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
    result
}

/// Forgets all state of a context that has been destroyed.
pub fn forget(gpu: &Gpu, context: CUcontext) {
    let is_last = gpu.work.is_last(context);
    captures::end_all_in(context);
    driver_memory::drop_context(gpu, context, is_last);
    shared::drop_context(gpu, context, is_last);
    gpu.change(|space| space.drop_context(context as usize, is_last));
}

/// Returns the GPU of a context that the library knows.
pub fn gpu_of(context: CUcontext) -> Option<&'static Gpu> {
    gpu::in_use().find(|gpu| gpu.work.has_context(context))
}

/// Drops one reference to a context. Only the last drop destroys the context. Until then, all its work
/// continues.
pub fn release_context(
    gpu: Option<&Gpu>,
    context: CUcontext,
    real: impl Fn() -> CUresult,
    is_gone: impl FnOnce() -> bool,
) -> CUresult {
    let others_left = gpu.and_then(|gpu| gpu.work.release_use(context, &real));
    others_left.unwrap_or_else(|| destroy_context(gpu, context, real, is_gone))
}

pub fn primary_of(gpu: Option<&Gpu>) -> CUcontext {
    gpu.and_then(Gpu::primary).unwrap_or(core::ptr::null_mut())
}

pub fn is_primary_gone(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: `flags` and `active` outlive the call.
    unsafe { driver::cuDevicePrimaryCtxGetState(device, &mut flags, &mut active) == SUCCESS && active == 0 }
}

pub fn release_primary(device: CUdevice, real: impl Fn() -> CUresult) -> CUresult {
    let gpu = gpu::by_ordinal(device);
    release_context(gpu, primary_of(gpu), real, || is_primary_gone(device))
}

/// Resets the primary context of a device, regardless of its reference count.
pub fn reset_primary(device: CUdevice, real: impl FnOnce() -> CUresult) -> CUresult {
    let gpu = gpu::by_ordinal(device);
    destroy_context(gpu, primary_of(gpu), real, || is_primary_gone(device))
}

/// Retains the primary context of a GPU as if the program had done so. Returns whether that succeeded.
pub fn retain_primary(device: CUdevice) -> bool {
    let mut primary = core::ptr::null_mut();
    let place = &raw mut primary;
    // SAFETY: `place` outlives the call.
    let result = create_context(device, place, || unsafe { driver::cuDevicePrimaryCtxRetain(place, device) });
    if let (SUCCESS, Some(gpu)) = (result, gpu::by_ordinal(device)) {
        gpu.set_primary(primary);
    }
    result == SUCCESS
}

/// Green contexts, each with the GPU of its primary context. The primary context stays retained
/// until the last green context is destroyed, because fences and marks in the primary context also
/// wait for the work of the green contexts.
static GREEN: Mutex<Vec<(usize, CUdevice)>> = Mutex::new(Rank::GreenContexts, Vec::new());

pub fn make_green(place: *const P, device: CUdevice, real: impl FnOnce() -> CUresult) -> CUresult {
    if !Gpu::attach(device, shared::introduce) {
        return ERROR_OUT_OF_MEMORY;
    }
    let result = real();
    // The library registers other contexts when they are created, but a green context only at its
    // first launch. So it must expect a second context from now on.
    submit::target::expect_contexts();
    // SAFETY: the driver has just written the green context there.
    if let (SUCCESS, Some(green)) = (result, unsafe { place.as_ref() })
        && retain_primary(device)
    {
        GREEN.lock().push((*green as usize, device));
    }
    result
}

pub fn destroy_green(green: P, real: impl FnOnce() -> CUresult) -> CUresult {
    // SAFETY: the place is valid, and `green` is the program's own green context.
    let context = query::handle(|context| unsafe { driver::cuCtxFromGreenCtx(context, green) });
    let context = context.unwrap_or(core::ptr::null_mut());
    // Forgets the context before it is destroyed, so that no thread queries its work afterwards. Fences in
    // the primary context wait for that work too.
    gpu::in_use().for_each(|gpu| gpu.work.forget_foreign(context));
    let result = real();
    if result != SUCCESS {
        return result;
    }
    captures::end_all_in(context);
    let mut greens = GREEN.lock();
    let known = greens.iter().position(|(handle, _)| *handle == green as usize);
    let device = known.map(|at| greens.swap_remove(at).1);
    drop(greens);
    if let Some(device) = device {
        // SAFETY: `make_green` has retained the primary context.
        release_primary(device, || unsafe { driver::cuDevicePrimaryCtxRelease_v2(device) });
    }
    result
}

/// Begins a capture. A capture refers to memory. So the call waits at the gate until the memory is
/// on the GPU, and the memory stays there until the capture ends.
pub fn begin_capture(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    with_memory_of(stream, || {
        if let Some(gpu) = gpu::of_stream(stream) {
            // Marks the stream now, because a capturing stream cannot be queried.
            gpu.work.mark_stream(stream);
        }
        captures::begin(stream, real)
    })
}

pub fn end_capture(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    // If the program made the call on the wrong thread, the call has failed, and the stream is
    // still capturing.
    if captures::any() && !captures::is_capturing(stream) {
        captures::end(stream);
    }
    result
}

/// Makes a stream wait for an event. If the event is part of a capture, the stream joins that capture.
/// A graph that is captured from streams of several GPUs is work of each of those GPUs.
pub fn wait_for_event(stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    if !(captures::any() && gpu::are_several()) || captures::is_capturing(stream) {
        return real();
    }
    let (result, joined) = captures::join(stream, real);
    if let Some([Some(gpu), Some(other)]) = joined.map(|contexts| contexts.map(gpu::of_context)) {
        couple(gpu, other);
    }
    result
}
