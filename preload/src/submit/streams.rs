//! The streams to which work was submitted, and the recording of points in them.
//!
//! The thread that submits work also records points, without a lock, because the driver waits if the
//! stream's queue is full. Another thread records a point only if the queues have room.

use super::{
    Inner, Work, captures,
    captures::context_of,
    epoch, is_active, lanes_in_use,
    points::{self, Context, Point, is_legacy},
    target, threads,
};
use crate::driver::{
    self,
    context::{current_or_null, is_dead, with_current},
    types::*,
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicBool, Ordering};

/// Whether the program has ever created a stream that synchronizes with the legacy stream.
static BLOCKING_STREAMS: AtomicBool = AtomicBool::new(false);

/// The minimum of `prune_threshold`.
pub(super) const MIN_PRUNE_THRESHOLD: usize = 64;

/// Identifies a stream. The handle does not suffice: default streams have the same handle in all
/// contexts or all threads. The thread is identified by a number that is never reused, because the work
/// of its stream may outlive the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stream {
    pub(super) context: usize,
    pub(super) handle: usize,
    pub(super) thread: u64,
}

#[derive(Debug, Default)]
pub(super) struct StreamState {
    /// Whether work may have been submitted after the last point.
    pub(super) dirty: bool,
    pub(super) last: Option<Arc<Point>>,
}

/// A thread's recording of a point in a stream.
#[derive(Debug)]
pub(super) struct Recording {
    stream: Stream,
    /// Whether another thread is recording in the same stream, so that the order of the two points is
    /// unknown.
    overlaps: bool,
}

impl StreamState {
    /// Whether the stream may have unfinished work.
    pub(super) fn is_in_use(&self) -> bool {
        self.dirty || self.last.as_ref().is_some_and(|point| !point.is_done())
    }
}

impl Stream {
    /// Identifies the stream that this handle denotes on the calling thread.
    pub(super) fn of(handle: CUstream, context: CUcontext) -> Self {
        let thread = if handle == STREAM_PER_THREAD { threads::mine().number.load(Ordering::Relaxed) } else { 0 };
        Self { context: context as usize, handle: handle as usize, thread }
    }

    pub(super) fn handle(self) -> CUstream {
        self.handle as CUstream
    }
}

/// Whether the submitting thread must record a point in this stream immediately after each submission.
///
/// An event in the legacy stream waits for all blocking streams, and they wait for the event. An event
/// that is recorded later would add dependencies that the program did not create. For example, work in
/// one blocking stream may wait for work that the program submits to another one later, and would wait
/// forever. Without blocking streams, an event in the legacy stream adds no dependency, and any thread
/// can record it.
#[inline]
pub fn is_marked_at_once(stream: CUstream) -> bool {
    is_legacy(stream) && BLOCKING_STREAMS.load(Ordering::Acquire)
}

/// Called before the program creates or uses a stream that synchronizes with the legacy stream.
#[cold]
pub fn expect_blocking_streams() {
    let are_expected = || BLOCKING_STREAMS.load(Ordering::Acquire) || BLOCKING_STREAMS.swap(true, Ordering::AcqRel);
    if is_active() && !are_expected() {
        lanes_in_use().for_each(|lane| lane.work.mark_legacy_streams());
    }
}

impl Work {
    /// Records a submission to this stream.
    pub fn note(&self, handle: CUstream) {
        let Some(context) = context_of(handle) else { return };
        let stream = Stream::of(handle, context);
        let mut inner = self.inner.lock();
        let is_known = inner.has(stream.context);
        if !is_known {
            target::add_context(context);
            inner.contexts.push(Context::new(stream.context, true));
        }
        inner.prune_streams(stream);
        inner.streams.entry(stream).or_default().dirty = true;
        let needs_point = inner.needs_points_at_once(stream);
        drop(inner);
        if needs_point {
            self.point_in(stream);
        }
    }

