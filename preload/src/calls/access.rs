//! Calls that name memory, which must be on the GPU, and copies.

use super::allocate::wait_beside_capture;
use crate::{
    copies::route::Route,
    driver::{self, types::*},
    gpu::{self, Gpu},
    submit::{Lane, captures, closed},
    sys::{errno, thread::stack_pointer},
};

/// The weight of a call that submits no work.
const NOTHING: u32 = 0;

/// The weight of a copy of `n` bytes, in kernels.
pub fn bytes(n: usize) -> u32 {
    1 + u32::try_from(n >> 24).unwrap_or(u32::MAX).min(1 << 10)
}

/// Makes a call that submits no work but names memory. The driver looks up that memory, so it must be
/// on the GPU. During a capture the call passes no gate, because memory then stays on the GPU, and
/// allocations are mapped immediately.
#[inline]
pub fn with_memory(call: impl FnOnce() -> CUresult) -> CUresult {
    with_memory_of(CTX_DEFAULT_STREAM, call)
}

/// Makes a call that names memory of this stream's GPU.
pub fn with_memory_of(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if captures::any() {
        gpu::of_stream(stream).inspect(|gpu| errno::preserve(|| wait_beside_capture(gpu)));
        call()
    } else {
        Lane::pass(stack_pointer(), stream, NOTHING, closed::MEMORY, call)
    }
}

/// Makes a call that names memory of this GPU, regardless of the current context.
pub fn with_memory_on(gpu: &'static Gpu, call: impl FnOnce() -> CUresult) -> CUresult {
    if captures::any() {
        errno::preserve(|| wait_beside_capture(gpu));
        call()
    } else {
        gpu.inside(closed::MEMORY, call)
    }
}

/// Makes a copy along this route.
#[inline]
pub fn copy_along(route: Route, stream: CUstream, weight: u32, call: impl FnOnce() -> CUresult) -> CUresult {
    match route.gate {
        None => Lane::pass(stack_pointer(), stream, weight, closed::FOR_COPIES, call),
        // The library cannot track the stream's work. So the work is completed before the thread leaves the
        // gate.
        Some(gpu) => gpu.inside(closed::FOR_COPIES, || match call() {
            SUCCESS if !captures::is_capturing(stream) => {
                // SAFETY: the program has just used the stream.
                captures::in_relaxed_mode(|| unsafe { driver::cuStreamSynchronize(stream) })
            }
            result => result,
        }),
    }
}

/// Makes a call that names memory of several GPUs.
pub fn with_memory_along(route: Route, call: impl FnOnce() -> CUresult) -> CUresult {
    match route.gate {
        None => with_memory(call),
        Some(gpu) => with_memory_on(gpu, call),
    }
}
