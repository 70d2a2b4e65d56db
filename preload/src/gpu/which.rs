//! The GPU that a call concerns: the GPU of the stream that the call names, otherwise the GPU of the
//! current context.

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
/// The program has contexts only on GPUs that this library does not manage.
const OTHERS: i32 = -2;
/// The program has contexts on several GPUs, at least one of them attached. The driver must be queried
/// for the GPU of a call.
const SEVERAL: i32 = -3;
/// The GPU on which this process has contexts, if there is only one such GPU. A launch then need
/// not query the driver for its GPU.
static ONLY: AtomicI32 = AtomicI32::new(NONE);

/// Called before the program creates a context on this GPU, which is attached.
pub(super) fn now_in_use(gpu: &Gpu) {
    add(gpu.index as i32);
}

/// Called before the program creates a context on a GPU that this library does not manage.
pub(super) fn other_in_use() {
    add(OTHERS);
}

fn add(used: i32) {
    let _ = ONLY.fetch_update(Ordering::AcqRel, Ordering::Acquire, |only| Some(with(only, used)));
}

fn with(only: i32, used: i32) -> i32 {
    if only == NONE || only == used { used } else { SEVERAL }
}

/// Whether this process uses an attached GPU and another GPU, attached or not.
#[inline]
pub fn are_several() -> bool {
    ONLY.load(Ordering::Relaxed) == SEVERAL
}

/// Returns the GPU of the calling thread's current context, or `None` if this library does not manage
/// it.
#[inline]
pub fn current() -> Option<&'static Gpu> {
    of_stream(CTX_DEFAULT_STREAM)
}

/// Returns the GPU of a stream, or `None` if this library does not manage it. Default streams belong to
/// the current context.
#[inline]
pub fn of_stream(stream: CUstream) -> Option<&'static Gpu> {
    match ONLY.load(Ordering::Relaxed) {
        NONE | OTHERS => None,
        SEVERAL => device_of(stream).and_then(by_ordinal),
        only => GPUS.get(only as usize),
    }
}

/// Returns the driver's ordinal of a stream's GPU, whether or not this library manages the GPU.
pub fn device_of(stream: CUstream) -> Option<CUdevice> {
    device_in(work::context_of(stream)?)
}

/// Returns the GPU of a context, or `None` if this library does not manage it.
pub fn of_context(context: CUcontext) -> Option<&'static Gpu> {
    device_in(context).and_then(by_ordinal)
}

fn device_in(context: CUcontext) -> Option<CUdevice> {
    let ask = || {
        let mut device = 0;
        // SAFETY: `device` outlives the call.
        (unsafe { driver::cuCtxGetDevice(&mut device) } == SUCCESS).then_some(device)
    };
    if context == current_or_null() { ask() } else { with_current(context as usize, ask).ok()? }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_is_queried_only_if_contexts_use_several_gpus() {
        let after = |used: &[i32]| used.iter().fold(NONE, |only, used| with(only, *used));
        assert_eq!(after(&[]), NONE);
        assert_eq!(after(&[3, 3]), 3);
        assert_eq!(after(&[OTHERS, OTHERS]), OTHERS);
        for used in [[0, 1], [0, OTHERS], [OTHERS, 0]] {
            assert_eq!(after(&used), SEVERAL);
            assert_eq!(after(&[used[0], used[1], used[0]]), SEVERAL);
        }
    }
}
