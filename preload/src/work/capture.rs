//! Stream captures, which calls of this library must not break.
//!
//! Depending on its mode, a capture is broken by a query or a context-wide event beside it. [`beside`] makes such calls either
//! while no capture can begin, or with the thread in relaxed mode, in which queries beside a capture are allowed (driver 580).

use super::streams::context_of;
use crate::{
    driver::{self, types::*},
    gate::{self, epoch, threads},
    sys::{
        sync::{Mutex, Rank, RwLock},
        time,
    },
};
use alloc::{vec, vec::Vec};
use core::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

/// The number of captures in this process. Changed under the write lock of [`STARTING`].
static COUNT: AtomicUsize = AtomicUsize::new(0);
static STARTING: RwLock<()> = RwLock::new(Rank::CaptureStart, ());
/// The number of threads that are in [`synchronizing`], and the time after which each has begun its call.
static SYNCHRONIZING: AtomicUsize = AtomicUsize::new(0);
const SYNCHRONIZING_BEGINS: Duration = Duration::from_millis(1);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Rank::Captures, Vec::new());

/// A stream that captures, and its context.
#[derive(Debug, Clone, Copy)]
struct Member {
    stream: usize,
    /// The per-thread stream has one handle in all threads, so the thread identifies it, too.
    thread: usize,
    context: usize,
}

#[derive(Debug)]
struct Capture {
    /// The driver's number; 0 if it gives none.
    id: u64,
    /// First the stream that ends it, then those that have joined it. If the context of the first is destroyed, the capture ends.
    members: Vec<Member>,
}

impl Member {
    fn of(stream: CUstream, context: CUcontext) -> Self {
        let thread = if stream == STREAM_PER_THREAD { core::ptr::from_ref(threads::mine()) as usize } else { 0 };
        Self { stream: stream as usize, thread, context: context as usize }
    }

    fn is(&self, other: &Self) -> bool {
        self.stream == other.stream && self.thread == other.thread
    }
}

impl Capture {
    fn origin(&self) -> Option<&Member> {
        self.members.first()
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

/// Makes a call that waits for a whole context, which breaks any capture if it begins beside one. `None` if one is under way.
pub fn synchronizing<R>(call: impl FnOnce() -> R) -> Option<R> {
    {
        let _no_start = STARTING.read();
        if any() {
            return None;
        }
        SYNCHRONIZING.fetch_add(1, Ordering::SeqCst);
    }
    let result = call();
    SYNCHRONIZING.fetch_sub(1, Ordering::SeqCst);
    Some(result)
}

/// `cuStreamBeginCapture` in any of its versions.
pub fn begin(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    if !gate::is_active() {
        return call();
    }
    // Before it captures.
    let context = context_of(stream).unwrap_or(core::ptr::null_mut());
    let _start = STARTING.write();
    if SYNCHRONIZING.load(Ordering::SeqCst) > 0 {
        time::sleep(SYNCHRONIZING_BEGINS);
    }
    let result = call();
    if result == SUCCESS {
        let mut captures = CAPTURES.lock();
        captures.push(Capture { id: id_of(stream), members: vec![Member::of(stream, context)] });
        COUNT.store(captures.len(), Ordering::SeqCst);
        epoch::end();
    }
    result
}

/// Makes a call by which this stream, which does not capture, may join a capture: it waits for an event. Returns the contexts of
/// the stream and of the capture if it does.
pub fn joining(stream: CUstream, call: impl FnOnce() -> CUresult) -> (CUresult, Option<[CUcontext; 2]>) {
    let Some(context) = context_of(stream) else { return (call(), None) };
    let result = call();
    if result != SUCCESS || !is_capturing(stream) {
        return (result, None);
    }
    let id = id_of(stream);
    let mut captures = CAPTURES.lock();
    let Some(capture) = captures.iter_mut().find(|capture| capture.id == id) else { return (result, None) };
    let origin = capture.origin().map(|origin| origin.context as CUcontext);
    capture.members.push(Member::of(stream, context));
    (result, origin.map(|origin| [context, origin]))
}

/// The context of a stream that captures; `None` if it is not known.
pub(super) fn context_of_member(stream: CUstream) -> Option<CUcontext> {
    let wanted = Member::of(stream, core::ptr::null_mut());
    let captures = CAPTURES.lock();
    let member = captures.iter().flat_map(|capture| &capture.members).find(|member| member.is(&wanted));
    member.map(|member| member.context as CUcontext)
}

/// The driver's number of the capture of this stream; 0 if it gives none.
fn id_of(stream: CUstream) -> u64 {
    let (mut status, mut id) = (STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY: valid places; allowed at any time.
    unsafe { driver::cuStreamGetCaptureInfo(stream, &mut status, &mut id) };
    id
}

/// The capture on this stream has ended, or the stream is gone.
pub fn end(stream: CUstream) {
    if !is_known() {
        return;
    }
    let wanted = Member::of(stream, core::ptr::null_mut());
    forget(|capture| capture.origin().is_none_or(|origin| origin.is(&wanted)));
}

/// A context is gone, and the captures in it.
pub fn end_all_in(context: CUcontext) {
    forget(|capture| capture.origin().is_none_or(|origin| origin.context == context as usize));
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
