//! Points: events in the program's streams behind what a stream was given so far, and the contexts that they belong to.

use crate::{
    driver::{self, check, context::is_dead_in, types::*, waiting},
    sys::sync::{Mutex, Rank},
    work::capture,
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const ALIVE: u8 = 0;
/// The program is destroying the context: its work may run, and its handles may be gone at any moment.
const DYING: u8 = 1;
/// The context is gone, with all of its events.
const GONE: u8 = 2;

/// An event of ours. When it is dropped, its context can use it again.
#[derive(Debug)]
pub(super) struct Event {
    handle: usize,
    home: Arc<Events>,
}

/// What is left of a context's events when the context is forgotten and fences still have some.
#[derive(Debug)]
struct Events {
    /// Those that are not in use.
    free: Mutex<Vec<usize>>,
    /// Whether they can be asked about.
    life: AtomicU8,
}

impl Drop for Event {
    fn drop(&mut self) {
        self.home.free.lock().push(self.handle);
    }
}

/// A recorded event.
#[derive(Debug)]
pub(super) struct Point {
    pub context: usize,
    /// `None` for a point that is not an event: a thread says when it is done.
    event: Option<Event>,
    /// It was seen done, or its context is gone.
    done: AtomicBool,
}

impl Point {
    /// A point that is done once the caller says so.
    pub fn without_event(context: usize) -> Self {
        Self { context, event: None, done: AtomicBool::new(false) }
    }

    pub fn set_done(&self) {
        self.done.store(true, Ordering::Relaxed);
    }

    /// Whether the event is known to be done.
    pub fn is_done(&self) -> bool {
        self.progress() == Some(true)
    }

    /// Whether the event is done, or nothing will ever run in its context again. An event that is gone went with its context: it
    /// is destroyed by nobody else. `None` after any other error (beside a capture that went wrong, say), which tells nothing.
    pub fn progress(&self) -> Option<bool> {
        let done = self.done.load(Ordering::Relaxed);
        let Some(event) = self.event.as_ref().filter(|_| !done) else { return Some(done) };
        match event.home.life.load(Ordering::Relaxed) {
            ALIVE => {}
            DYING => return Some(false),
            _ => {
                self.set_done();
                return Some(true);
            }
        }
        // SAFETY: the context is alive, and the caller's lock keeps it so.
        match capture::beside(|_| unsafe { driver::cuEventQuery(event.handle as CUevent) }) {
            ERROR_NOT_READY => Some(false),
            result if matches!(result, SUCCESS | ERROR_INVALID_HANDLE) || is_dead_in(self.context, result) => {
                self.set_done();
                Some(true)
            }
            _ => None,
        }
    }
}

/// A context of the program.
#[derive(Debug)]
pub(super) struct Context {
    pub handle: usize,
    /// How often it was created, retained or attached, less its releases. Never more than the driver's count, so that a release
    /// which is not the last is known to be none.
    pub uses: u32,
    /// Only the thread to which it is current can use it, so the client's thread cannot: a green context.
    pub foreign: bool,
    /// The client's thread has used it once.
    pub warm: bool,
    /// Threads that are in it without a lock, or end one of several uses. It is not destroyed before they are done.
    pub users: u32,
    /// A thread waits for all of its work.
    pub is_awaited: bool,
    events: Arc<Events>,
}

impl Context {
    pub fn new(handle: usize, foreign: bool) -> Self {
        let events = Events { free: Mutex::new(Rank::FreeEvents, Vec::new()), life: AtomicU8::new(ALIVE) };
        Self { handle, uses: 0, foreign, warm: false, users: 0, is_awaited: false, events: Arc::new(events) }
    }

    /// Records a point behind what this stream was given, in whose queue there is room. The context is current.
    pub fn record(&mut self, stream: CUstream) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        let result = waiting::with_room(|| capture::beside(|_| record(&event, stream)));
        self.keep(event, result)
    }

    /// Records a point behind everything that the context has been given, by whatever call. The context is current.
    ///
    /// # Errors
    /// `ERROR_NOT_READY` beside a capture, which such an event would break; `ERROR_NOT_FOUND` where the driver has no such
    /// events (before 12.5); other errors of the driver. There is room in the queues of its streams.
    pub fn record_all(&mut self) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        // SAFETY: the event is ours and not in use, and the context has not been destroyed.
        let record = |capturing| match capturing {
            true => ERROR_NOT_READY,
            false => unsafe { driver::cuCtxRecordEvent(self.handle as CUcontext, event.handle as CUevent) },
        };
        let result = waiting::with_room(|| capture::beside(record));
        self.keep(event, result)
    }

    /// A point, if its event was recorded.
    pub fn keep(&mut self, event: Event, recorded: CUresult) -> Result<Arc<Point>, CUresult> {
        if let Err(error) = check(recorded) {
            if error == ERROR_INVALID_HANDLE {
                // Perhaps the event does not belong to this context: it must not spoil every other point.
                // SAFETY: ours, and not referred to.
                let _ = capture::beside(|_| unsafe { driver::cuEventDestroy_v2(event.handle as CUevent) });
                core::mem::forget(event);
            }
            return Err(error);
        }
        Ok(Arc::new(Point { context: self.handle, event: Some(event), done: AtomicBool::new(false) }))
    }

    /// An event that is not in use. The context is current.
    pub fn event(&mut self) -> Result<Event, CUresult> {
        let free = self.events.free.lock().pop();
        let handle = free.map_or_else(create, Ok)?;
        Ok(Event { handle, home: self.events.clone() })
    }

    /// Makes the kinds of calls that the client's thread makes, without effect.
    pub fn warm_up(&mut self) {
        if let Ok(event) = self.event() {
            // SAFETY: the event is ours; one that was never recorded counts as done.
            capture::beside(|_| unsafe { driver::cuEventQuery(event.handle as CUevent) });
        }
    }

    /// The program is about to destroy the context: its events are not asked about, and count as not done.
    pub fn begin_to_end(&self) {
        self.events.life.store(DYING, Ordering::Relaxed);
    }

    /// The context stays after all.
    pub fn stay(&self) {
        self.events.life.store(ALIVE, Ordering::Relaxed);
    }

    /// The context is gone, with its events.
    pub fn end(&self) {
        self.events.life.store(GONE, Ordering::Relaxed);
    }
}

/// Records an event, which is not in use, behind what this stream of the current context was given. Not in a stream that captures, as
/// the event would be captured, and not in the legacy stream beside a capture, which it would break.
pub(super) fn record(event: &Event, stream: CUstream) -> CUresult {
    let is_captured = || capture::any() && (is_legacy(stream) || capture::is_capturing(stream));
    if is_captured() {
        return ERROR_NOT_READY;
    }
    // SAFETY: an event of ours; streams are forgotten before they are destroyed.
    let result = unsafe { driver::cuEventRecord(event.handle as CUevent, stream) };
    // Another thread may have joined the stream to a capture in this moment. Such an event would never be done.
    if is_captured() { ERROR_NOT_READY } else { result }
}

/// A new event of the current context.
fn create() -> Result<usize, CUresult> {
    let mut event = core::ptr::null_mut();
    // SAFETY: a valid place.
    check(capture::beside(|_| unsafe { driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) }))?;
    Ok(event as usize)
}

/// Whether a capture of another stream forbids to touch this one.
#[inline]
pub fn is_legacy(stream: CUstream) -> bool {
    stream == CTX_DEFAULT_STREAM || stream == STREAM_LEGACY
}
