//! Which streams are being captured into graphs, so that nothing of ours breaks a capture.
//!
//! A capture is broken by a query or a context-wide event beside it, depending on its mode (the table is in the
//! project's notes on the driver). [`beside`] runs such calls either while no capture can begin, or with the calling
//! thread in relaxed mode, in which queries beside a capture are allowed (driver 580).

use crate::{
    client,
    cuda::*,
    driver,
    sys::sync::{Mutex, RwLock},
    threads,
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};

/// How many captures are under way in this process. Changed under the write lock of [`STARTING`].
static COUNT: AtomicUsize = AtomicUsize::new(0);
static STARTING: RwLock<()> = RwLock::new(());
/// The streams they began on. The per-thread stream has one handle for all threads, so its thread is part of its name.
static STREAMS: Mutex<Vec<(usize, usize)>> = Mutex::new(Vec::new());

fn name(stream: CUstream) -> (usize, usize) {
    let thread = if stream == STREAM_PER_THREAD { core::ptr::from_ref(threads::mine()) as usize } else { 0 };
    (stream as usize, thread)
}

#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Whether what is submitted to this stream goes into a graph instead of to the GPU.
pub fn is_capturing(stream: CUstream) -> bool {
    let mut status = STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a valid place; allowed at any time. It fails for the legacy stream beside a capture, which does not capture.
    let result = unsafe { driver::cuStreamIsCapturing(stream, &mut status) };
    result == SUCCESS && status != STREAM_CAPTURE_STATUS_NONE
}

/// Runs `call` so that it breaks no capture; it is told whether one is under way, and must then leave out what is never
/// allowed beside one (context-wide events and syncs). No capture begins meanwhile, so `call` must be short.
pub fn beside<R>(call: impl FnOnce(bool) -> R) -> R {
    let _no_start = STARTING.read();
    if !any() {
        return call(false);
    }
    let mut mode = STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: a valid place; the second call gives the thread back the mode it had.
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let result = call(true);
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    result
}

/// `cuStreamBeginCapture` in any version.
pub fn begin(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if !client::is_on() {
        return call();
    }
    let _start = STARTING.write();
    let result = call();
    if result == SUCCESS {
        let mut streams = STREAMS.lock();
        streams.push(name(stream));
        COUNT.store(streams.len(), Ordering::SeqCst);
    }
    result
}

/// The capture of that stream has ended, or the stream is gone.
pub fn end(stream: CUstream) {
    if any() {
        let mut streams = STREAMS.lock();
        if let Some(at) = streams.iter().position(|s| *s == name(stream)) {
            streams.swap_remove(at);
        }
        COUNT.store(streams.len(), Ordering::SeqCst);
    }
}
