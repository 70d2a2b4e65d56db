//! Points: events in the program's streams behind the work submitted so far, and the contexts of these
//! events.

use super::captures;
use crate::{
    driver::{self, check, context::is_dead_in, query, types::*, waits},
    sys::sync::{Mutex, Rank},
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

const ALIVE: u8 = 0;
/// The program is destroying the context. Its work may still run, but its handles may become invalid at
/// any moment.
const DYING: u8 = 1;
/// The context and its events no longer exist.
const GONE: u8 = 2;

/// An event created by this library. A dropped event returns to the free events of its context.
#[derive(Debug)]
pub(super) struct Event {
    handle: usize,
    home: Arc<Events>,
}

/// The events of a context. This object outlives the context while fences hold some of the events.
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
    /// `None` if a thread reports when the point is done.
    event: Option<Event>,
    /// Whether the point was found done or its context no longer exists.
    done: AtomicBool,
}

impl Point {
    /// Creates a point that is done when the caller calls [`set_done`](Self::set_done).
    pub fn without_event(context: usize) -> Self {
        Self { context, event: None, done: AtomicBool::new(false) }
    }

    pub fn set_done(&self) {
        self.done.store(true, Ordering::Relaxed);
    }

    /// Whether the point is known to be done.
    pub fn is_done(&self) -> bool {
        self.progress() == Some(true)
    }

    /// Whether the event is done or no more work can run in its context. `ERROR_INVALID_HANDLE` means that
    /// the event was destroyed with its context, because no code destroys it otherwise. Returns `None`
    /// after any other error, which is inconclusive (during an invalidated capture, for example).
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
        // SAFETY: the context exists, and the caller's lock prevents its destruction.
        match captures::beside(|_| unsafe { driver::cuEventQuery(event.handle as CUevent) }) {
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
    /// The number of creations, retains and attaches minus releases. The number never exceeds the driver's
    /// count, so the library never mistakes the last release for an earlier one.
    pub uses: u32,
    /// A green context. The client's thread cannot use it: only the thread on which it is current can.
    pub foreign: bool,
    /// Whether the client's thread has used the context.
    pub warm: bool,
    /// The number of threads that have entered the context without a lock or are ending one of several
    /// uses. The context is not destroyed before these threads have left.
    pub users: u32,
    /// Whether a thread is waiting for all work of the context.
    pub is_awaited: bool,
    events: Arc<Events>,
}

impl Context {
    pub fn new(handle: usize, foreign: bool) -> Self {
        let events = Events { free: Mutex::new(Rank::FreeEvents, Vec::new()), life: AtomicU8::new(ALIVE) };
        Self { handle, uses: 0, foreign, warm: false, users: 0, is_awaited: false, events: Arc::new(events) }
    }

    /// Records a point behind the work submitted to this stream, whose queue has room. The context is
    /// current.
    pub fn record(&mut self, stream: CUstream) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        let result = waits::with_room(|| captures::beside(|_| record(&event, stream)));
        self.keep(event, result)
    }

