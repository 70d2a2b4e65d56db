//! Which GPU a call concerns: that of the stream which it names, and where it names none, that of the current context.

use super::{GPUS, Gpu, by_ordinal};
use crate::{
    driver::{
        self,
        context::{current_or_null, with_current},
        types::*,
    },
    work,
};
use core::sync::atomic::{AtomicI32, Ordering};

/// The program has no context yet.
const NONE: i32 = -1;
/// The program has contexts on several GPUs, or on one that this library leaves alone: the driver must be asked.
const SEVERAL: i32 = -2;
/// The only GPU on which this process has contexts, if there is just one: a launch then need not ask the driver where it goes.
static ONLY: AtomicI32 = AtomicI32::new(NONE);

/// The program is about to create a context on this GPU, which is attached.
pub(super) fn now_in_use(gpu: &Gpu) {
    let only = ONLY.compare_exchange(NONE, gpu.index as i32, Ordering::AcqRel, Ordering::Acquire);
    if only.is_err_and(|only| only != gpu.index as i32) {
        ONLY.store(SEVERAL, Ordering::Release);
    }
}

/// The program is about to create a context on a GPU that this library leaves alone.
pub(super) fn other_in_use() {
    ONLY.store(SEVERAL, Ordering::Release);
}

/// Whether this process uses more than one GPU, or one that this library leaves alone.
#[inline]
pub fn are_several() -> bool {
    ONLY.load(Ordering::Relaxed) == SEVERAL
}

/// The GPU of the calling thread's current context; `None` if this library leaves it alone.
#[inline]
pub fn current() -> Option<&'static Gpu> {
    of_stream(CTX_DEFAULT_STREAM)
}

/// The GPU of a stream; `None` if this library leaves it alone. The default streams are those of the current context.
#[inline]
pub fn of_stream(stream: CUstream) -> Option<&'static Gpu> {
    match ONLY.load(Ordering::Relaxed) {
        NONE => None,
        SEVERAL => device_of(stream).and_then(by_ordinal),
        only => GPUS.get(only as usize),
    }
}

/// The driver's ordinal of the GPU of a stream, whether this library handles it or not.
pub fn device_of(stream: CUstream) -> Option<CUdevice> {
    device_in(work::context_of(stream)?)
}

/// The GPU of a context; `None` if this library leaves it alone.
pub fn of_context(context: CUcontext) -> Option<&'static Gpu> {
    device_in(context).and_then(by_ordinal)
}

fn device_in(context: CUcontext) -> Option<CUdevice> {
    let ask = || {
        let mut device = 0;
        // SAFETY: a valid place.
        (unsafe { driver::cuCtxGetDevice(&mut device) } == SUCCESS).then_some(device)
    };
    if context == current_or_null() { ask() } else { with_current(context as usize, ask).ok()? }
}
