//! Stream captures, which calls of this library must not invalidate.
//!
//! Depending on its mode, a capture is invalidated by a concurrent query or context-wide event. [`beside`] makes such
//! calls either while no capture can begin, or with the thread in relaxed mode, in which queries are allowed during a
//! capture (driver 580).

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
/// The number of threads in [`synchronizing`], and the time after which each has begun its call.
static SYNCHRONIZING: AtomicUsize = AtomicUsize::new(0);
const SYNCHRONIZING_BEGINS: Duration = Duration::from_millis(1);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Rank::Captures, Vec::new());

/// A capturing stream, and its context.
#[derive(Debug, Clone, Copy)]
struct Member {
    stream: usize,
    /// The per-thread stream has one handle in all threads, so the thread identifies it too.
    thread: usize,
    context: usize,
}

#[derive(Debug)]
struct Capture {
    /// The driver's number; 0 if it assigns none.
    id: u64,
    /// The origin stream, which ends the capture, then the streams that have joined it. The capture ends if the context
    /// of the origin is destroyed.
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
    // SAFETY: `status` outlives the call, which is allowed at any time. It fails for the legacy stream during a
    // capture, but that stream does not capture.
    let result = unsafe { driver::cuStreamIsCapturing(stream, &mut status) };
    result == SUCCESS && status != STREAM_CAPTURE_STATUS_NONE
}

/// Runs `call` so that it invalidates no capture. Its argument says whether a capture is active: `call` must then leave
/// out operations that are never allowed during one (context-wide events and synchronisation). No capture can begin
/// until `call` returns, so it must be short.
pub fn beside<R>(call: impl FnOnce(bool) -> R) -> R {
    let _no_start = STARTING.read();
    if any() { relaxed(|| call(true)) } else { call(false) }
}

/// Runs `call`, which may take long, so that it invalidates no capture of another thread.
pub fn relaxed<R>(call: impl FnOnce() -> R) -> R {
    let mut mode = STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: `mode` outlives both calls; the second one restores the thread's mode.
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    let result = call();
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    result
}

/// Makes a call that waits for a whole context, which invalidates any capture that is active when it begins. `None` if
/// one is active.
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
    // Queried before the stream captures.
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

/// Makes a call that waits for an event. The stream, which does not capture, may join a capture that way; then this
/// returns the contexts of the stream and of the capture.
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

/// The context of a capturing stream; `None` if it is not known.
pub(super) fn context_of_member(stream: CUstream) -> Option<CUcontext> {
    let wanted = Member::of(stream, core::ptr::null_mut());
    let captures = CAPTURES.lock();
    let member = captures.iter().flat_map(|capture| &capture.members).find(|member| member.is(&wanted));
    member.map(|member| member.context as CUcontext)
}

/// The driver's number of this stream's capture; 0 if it assigns none.
fn id_of(stream: CUstream) -> u64 {
    let (mut status, mut id) = (STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY: `status` and `id` outlive the call, which is allowed at any time.
    unsafe { driver::cuStreamGetCaptureInfo(stream, &mut status, &mut id) };
    id
}

/// Called when the capture on this stream has ended, or the stream has been destroyed.
pub fn end(stream: CUstream) {
    if !is_known() {
        return;
    }
    let wanted = Member::of(stream, core::ptr::null_mut());
    forget(|capture| capture.origin().is_none_or(|origin| origin.is(&wanted)));
}

/// Called when a context has been destroyed, and with it the captures in it.
pub fn end_all_in(context: CUcontext) {
    forget(|capture| capture.origin().is_none_or(|origin| origin.context == context as usize));
}

/// Whether there may be known captures. False in the child of a fork: the count is the parent's, and another thread may
/// have held the lock.
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