    /// Records a point in each legacy stream, while no blocking stream exists that would wait for the
    /// point.
    fn mark_legacy_streams(&self) {
        let mut inner = self.inner.lock();
        // Threads that launch from now on must see that a blocking stream exists, even if no stream needs a
        // point now.
        epoch::end();
        let unmarked =
            |(stream, state): (&Stream, &StreamState)| (state.dirty && is_legacy(stream.handle())).then_some(*stream);
        let unmarked: Vec<_> = inner.streams.iter().filter_map(unmarked).collect();
        self.find_room(&mut inner);
        for stream in unmarked {
            if inner.has(stream.context) && inner.has_room() {
                let _ = with_current(stream.context, || inner.point_with_room(stream));
            }
        }
    }

    /// Makes all later submissions to blocking streams wait for all work submitted to them so far. `stream`
    /// is the legacy stream of the current context. Returns `false` if that is impossible now, for example
    /// because of a capture or because queues may be full.
    pub fn order_blocking_streams(&self, stream: CUstream) -> bool {
        let Some(context) = context_of(stream) else { return false };
        let stream = Stream::of(stream, context);
        let mut inner = self.inner.lock();
        self.find_room(&mut inner);
        // An event in the legacy stream is ordered like any other work in that stream.
        let is_possible = inner.has(stream.context) && inner.has_room();
        is_possible && with_current(stream.context, || inner.point_with_room(stream).is_some()) == Ok(true)
    }

    /// Called before the program captures this stream, because no point can be recorded during the
    /// capture.
    pub fn mark_stream(&self, stream: CUstream) {
        if let Some(context) = context_of(stream) {
            self.mark_if_dirty(Stream::of(stream, context));
        }
    }

    /// Called when the program destroys this stream. Submitted work continues to run.
    pub fn forget_stream(&self, stream: CUstream) {
        let Some(context) = context_of(stream) else { return };
        let is_idle = is_idle(stream);
        let stream = Stream::of(stream, context);
        if !is_idle {
            self.mark_if_dirty(stream);
        }
        let mut inner = self.inner.lock();
        if let Some(StreamState { last: Some(point), .. }) = inner.streams.remove(&stream)
            && !is_idle
        {
            inner.keep_closed(point);
        }
        epoch::end();
    }

    fn mark_if_dirty(&self, stream: Stream) {
        let is_dirty = self.inner.lock().streams.get(&stream).is_some_and(|state| state.dirty);
        if is_dirty {
            self.point_in(stream);
        }
    }

    /// Returns a point for a mark, behind all work submitted to this stream so far. The calling thread can
    /// use the stream.
    pub(super) fn point_of_mark(&self, stream: Stream) -> Option<Arc<Point>> {
        let is_kept_dirty = {
            let inner = self.inner.lock();
            match inner.streams.get(&stream) {
                Some(StreamState { dirty: false, last: Some(point) }) if !inner.is_recording(stream) => {
                    return Some(point.clone());
                }
                Some(StreamState { dirty: true, .. }) => !inner.needs_points_at_once(stream),
                _ => false,
            }
        };
        // The stream stays dirty, because more work will follow. If the stream became clean, the
        // epoch would have to end, and the next launch would have to record the stream's use again.
        if is_kept_dirty { self.record(stream)?.ok() } else { self.point_in(stream) }
    }

    /// Records a point in a stream that the calling thread can use. The stream then counts as clean.
    pub(super) fn point_in(&self, stream: Stream) -> Option<Arc<Point>> {
        {
            let mut inner = self.inner.lock();
            if !inner.has(stream.context) {
                return None;
            }
            inner.begin_recording(stream);
        }
        let recorded = self.record(stream);
        self.inner.lock().has_recorded(stream, recorded)
    }

    /// Records an event in a stream that the calling thread can use. Returns `None` if the context is not
    /// known. No lock is held during the call, because the driver waits if the stream's queue is full.
    fn record(&self, stream: Stream) -> Option<Result<Arc<Point>, CUresult>> {
        let record = || {
            let event = match self.inner.lock().context(stream.context)?.event() {
                Ok(event) => event,
                Err(error) => return Some(Err(error)),
            };
            let recorded = points::record(&event, stream.handle());
            Some(self.inner.lock().context(stream.context)?.keep(event, recorded))
        };
        if current_or_null() as usize == stream.context {
            return record();
        }
        with_current(stream.context, record).ok().flatten()
    }
}

