//! Stream captures, which calls of this library must not break.
//!
//! Depending on its mode, a capture is broken by a query or a context-wide event beside it. [`beside`] makes such calls either
//! while no capture can begin, or with the thread in relaxed mode, in which queries beside a capture are allowed (driver 580).

use crate::{
    driver::{self, context::current_context, types::*},
    gate::{self, epoch, threads},
    sys::sync::{Mutex, RwLock},
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The number of captures in this process. Changed under the write lock of [`STARTING`].
static COUNT: AtomicUsize = AtomicUsize::new(0);
static STARTING: RwLock<()> = RwLock::new(());
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Vec::new());

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Capture {
    stream: usize,
    /// The per-thread stream has one handle in all threads, so the thread identifies it, too.
    thread: usize,
    /// The context that ends the capture if it is destroyed.
    context: usize,
}

impl Capture {
    fn on(stream: CUstream) -> Self {
        let thread = if stream == STREAM_PER_THREAD { core::ptr::from_ref(threads::mine()) as usize } else { 0 };
        Self { stream: stream as usize, thread, context: current_context().map_or(0, |context| context as usize) }
    }
}

#[inline]
pub fn any() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// Whether work submitted to this stream goes into a graph instead of to the GPU.
pub fn is_capturing(stream: CUstream) -> bool {
    let mut status = STREAM_CAPTURE_STATUS_NONE;
    // SAFETY: a valid place; allowed at any time. It fails for the legacy stream beside a capture, which does not capture.
    let result = unsafe { driver::cuStreamIsCapturing(stream, &mut status) };
    result == SUCCESS && status != STREAM_CAPTURE_STATUS_NONE
}

/// Runs `call` so that it breaks no capture. Its argument says whether a capture is under way: it must then leave out what is
/// never allowed beside one (context-wide events and synchronisation). No capture begins meanwhile, so `call` must be short.
pub fn beside<R>(call: impl FnOnce(bool) -> R) -> R {
    let _no_start = STARTING.read();
    if any() { relaxed(|| call(true)) } else { call(false) }
}

/// Runs `call`, which may take long, so that it breaks no capture of another thread.
pub fn relaxed<R>(call: impl FnOnce() -> R) -> R {
    let mut mode = STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: a valid place; the second call gives the thread back the mode it had.
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let result = call();
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    result
}

/// `cuStreamBeginCapture` in any of its versions.
pub fn begin(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if !gate::is_active() {
        return call();
    }
    let _start = STARTING.write();
    let result = call();
    if result == SUCCESS {
        let mut captures = CAPTURES.lock();
        captures.push(Capture::on(stream));
        COUNT.store(captures.len(), Ordering::SeqCst);
        epoch::end();
    }
    result
}

/// The capture on this stream has ended, or the stream is gone.
pub fn end(stream: CUstream) {
    if !is_known() {
        return;
    }
    let Capture { stream, thread, .. } = Capture::on(stream);
    forget(|capture| capture.stream == stream && capture.thread == thread);
}

/// A context is gone, and the captures in it.
pub fn end_all_in(context: CUcontext) {
    forget(|capture| capture.context == context as usize);
}

/// In the child of a fork the count is the parent's, and another thread may have held the lock.
fn is_known() -> bool {
    any() && gate::is_active()
}

fn forget(which: impl Fn(&Capture) -> bool) {
    if is_known() {
        let mut captures = CAPTURES.lock();
        captures.retain(|capture| !which(capture));
        COUNT.store(captures.len(), Ordering::SeqCst);
    }
}
