//! Points: events in the program's streams behind what a stream was given so far, and the contexts that they belong to.

use crate::{
    driver::{self, check, context::is_dead_in, types::*, waiting},
    work::capture,
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicBool, AtomicU8, Ordering};

/// Whether the events of a context can be asked about.
#[derive(Debug)]
pub(super) struct Life(AtomicU8);

const ALIVE: u8 = 0;
/// The program is destroying it: its work may run, and its handles may be gone at any moment.
const DYING: u8 = 1;
const GONE: u8 = 2;

impl Life {
    fn set(&self, state: u8) {
        self.0.store(state, Ordering::Relaxed);
    }
}

/// A recorded event of ours. Its context reuses it when no one refers to it any more.
#[derive(Debug)]
pub(super) struct Point {
    pub context: usize,
    life: Arc<Life>,
    /// 0 for a point that is not an event: a thread says when it is done.
    event: usize,
    /// It was seen done, or its context is gone.
    done: AtomicBool,
}

impl Point {
    /// A point that is done once the caller says so.
    pub fn without_event(context: usize) -> Self {
        Self { context, life: Arc::new(Life(AtomicU8::new(ALIVE))), event: 0, done: AtomicBool::new(false) }
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
        let life = self.life.0.load(Ordering::Relaxed);
        let done = self.done.load(Ordering::Relaxed) || life == GONE;
        if done || life == DYING || self.event == 0 {
            return Some(done);
        }
        // SAFETY: the context is alive, and the caller's lock keeps it so.
        match capture::beside(|_| unsafe { driver::cuEventQuery(self.event as CUevent) }) {
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
    life: Arc<Life>,
    /// Events that are not in use.
    free: Vec<usize>,
    /// Events that are in use.
    points: Vec<Arc<Point>>,
}

/// The number of points from which on unused ones are looked for.
const MANY_POINTS: usize = 64;

impl Context {
    pub fn new(handle: usize, foreign: bool) -> Self {
        let life = Arc::new(Life(AtomicU8::new(ALIVE)));
        let (free, points) = (Vec::new(), Vec::new());
        Self { handle, uses: 0, foreign, warm: false, users: 0, is_awaited: false, life, free, points }
    }

    /// Records a point behind what this stream was given, in whose queue there is room. The context is current.
    pub fn record(&mut self, stream: CUstream) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        let result = waiting::with_room(|| capture::beside(|_| record(event, stream)));
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
            false => unsafe { driver::cuCtxRecordEvent(self.handle as CUcontext, event as CUevent) },
        };
        let result = waiting::with_room(|| capture::beside(record));
        self.keep(event, result)
    }

    /// A point, if its event was recorded.
    pub fn keep(&mut self, event: usize, recorded: CUresult) -> Result<Arc<Point>, CUresult> {
        if let Err(error) = check(recorded) {
            match error {
                // Perhaps the event does not belong to this context: it must not spoil every other point.
                // SAFETY: ours, and not referred to.
                ERROR_INVALID_HANDLE => {
                    let _ = capture::beside(|_| unsafe { driver::cuEventDestroy_v2(event as CUevent) });
                }
                _ => self.free.push(event),
            }
            return Err(error);
        }
        let (context, life) = (self.handle, self.life.clone());
        let point = Arc::new(Point { context, life, event, done: AtomicBool::new(false) });
        self.points.push(point.clone());
        Ok(point)
    }

    /// An event that is not in use. The context is current.
    pub fn event(&mut self) -> Result<usize, CUresult> {
        if self.free.is_empty() && self.points.len() >= MANY_POINTS {
            let free = &mut self.free;
            self.points.retain(|point| {
                let asked_about = Arc::strong_count(point) > 1;
                if !asked_about {
                    free.push(point.event);
                }
                asked_about
            });
        }
        if let Some(event) = self.free.pop() {
            return Ok(event);
        }
        let mut event = core::ptr::null_mut();
        // SAFETY: a valid place.
        check(capture::beside(|_| unsafe { driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) }))?;
        Ok(event as usize)
    }

    /// Makes the kinds of calls that the client's thread makes, without effect.
    pub fn warm_up(&mut self) {
        if let Ok(event) = self.event() {
            // SAFETY: the event is ours; one that was never recorded counts as done.
            capture::beside(|_| unsafe { driver::cuEventQuery(event as CUevent) });
            self.free.push(event);
        }
    }

    /// The program is about to destroy the context: its events are not asked about, and count as not done.
    pub fn begin_to_end(&self) {
        self.life.set(DYING);
    }

    /// The context stays after all.
    pub fn stay(&self) {
        self.life.set(ALIVE);
    }

    /// The context is gone, with its events.
    pub fn end(&self) {
        self.life.set(GONE);
    }
}

/// Records an event of ours, which is not in use, behind what this stream of the current context was given. Not in a stream that
/// captures, as the event would be captured, and not in the legacy stream beside a capture, which it would break.
pub(super) fn record(event: usize, stream: CUstream) -> CUresult {
    let is_captured = || capture::any() && (is_legacy(stream) || capture::is_capturing(stream));
    if is_captured() {
        return ERROR_NOT_READY;
    }
    // SAFETY: an event of ours; streams are forgotten before they are destroyed.
    let result = unsafe { driver::cuEventRecord(event as CUevent, stream) };
    // Another thread may have joined the stream to a capture in this moment. Such an event would never be done.
    if is_captured() { ERROR_NOT_READY } else { result }
}

/// Whether a capture of another stream forbids to touch this one.
#[inline]
pub fn is_legacy(stream: CUstream) -> bool {
    stream == CTX_DEFAULT_STREAM || stream == STREAM_LEGACY
}
