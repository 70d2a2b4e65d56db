//! Points: events in the program's streams behind the work given to a stream so far, and the contexts that they belong
//! to.

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

/// The events of a context. They outlive the context while fences still hold some of them.
#[derive(Debug)]
struct Events {
    /// Events that are not in use.
    free: Mutex<Vec<usize>>,
    /// Whether the events can be queried.
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
    /// `None` for a point without an event: a thread reports when it is done.
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

    /// Whether the event is done, or nothing will ever run in its context again. After `ERROR_INVALID_HANDLE` the event
    /// is gone with its context, since nothing else destroys it. Returns `None` after any other error (during an
    /// invalidated capture, say), which tells nothing.
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
    /// The number of times it was created, retained or attached, minus its releases. Never more than the driver's
    /// count, so that a release that is not the last is never taken for the last.
    pub uses: u32,
    /// A green context: only the thread on which it is current can use it, so the client's thread cannot.
    pub foreign: bool,
    /// The client's thread has used it once.
    pub warm: bool,
    /// Threads that are in it without a lock, or are ending one of several uses. It is not destroyed before they have
    /// left.
    pub users: u32,
    /// A thread is waiting for all of its work.
    pub is_awaited: bool,
    events: Arc<Events>,
}

impl Context {
    pub fn new(handle: usize, foreign: bool) -> Self {
        let events = Events { free: Mutex::new(Rank::FreeEvents, Vec::new()), life: AtomicU8::new(ALIVE) };
        Self { handle, uses: 0, foreign, warm: false, users: 0, is_awaited: false, events: Arc::new(events) }
    }

    /// Records a point behind the work given to this stream, whose queue has room. The context is current.
    pub fn record(&mut self, stream: CUstream) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        let result = waiting::with_room(|| capture::beside(|_| record(&event, stream)));
        self.keep(event, result)
    }

    /// Records a point behind all work that the context was given, by any call. The context is current, and the queues
    /// of its streams have room.
    ///
    /// # Errors
    /// `ERROR_NOT_READY` during a capture, which such an event would invalidate; `ERROR_NOT_FOUND` if the driver has no
    /// such events (before 12.5); other errors of the driver.
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

    /// Returns a point if its event was recorded.
    pub fn keep(&mut self, event: Event, recorded: CUresult) -> Result<Arc<Point>, CUresult> {
        if let Err(error) = check(recorded) {
            if error == ERROR_INVALID_HANDLE {
                // The event may not belong to this context: it must not spoil every other point.
                // SAFETY: the event is ours, and nothing refers to it.
                let _ = capture::beside(|_| unsafe { driver::cuEventDestroy_v2(event.handle as CUevent) });
                core::mem::forget(event);
            }
            return Err(error);
        }
        Ok(Arc::new(Point { context: self.handle, event: Some(event), done: AtomicBool::new(false) }))
    }

    /// Returns an event that is not in use. The context is current.
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

    /// Called before the program destroys the context: its events are no longer queried, and count as not done.
    pub fn begin_to_end(&self) {
        self.events.life.store(DYING, Ordering::Relaxed);
    }

    /// Called when the context stays after all.
    pub fn stay(&self) {
        self.events.life.store(ALIVE, Ordering::Relaxed);
    }

    /// Called when the context is gone, with its events.
    pub fn end(&self) {
        self.events.life.store(GONE, Ordering::Relaxed);
    }
}

/// Records an unused event behind the work given to this stream of the current context. Refuses a capturing stream,
/// since the event would be captured, and the legacy stream during a capture, which the event would invalidate.
pub(super) fn record(event: &Event, stream: CUstream) -> CUresult {
    let is_captured = || capture::any() && (is_legacy(stream) || capture::is_capturing(stream));
    if is_captured() {
        return ERROR_NOT_READY;
    }
    // SAFETY: `event` is ours; streams are forgotten before they are destroyed.
    let result = unsafe { driver::cuEventRecord(event.handle as CUevent, stream) };
    // Another thread may just have joined the stream to a capture. Such an event would never be done.
    if is_captured() { ERROR_NOT_READY } else { result }
}

/// A new event of the current context.
fn create() -> Result<usize, CUresult> {
    let mut event = core::ptr::null_mut();
    // SAFETY: `event` outlives the call.
    check(capture::beside(|_| unsafe { driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) }))?;
    Ok(event as usize)
}

/// Whether this is the legacy stream, which must not be used during a capture of another stream.
#[inline]
pub fn is_legacy(stream: CUstream) -> bool {
    stream == CTX_DEFAULT_STREAM || stream == STREAM_LEGACY
}
