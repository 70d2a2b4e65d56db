//! Points: events in the program's streams behind what a stream was given so far, and the contexts that they belong to.

use crate::{
    driver::{self, check, context::is_dead, types::*},
    work::capture,
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicBool, Ordering};

/// A recorded event of ours. Its context reuses it when no one refers to it any more.
#[derive(Debug)]
pub(super) struct Point {
    pub context: usize,
    event: usize,
    /// It was seen done, or its context is gone.
    done: AtomicBool,
}

impl Point {
    /// Whether the event is done, or nothing will ever run in its context again. Any other answer (beside a capture that went
    /// wrong, say) counts as not done.
    pub fn is_done(&self) -> bool {
        if self.done.load(Ordering::Relaxed) {
            return true;
        }
        // SAFETY: points are done before their context is destroyed.
        let result = capture::beside(|_| unsafe { driver::cuEventQuery(self.event as CUevent) });
        let done = result == SUCCESS || is_dead(result);
        if done {
            self.done.store(true, Ordering::Relaxed);
        }
        done
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
    /// Events that are not in use.
    free: Vec<usize>,
    /// Events that are in use.
    points: Vec<Arc<Point>>,
}

/// The number of points from which on unused ones are looked for.
const MANY_POINTS: usize = 64;

impl Context {
    pub fn new(handle: usize, foreign: bool) -> Self {
        Self { handle, uses: 0, foreign, warm: false, free: Vec::new(), points: Vec::new() }
    }

    /// Records a point behind what this stream was given. The context is current.
    pub fn record(&mut self, stream: CUstream) -> Result<Arc<Point>, CUresult> {
        let event = self.event()?;
        // SAFETY: the event is ours and not in use; streams are forgotten before they are destroyed.
        let result = capture::beside(|capturing| {
            let is_captured = || capturing && (is_legacy(stream) || capture::is_capturing(stream));
            if is_captured() {
                return ERROR_NOT_READY; // the event would be captured, or break the capture
            }
            let result = unsafe { driver::cuEventRecord(event as CUevent, stream) };
            // Another thread may have joined the stream to a capture in this moment. Such an event would never be done.
            if is_captured() { ERROR_NOT_READY } else { result }
        });
        if let Err(error) = check(result) {
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
        let point = Arc::new(Point { context: self.handle, event, done: AtomicBool::new(false) });
        self.points.push(point.clone());
        Ok(point)
    }

    fn event(&mut self) -> Result<usize, CUresult> {
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

    /// The context is gone, with its events.
    pub fn end(&self) {
        self.points.iter().for_each(|point| point.done.store(true, Ordering::Relaxed));
    }
}

/// Whether a capture of another stream forbids to touch this one.
pub(super) fn is_legacy(stream: CUstream) -> bool {
    stream == CTX_DEFAULT_STREAM || stream == STREAM_LEGACY
}