/// Whether all work of this stream is done, according to the driver.
pub(super) fn is_idle(stream: CUstream) -> bool {
    captures::beside(|capturing| {
        // SAFETY: the program uses this stream. Capturing streams are not queried.
        !(capturing && captures::is_capturing(stream)) && unsafe { driver::cuStreamQuery(stream) } == SUCCESS
    })
}

impl Inner {
    /// Keeps the last point of a destroyed stream. Each addition checks two earlier points, so that
    /// finished points do not accumulate, whatever the order in which they finish.
    fn keep_closed(&mut self, point: Arc<Point>) {
        for _ in 0..2 {
            if let Some(oldest) = self.closed_streams.pop_front().filter(|oldest| !oldest.is_done()) {
                self.closed_streams.push_back(oldest);
            }
        }
        self.closed_streams.push_back(point);
    }

    /// Removes idle streams when the number of streams reaches a threshold: short-lived threads leave many
    /// idle streams.
    pub(super) fn prune_streams(&mut self, stream: Stream) {
        if self.streams.len() >= self.prune_threshold && !self.streams.contains_key(&stream) {
            self.streams.retain(|_, state| state.is_in_use());
            self.prune_threshold = MIN_PRUNE_THRESHOLD.max(self.streams.len() * 2);
        }
    }

    /// Whether only one thread can use this stream: the thread of a per-thread stream, or the thread on
    /// which the stream's green context is current.
    pub(super) fn is_foreign(&self, stream: Stream) -> bool {
        stream.thread != 0 || self.contexts.iter().find(|c| c.handle == stream.context).is_none_or(|c| c.foreign)
    }

    /// Whether a point must be recorded in this stream immediately after each submission, because no other
    /// thread can or should record it later.
    pub(super) fn needs_points_at_once(&self, stream: Stream) -> bool {
        self.is_foreign(stream) || is_marked_at_once(stream.handle())
    }

    /// Records a point in a stream whose context is current and whose queue has room.
    pub(super) fn point_with_room(&mut self, stream: Stream) -> Option<Arc<Point>> {
        self.begin_recording(stream);
        let recorded = self.context(stream.context).map(|context| context.record(stream.handle()));
        self.has_recorded(stream, recorded)
    }

    fn is_recording(&self, stream: Stream) -> bool {
        self.recording.iter().any(|recording| recording.stream == stream)
    }

    /// Called before a thread records a point behind all work submitted to this stream. Until the point is
    /// recorded, the stream has work without a point behind it.
    fn begin_recording(&mut self, stream: Stream) {
        // The epoch ends before the point is recorded. A thread that reads the old epoch has submitted its
        // work before the point. A thread that reads the new epoch records the stream's use again, which makes
        // the stream dirty.
        epoch::end();
        self.streams.entry(stream).or_default().dirty = false;
        let overlaps = self.is_recording(stream);
        self.recording.iter_mut().filter(|other| other.stream == stream).for_each(|other| other.overlaps = true);
        self.recording.push(Recording { stream, overlaps });
    }

    /// Ends the recording of a point in a stream. On success, the point is the stream's last.
    fn has_recorded(&mut self, stream: Stream, recorded: Option<Result<Arc<Point>, CUresult>>) -> Option<Arc<Point>> {
        let at = self.recording.iter().position(|recording| recording.stream == stream)?;
        let overlaps = self.recording.swap_remove(at).overlaps;
        let Some(state) = self.streams.get_mut(&stream) else {
            // Another thread has destroyed the stream or found that it does not exist.
            let point = recorded?.ok()?;
            self.keep_closed(point.clone());
            return Some(point);
        };
        match recorded {
            Some(Ok(point)) => {
                let before = state.last.replace(point.clone());
                if let Some(before) = before.filter(|_| overlaps) {
                    self.keep_closed(before);
                }
                Some(point)
            }
            // No work runs in the stream: either its context is broken, or the stream does not
            // exist and the program's call has failed.
            Some(Err(error)) if is_dead(error) || matches!(error, ERROR_INVALID_HANDLE | ERROR_STREAM_DETACHED) => {
                self.streams.remove(&stream);
                None
            }
            _ => {
                state.dirty = true;
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::fake::Driver,
        submit::{LANES, fake},
    };

    #[test]
    fn work_of_a_destroyed_stream_is_awaited() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        work.note(stream);
        driver.keep_busy(stream);
        work.forget_stream(stream);
        assert!(work.inner.lock().streams.is_empty());
        let mut fence = work.fence().expect("no capture is active");
        assert!(!work.is_done(&mut fence));
        driver.finish(stream);
        assert!(work.is_done(&mut fence));
    }

    #[test]
    fn destroying_an_idle_stream_records_no_event() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        work.note(stream);
        work.forget_stream(stream);
        assert_eq!(driver.count("cuEventRecord"), 0);
        assert!(work.inner.lock().closed_streams.is_empty());
    }