    /// Records a point behind all work that was submitted to the context, by any call. The context is
    /// current, and the queues of its streams have room.
    ///
    /// # Errors
    /// `ERROR_NOT_READY` during a capture, which such an event would invalidate; `ERROR_NOT_FOUND` if the
    /// driver has no context events (before 12.5); other errors of the driver.
    pub fn record_all(&mut self) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        let record = |capturing| match capturing {
            true => ERROR_NOT_READY,
            // SAFETY: this library created the event, which is not in use. The context has not been destroyed.
            false => unsafe { driver::cuCtxRecordEvent(self.handle as CUcontext, event.handle as CUevent) },
        };
        let result = waits::with_room(|| captures::beside(record));
        self.keep(event, result)
    }

    /// Returns the point of an event, if the event was recorded.
    pub fn keep(&mut self, event: Event, recorded: CUresult) -> Result<Arc<Point>, CUresult> {
        if let Err(error) = check(recorded) {
            if error == ERROR_INVALID_HANDLE {
                // The event may belong to another context. It is destroyed, because any later point that reuses it
                // would fail too.
                // SAFETY: this library created the event, and no reference to it remains.
                let _ = captures::beside(|_| unsafe { driver::cuEventDestroy_v2(event.handle as CUevent) });
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

    /// Creates and queries an event, so that the driver sets up the calling thread.
    pub fn warm_up(&mut self) {
        if let Ok(event) = self.event() {
            // SAFETY: this library created the event. An event that was never recorded counts as done.
            captures::beside(|_| unsafe { driver::cuEventQuery(event.handle as CUevent) });
        }
    }

    /// Called before the program destroys the context. Its events are no longer queried and count as
    /// pending.
    pub fn begin_to_end(&self) {
        self.events.life.store(DYING, Ordering::Relaxed);
    }

    /// Called if the context was not destroyed.
    pub fn stay(&self) {
        self.events.life.store(ALIVE, Ordering::Relaxed);
    }

    /// Called when the context and its events no longer exist.
    pub fn end(&self) {
        self.events.life.store(GONE, Ordering::Relaxed);
    }
}

/// Records an unused event behind the work submitted to this stream of the current context. Refuses a
/// capturing stream, because the event would be captured. Refuses the legacy stream during a capture,
/// because the event would invalidate the capture.
pub(super) fn record(event: &Event, stream: CUstream) -> CUresult {
    let is_captured = || captures::any() && (is_legacy(stream) || captures::is_capturing(stream));
    if is_captured() {
        return ERROR_NOT_READY;
    }
    // SAFETY: this library created `event`. Streams are forgotten before they are destroyed.
    let result = unsafe { driver::cuEventRecord(event.handle as CUevent, stream) };
    // Another thread may have joined the stream to a capture before the call. The event would then
    // never be done.
    if is_captured() { ERROR_NOT_READY } else { result }
}

/// Creates an event in the current context.
fn create() -> Result<usize, CUresult> {
    // SAFETY: the place is valid.
    let create = |event: &mut CUevent| unsafe { driver::cuEventCreate(event, EVENT_DISABLE_TIMING) };
    captures::beside(|_| query::handle(create)).map(|event| event as usize)
}

/// Whether this is the legacy stream, which must not be used while another stream captures.
#[inline]
pub fn is_legacy(stream: CUstream) -> bool {
    stream == CTX_DEFAULT_STREAM || stream == STREAM_LEGACY
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{driver::fake::Driver, submit::fake};

    fn context(driver: &Driver) -> Context {
        let (_, context) = fake::new(driver);
        Context::new(context as usize, false)
    }

    #[test]
    fn events_are_reused_when_no_point_needs_them() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let stream = driver.new_stream(context.handle as CUcontext);
        let first = context.record(stream).expect("an event");
        let clone = first.clone();
        drop(first);
        drop(context.record(stream).expect("an event"));
        assert_eq!(driver.count("cuEventCreate"), 2, "the first event is still in use");
        drop(clone);
        let events = [(); 2].map(|()| context.record(stream).expect("an event"));
        assert_eq!((driver.count("cuEventCreate"), events.len()), (2, 2));
    }

    #[test]
    fn a_point_stays_done_without_further_queries() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let stream = driver.new_stream(context.handle as CUcontext);
        driver.keep_busy(stream);
        let point = context.record(stream).expect("an event");
        assert_eq!(point.progress(), Some(false));
        driver.finish(stream);
        assert_eq!((point.progress(), point.progress()), (Some(true), Some(true)));
        assert_eq!(driver.count("cuEventQuery"), 2);
    }

    #[test]
    fn events_of_a_context_are_not_queried_while_it_is_destroyed() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let point = context.record(driver.new_stream(context.handle as CUcontext)).expect("an event");
        context.begin_to_end();
        assert_eq!(point.progress(), Some(false));
        context.end();
        assert_eq!(point.progress(), Some(true));
        assert_eq!(driver.count("cuEventQuery"), 0);
    }

    #[test]
    fn a_context_that_stays_is_queried_again() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let point = context.record(driver.new_stream(context.handle as CUcontext)).expect("an event");
        context.begin_to_end();
        context.stay();
        assert_eq!((point.progress(), driver.count("cuEventQuery")), (Some(true), 1));
    }

    #[test]
    fn only_a_broken_context_ends_a_point_with_an_error() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let stream = driver.new_stream(context.handle as CUcontext);
        driver.keep_busy(stream);
        let point = context.record(stream).expect("an event");
        driver.fail("cuEventQuery", 2, 906);
        assert_eq!((point.progress(), point.is_done()), (None, false));
        driver.fail("cuEventQuery", 1, ERROR_INVALID_HANDLE);
        assert_eq!(point.progress(), Some(true));
        let point = context.record(stream).expect("an event");
        driver.fail("cuEventQuery", 1, 719);
        assert!(point.is_done());
    }

    #[test]
    fn an_event_of_another_context_is_destroyed() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let stream = driver.new_stream(context.handle as CUcontext);
        driver.fail("cuEventRecord", 1, ERROR_INVALID_HANDLE);
        assert_eq!(context.record(stream).map(drop), Err(ERROR_INVALID_HANDLE));
        assert_eq!(driver.count("cuEventDestroy_v2"), 1);
        driver.fail("cuEventRecord", 1, ERROR_INVALID_VALUE);
        assert_eq!(context.record(stream).map(drop), Err(ERROR_INVALID_VALUE));
        assert!(context.record(stream).is_ok());
        assert_eq!((driver.count("cuEventCreate"), driver.count("cuEventDestroy_v2")), (2, 1), "the event is reused");
    }

    #[test]
    fn no_event_is_recorded_in_the_legacy_stream_during_a_capture() {
        let driver = Driver::new();
        let mut context = context(&driver);
        let stream = driver.new_stream(context.handle as CUcontext);
        assert_eq!(captures::begin(stream, || SUCCESS), SUCCESS);
        for legacy in [CTX_DEFAULT_STREAM, STREAM_LEGACY] {
            assert_eq!(context.record(legacy).map(drop), Err(ERROR_NOT_READY));
        }
        assert_eq!(context.record_all().map(drop), Err(ERROR_NOT_READY));
        assert_eq!((driver.count("cuEventRecord"), driver.count("cuCtxRecordEvent")), (0, 0));
        captures::end(stream);
        assert!(context.record(CTX_DEFAULT_STREAM).is_ok());
    }
}
