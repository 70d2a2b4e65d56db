//! Stream captures. Calls of this library must not invalidate them.
//!
//! Depending on its mode, a capture is invalidated by a concurrent query or context-wide event.
//! [`beside`] makes such calls while no capture can begin. If a capture is already active, `beside`
//! makes the calls in relaxed mode, in which queries are allowed (driver 580).

use super::{epoch, is_active, threads};
use crate::{
    driver::{self, after, context::current_or_null, query, types::*},
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

/// The number of captures in this process. It increases only under the write lock of [`STARTING`].
static COUNT: AtomicUsize = AtomicUsize::new(0);
static STARTING: RwLock<()> = RwLock::new(Rank::CaptureStart, ());
/// The number of threads in [`synchronize`]. After `SYNCHRONIZING_BEGINS`, each of them has entered
/// its driver call.
static SYNCHRONIZING: AtomicUsize = AtomicUsize::new(0);
const SYNCHRONIZING_BEGINS: Duration = Duration::from_millis(1);
static CAPTURES: Mutex<Vec<Capture>> = Mutex::new(Rank::Captures, Vec::new());

/// A capturing stream, and its context.
#[derive(Debug, Clone, Copy)]
struct Member {
    stream: usize,
    /// Identifies the per-thread stream, whose handle is the same in all threads; 0 for other streams.
    thread: usize,
    context: usize,
}

#[derive(Debug)]
struct Capture {
    /// The driver's ID of the capture; 0 if the driver assigns none.
    id: u64,
    /// The origin stream, which ends the capture, followed by the streams that have joined the capture. The
    /// capture also ends if the context of the origin is destroyed.
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

/// Whether work submitted to this stream is captured into a graph instead of running on the GPU.
pub fn is_capturing(stream: CUstream) -> bool {
    // The query fails for the legacy stream during a capture, but that stream itself never captures.
    query::is_capturing(stream) == Ok(true)
}

/// Runs `call` so that it invalidates no capture. The argument of `call` says whether a capture is
/// active. `call` must then omit operations that are never allowed during a capture: context-wide
/// events and synchronization. No capture can begin until `call` returns, so `call` must be short.
pub fn beside<R>(call: impl FnOnce(bool) -> R) -> R {
    let _no_start = STARTING.read();
    if any() { in_relaxed_mode(|| call(true)) } else { call(false) }
}

/// Runs `call`, which may take long, so that it invalidates no capture of another thread.
pub fn in_relaxed_mode<R>(call: impl FnOnce() -> R) -> R {
    let before = set_mode(STREAM_CAPTURE_MODE_RELAXED);
    let result = call();
    set_mode(before);
    result
}

/// Sets the calling thread's capture mode permanently, so that none of its calls invalidates a capture
/// of another thread.
pub fn relax_thread() {
    set_mode(STREAM_CAPTURE_MODE_RELAXED);
}

/// Sets the calling thread's capture mode, and returns the mode before.
fn set_mode(mut mode: i32) -> i32 {
    // SAFETY: `mode` outlives the call.
    unsafe { driver::cuThreadExchangeStreamCaptureMode(&mut mode) };
    mode
}

/// Makes a call that waits for a whole context. The start of such a call invalidates all active
/// captures, so this function returns `None` if a capture is active.
pub fn synchronize<R>(call: impl FnOnce() -> R) -> Option<R> {
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

/// Implements all versions of `cuStreamBeginCapture`.
pub fn begin(stream: CUstream, call: impl FnOnce() -> CUresult) -> CUresult {
    // The context must be queried before the stream captures.
    let context = context_of(stream).unwrap_or(core::ptr::null_mut());
    let _start = STARTING.write();
    if SYNCHRONIZING.load(Ordering::SeqCst) > 0 {
        time::sleep(SYNCHRONIZING_BEGINS);
    }
    after(call(), || {
        let mut captures = CAPTURES.lock();
        captures.push(Capture { id: id_of(stream), members: vec![Member::of(stream, context)] });
        COUNT.store(captures.len(), Ordering::SeqCst);
        epoch::end();
    })
}

/// Makes a call that lets `stream` wait for an event. The stream is not capturing, but may join a
/// capture by this call. If it does, also returns the contexts of the stream and of the capture's
/// origin.
pub fn join(stream: CUstream, call: impl FnOnce() -> CUresult) -> (CUresult, Option<[CUcontext; 2]>) {
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

/// Returns the context of a stream that the calling thread may use. A capturing stream is not queried,
/// because a query may invalidate its capture.
pub fn context_of(stream: CUstream) -> Option<CUcontext> {
    let is_default = (stream as usize) <= STREAM_PER_THREAD as usize;
    let known = if is_default {
        None // a default stream of the current context
    } else if any() && is_capturing(stream) {
        context_of_member(stream)
    } else {
        // SAFETY: the place is valid, and the program uses this stream.
        beside(|_| query::handle(|context| unsafe { driver::cuStreamGetCtx(stream, context) })).ok()
    };
    known.or_else(|| Some(current_or_null())).filter(|context| !context.is_null())
}

/// Returns the context of a capturing stream, or `None` if it is not known.
fn context_of_member(stream: CUstream) -> Option<CUcontext> {
    let wanted = Member::of(stream, core::ptr::null_mut());
    let captures = CAPTURES.lock();
    let member = captures.iter().flat_map(|capture| &capture.members).find(|member| member.is(&wanted));
    member.map(|member| member.context as CUcontext)
}

/// Returns the driver's ID of this stream's capture; 0 if the driver assigns none.
fn id_of(stream: CUstream) -> u64 {
    let (mut status, mut id) = (STREAM_CAPTURE_STATUS_NONE, 0);
    // SAFETY: `status` and `id` outlive the call, which is always allowed.
    unsafe { driver::cuStreamGetCaptureInfo(stream, &mut status, &mut id) };
    id
}

/// Called when the capture on this stream has ended or the stream has been destroyed.
pub fn end(stream: CUstream) {
    if !is_known() {
        return;
    }
    let wanted = Member::of(stream, core::ptr::null_mut());
    forget(|capture| capture.origin().is_none_or(|origin| origin.is(&wanted)));
}

/// Called when a context has been destroyed. The captures that originated in it have ended.
pub fn end_all_in(context: CUcontext) {
    forget(|capture| capture.origin().is_none_or(|origin| origin.context == context as usize));
}

/// Whether captures may exist. False in the child of a fork, because the count is the parent's
/// there, and another thread may have held the lock during the fork.
fn is_known() -> bool {
    any() && is_active()
}

fn forget(which: impl Fn(&Capture) -> bool) {
    if is_known() {
        let mut captures = CAPTURES.lock();
        captures.retain(|capture| !which(capture));
        COUNT.store(captures.len(), Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{driver::fake::Driver, driver::fake::until, submit::fake};
    use core::sync::atomic::AtomicBool;
    use std::thread;

    /// Begins a capture with this ID, as the program does.
    fn capture(driver: &Driver, stream: CUstream, id: u64) {
        let begun = begin(stream, || {
            driver.set_capturing(stream, Some(id));
            SUCCESS
        });
        assert_eq!(begun, SUCCESS);
    }

    #[test]
    fn no_capture_begins_during_a_query() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        let stream = driver.new_stream(context) as usize;
        let (queries, is_over, has_begun) = (AtomicBool::new(false), AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                beside(|is_active| {
                    queries.store(true, Ordering::SeqCst);
                    until(|| is_over.load(Ordering::SeqCst));
                    assert!(!is_active && !has_begun.load(Ordering::SeqCst), "a capture began during the query");
                })
            });
            until(|| queries.load(Ordering::SeqCst));
            scope.spawn(|| {
                begin(stream as CUstream, || {
                    has_begun.store(true, Ordering::SeqCst);
                    SUCCESS
                })
            });
            // The thread has reached the lock when it has queried the stream's context.
            driver.wait_for_calls("cuStreamGetCtx", 1);
            thread::sleep(Duration::from_millis(2));
            is_over.store(true, Ordering::SeqCst);
        });
        assert!(has_begun.load(Ordering::SeqCst) && any());
        end(stream as CUstream);
    }

    #[test]
    fn queries_during_a_capture_use_relaxed_mode() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        assert!(!beside(|is_active| is_active));
        assert_eq!(driver.count("cuThreadExchangeStreamCaptureMode"), 0);
        capture(&driver, stream, 1);
        driver.forget_calls();
        let is_active = beside(|is_active| {
            driver.new_context(0);
            is_capturing(stream);
            is_active
        });
        let calls = driver.calls(&["cuThreadExchangeStreamCaptureMode", "cuStreamIsCapturing"]);
        let mode = "cuThreadExchangeStreamCaptureMode";
        assert_eq!((is_active, &calls[..]), (true, &[mode, "cuStreamIsCapturing", mode][..]));
        end(stream);
    }

    #[test]
    fn a_context_is_not_synchronized_during_a_capture() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        capture(&driver, stream, 1);
        assert_eq!(synchronize(|| unreachable!("it would invalidate the capture")), None::<()>);
        end(stream);
        assert_eq!(synchronize(|| 5), Some(5));
        assert_eq!(SYNCHRONIZING.load(Ordering::SeqCst), 0);
    }

    #[test]
    fn a_capture_ends_with_its_origin_and_not_with_a_joined_stream() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        let other = driver.new_context(1);
        let (origin, joined) = (driver.new_stream(context), driver.new_stream(other));
        capture(&driver, origin, 7);
        let result = join(joined, || {
            driver.set_capturing(joined, Some(7));
            SUCCESS
        });
        assert_eq!(result, (SUCCESS, Some([other, context])));
        assert_eq!((context_of_member(joined), context_of_member(origin)), (Some(other), Some(context)));
        end(joined);
        assert!(any());
        end_all_in(other);
        assert!(any(), "the capture did not originate in that context");
        end(origin);
        assert!(!any());
    }

    #[test]
    fn a_capture_ends_with_the_context_of_its_origin() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        capture(&driver, driver.new_stream(context), 1);
        end_all_in(context);
        assert!(!any());
    }

    #[test]
    fn a_stream_joins_no_capture_if_the_call_fails_or_the_stream_does_not_capture() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        let [stream, other] = [(); 2].map(|()| driver.new_stream(context));
        assert_eq!(begin(stream, || ERROR_INVALID_VALUE), ERROR_INVALID_VALUE);
        assert!(!any());
        capture(&driver, stream, 1);
        assert_eq!(join(other, || ERROR_INVALID_VALUE), (ERROR_INVALID_VALUE, None));
        assert_eq!(join(other, || SUCCESS), (SUCCESS, None));
        assert_eq!(context_of_member(other), None);
        end(stream);
    }
}