    #[test]
    fn a_stream_that_does_not_exist_has_no_work() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        for error in [ERROR_INVALID_HANDLE, ERROR_STREAM_DETACHED, 700] {
            work.note(driver.new_stream(context));
            driver.fail("cuEventRecord", 1, error);
            let mut fence = work.fence().expect("no work runs in this stream");
            assert!(work.is_done(&mut fence) && work.inner.lock().streams.is_empty(), "{error}");
        }
        let stream = driver.new_stream(context);
        work.note(stream);
        driver.fail("cuEventRecord", 1, ERROR_OUT_OF_MEMORY);
        assert!(work.fence().is_none(), "the stream may have work");
        assert!(work.fence().is_some());
    }

    #[test]
    fn the_context_of_a_capturing_stream_is_not_queried() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        driver.set_current(driver.new_context(0));
        assert_eq!(context_of(stream), Some(context));
        let begin = || {
            driver.set_capturing(stream, Some(1));
            SUCCESS
        };
        assert_eq!(captures::begin(stream, begin), SUCCESS);
        driver.forget_calls();
        assert_eq!(context_of(stream), Some(context));
        assert_eq!(driver.count("cuStreamGetCtx"), 0, "a query may invalidate the capture");
        captures::end(stream);
    }

    #[test]
    fn a_stream_is_marked_before_it_captures() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        work.mark_stream(stream);
        assert_eq!(driver.count("cuEventRecord"), 0, "there is no work to mark");
        work.note(stream);
        work.mark_stream(stream);
        work.mark_stream(stream);
        assert_eq!(driver.count("cuEventRecord"), 1);
        assert!(work.fence().is_some() && driver.count("cuEventRecord") == 1, "the fence uses the mark");
    }

    #[test]
    fn the_legacy_stream_is_marked_at_once_if_blocking_streams_exist() {
        let driver = Driver::new();
        let (_, context) = fake::new(&driver);
        LANES[0].set_attached();
        let work = &LANES[0].work;
        work.add_context(context);
        work.note(CTX_DEFAULT_STREAM);
        assert_eq!(driver.count("cuEventRecord"), 0);
        expect_blocking_streams();
        assert_eq!(driver.count("cuEventRecord"), 1, "the work before the first blocking stream");
        expect_blocking_streams();
        assert_eq!(driver.count("cuEventRecord"), 1, "only the first blocking stream counts");
        work.note(CTX_DEFAULT_STREAM);
        assert_eq!(driver.count("cuEventRecord"), 2);
    }

    #[test]
    fn idle_streams_are_forgotten_when_many_are_known() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let busy = driver.new_stream(context);
        driver.keep_busy(busy);
        work.note(busy);
        (1..MIN_PRUNE_THRESHOLD).for_each(|_| work.note(driver.new_stream(context)));
        // Points are recorded, so that the idle streams are known to be idle.
        assert!(work.fence().is_some());
        assert_eq!(work.inner.lock().streams.len(), MIN_PRUNE_THRESHOLD);
        work.note(driver.new_stream(context));
        let handles: Vec<_> = work.inner.lock().streams.keys().map(|stream| stream.handle).collect();
        assert_eq!((handles.len(), handles[0]), (2, busy as usize));
    }
}
