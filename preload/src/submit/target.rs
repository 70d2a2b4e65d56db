//! The target of a call: the GPU of the stream that the call names, otherwise the GPU of the current
//! context. Also names streams, so that later calls recognize a stream by its name.

use super::{LANES, Lane, captures::context_of, epoch, points::is_legacy};
use crate::driver::{
    self,
    context::{current_or_null, with_current},
    query,
    types::*,
};
use core::sync::atomic::{AtomicI32, AtomicUsize, Ordering};

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

/// Called before the program creates a context on this GPU, which is attached. `None` stands for a GPU
/// that this library does not manage.
pub fn add_gpu(lane: Option<&Lane>) {
    let used = lane.map_or(OTHERS, |lane| lane.index as i32);
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

/// Returns the GPU of a stream, or `None` if this library does not manage it. Default streams belong to
/// the current context.
#[inline]
pub fn of_stream(stream: CUstream) -> Option<&'static Lane> {
    match ONLY.load(Ordering::Relaxed) {
        NONE | OTHERS => None,
        SEVERAL => of_device(device_of(stream)?),
        only => LANES.get(only as usize),
    }
}

/// Returns the GPU of a context, or `None` if this library does not manage it.
pub fn of_context(context: CUcontext) -> Option<&'static Lane> {
    of_device(device_in(context)?)
}

/// Returns the GPU with that ordinal, if the program has created a context there.
pub fn of_device(device: CUdevice) -> Option<&'static Lane> {
    LANES.get(usize::try_from(device).ok()?).filter(|lane| lane.is_attached())
}

/// Returns the driver's ordinal of a stream's GPU, whether or not this library manages the GPU.
pub fn device_of(stream: CUstream) -> Option<CUdevice> {
    device_in(context_of(stream)?)
}

fn device_in(context: CUcontext) -> Option<CUdevice> {
    // SAFETY: the place is valid.
    let ask = || query::value(|device| unsafe { driver::cuCtxGetDevice(device) }).ok();
    if context == current_or_null() { ask() } else { with_current(context as usize, ask).ok()? }
}

/// The only context that the program has had so far. 0 before the first context, [`SEVERAL_CONTEXTS`] from the
/// second on.
static ONLY_CONTEXT: AtomicUsize = AtomicUsize::new(0);

const SEVERAL_CONTEXTS: usize = usize::MAX;

/// Whether the program has had no context other than this.
fn is_only(context: CUcontext) -> bool {
    !context.is_null() && ONLY_CONTEXT.load(Ordering::Acquire) == context as usize
}

/// Records that the program has this context, on any GPU, including GPUs that this library does not
/// support. Called before any thread except the creating thread can launch work in the context.
pub fn add_context(context: CUcontext) {
    let context = context as usize;
    let only = ONLY_CONTEXT.compare_exchange(0, context, Ordering::AcqRel, Ordering::Acquire);
    if only.is_err_and(|only| only != context) {
        expect_contexts();
    }
}

/// Records that the program has had a second context or is about to create one. From now on, the
/// handle of the legacy stream does not identify the stream.
pub fn expect_contexts() {
    if ONLY_CONTEXT.swap(SEVERAL_CONTEXTS, Ordering::AcqRel) != SEVERAL_CONTEXTS {
        epoch::end();
    }
}

/// Returns a value that identifies a stream across launches, or `None` for the legacy stream without a
/// context. The legacy stream differs between contexts, so it is identified by its context, which must
/// be queried. While the program has had only one context, the handle suffices.
#[inline]
pub fn name_of(stream: CUstream) -> Option<usize> {
    if !is_legacy(stream) {
        return Some(stream as usize);
    }
    let context = current_or_null();
    let name = if is_only(context) { stream as usize } else { context as usize };
    (!context.is_null()).then_some(name)
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
