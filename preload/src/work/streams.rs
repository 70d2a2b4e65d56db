//! The streams that were given work, and recording points in them.

use super::point::{self, Point, is_legacy};
use super::{Inner, Work, capture, contexts};
use crate::{
    driver::{
        self,
        context::{current_or_null, is_dead, with_current},
        types::*,
    },
    gate::{epoch, threads},
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::{AtomicBool, Ordering};

/// The program has, or had, a stream that synchronizes with the legacy stream.
static BLOCKING_STREAMS: AtomicBool = AtomicBool::new(false);

/// The smallest number of known streams above which idle ones are removed.
pub(super) const MIN_PRUNE_THRESHOLD: usize = 64;

/// Identifies a stream: the default streams have one handle in all contexts or all threads. The thread is a number,
/// since the work of its stream may outlive it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stream {
    pub(super) context: usize,
    pub(super) handle: usize,
    pub(super) thread: u64,
}

#[derive(Debug, Default)]
pub(super) struct StreamState {
    /// It may have been given work after its last point.
    pub(super) dirty: bool,
    pub(super) last: Option<Arc<Point>>,
}

/// A thread is recording the last point of a stream.
#[derive(Debug)]
pub(super) struct Recording {
    stream: Stream,
    /// Another thread is recording there too, so which point is the last is not known.
    overlaps: bool,
}

impl StreamState {
    /// Whether it may have unfinished work.
    pub(super) fn is_in_use(&self) -> bool {
        self.dirty || self.last.as_ref().is_some_and(|point| !point.is_done())
    }
}

impl Stream {
    /// The stream that this handle denotes on the calling thread.
    pub(super) fn of(handle: CUstream, context: CUcontext) -> Self {
        let thread = if handle == STREAM_PER_THREAD { threads::mine().number.load(Ordering::Relaxed) } else { 0 };
        Self { context: context as usize, handle: handle as usize, thread }
    }

    pub(super) fn handle(self) -> CUstream {
        self.handle as CUstream
    }
}

/// Whether a point in this stream is recorded by the submitting thread, right behind each submission.
///
/// An event in the legacy stream waits for all blocking streams, and they wait for it. Recorded later, it would add
/// dependencies that the program did not create: work in one blocking stream that waits for a later step of the program
/// in another would wait forever. Without blocking streams, an event there adds no dependency, and any thread can
/// record it.
#[inline]
pub fn is_marked_at_once(stream: CUstream) -> bool {
    is_legacy(stream) && BLOCKING_STREAMS.load(Ordering::Acquire)
}

/// Called before the program creates its first blocking stream, on any GPU. Returns `false` if it was not the first. If
/// it was, the caller then calls [`Work::mark_legacy_streams`] for each GPU, before the stream is created.
pub fn first_blocking_stream() -> bool {
    !BLOCKING_STREAMS.load(Ordering::Acquire) && !BLOCKING_STREAMS.swap(true, Ordering::AcqRel)
}

impl Work {
    /// Records a point in each legacy stream, while no blocking stream exists that would have to wait for it.
    pub fn mark_legacy_streams(&self) {
        let mut inner = self.inner.lock();
        // Threads that launch from now on learn of the blocking stream, even if there is nothing to mark.
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

    /// Makes all later submissions to streams that synchronize with the legacy stream wait for all work given to them
    /// so far. `stream` is the legacy stream of the current context. `false` if that is not possible now, for instance
    /// because of a capture, or because the queues of streams may be full.
    pub fn order_blocking_streams(&self, stream: CUstream) -> bool {
        let Some(context) = context_of(stream) else { return false };
        let stream = Stream::of(stream, context);
        let mut inner = self.inner.lock();
        self.find_room(&mut inner);
        // An event in the legacy stream is work like any other there.
        let is_possible = inner.has(stream.context) && inner.has_room();
        is_possible && with_current(stream.context, || inner.point_with_room(stream).is_some()) == Ok(true)
    }

    /// Called when the program begins to capture this stream: the last moment to record a point behind its work.
    pub fn mark_stream(&self, stream: CUstream) {
        if let Some(context) = context_of(stream) {
            self.mark_if_dirty(Stream::of(stream, context));
        }
    }

    /// Called when the program destroys this stream. Its work continues.
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

    /// Returns a point for a mark, behind all work given to this stream so far. The calling thread can use the stream.
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
        // More work will follow, so the stream stays dirty. If it became clean, the epoch would have to end, and the
        // next launch would have to note the stream again.
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

    /// Records an event in a stream that the calling thread can use; `None` if the context is not known. The driver
    /// waits if the stream's queue is full, so no lock is held.
    fn record(&self, stream: Stream) -> Option<Result<Arc<Point>, CUresult>> {
        let record = || {
            let event = match self.inner.lock().context(stream.context)?.event() {
                Ok(event) => event,
                Err(error) => return Some(Err(error)),
            };
            let recorded = point::record(&event, stream.handle());
            Some(self.inner.lock().context(stream.context)?.keep(event, recorded))
        };
        if current_or_null() as usize == stream.context {
            return record();
        }
        with_current(stream.context, record).ok().flatten()
    }
}

/// Whether the driver says that all work of this stream is done.
pub(super) fn is_idle(stream: CUstream) -> bool {
    // SAFETY: the program uses this stream. A capturing stream is never queried.
    capture::beside(|capturing| {
        !(capturing && capture::is_capturing(stream)) && unsafe { driver::cuStreamQuery(stream) } == SUCCESS
    })
}

impl Inner {
    /// Keeps the last point of a destroyed stream. Each addition checks two points, so that finished points do not pile
    /// up, in whatever order they finish.
    fn keep_closed(&mut self, point: Arc<Point>) {
        for _ in 0..2 {
            if let Some(oldest) = self.closed_streams.pop_front().filter(|oldest| !oldest.is_done()) {
                self.closed_streams.push_back(oldest);
            }
        }
        self.closed_streams.push_back(point);
    }

    /// Removes idle streams before there are too many: short-lived threads leave many behind.
    pub(super) fn prune_streams(&mut self, stream: Stream) {
        if self.streams.len() >= self.prune_threshold && !self.streams.contains_key(&stream) {
            self.streams.retain(|_, state| state.is_in_use());
            self.prune_threshold = MIN_PRUNE_THRESHOLD.max(self.streams.len() * 2);
        }
    }

    /// Whether only one thread can use this stream: the stream's own thread, or the thread on which its context is
    /// current.
    pub(super) fn is_foreign(&self, stream: Stream) -> bool {
        stream.thread != 0 || self.contexts.iter().find(|c| c.handle == stream.context).is_none_or(|c| c.foreign)
    }

    /// Whether a point is recorded in this stream right behind each submission, since no other thread can or should do
    /// so later.
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

    /// Called before a thread records a point behind all work given to this stream. Until it is recorded, the stream
    /// has work without a point behind it.
    fn begin_recording(&mut self, stream: Stream) {
        // Before the point: a thread that reads the old epoch has submitted before the point; a thread that reads the
        // new epoch notes the stream again, which is dirty from then on.
        epoch::end();
        self.streams.entry(stream).or_default().dirty = false;
        let overlaps = self.is_recording(stream);
        self.recording.iter_mut().filter(|other| other.stream == stream).for_each(|other| other.overlaps = true);
        self.recording.push(Recording { stream, overlaps });
    }

    /// Ends the recording of a point in a stream: it is the stream's last, or it could not be recorded.
    fn has_recorded(&mut self, stream: Stream, recorded: Option<Result<Arc<Point>, CUresult>>) -> Option<Arc<Point>> {
        let at = self.recording.iter().position(|recording| recording.stream == stream)?;
        let overlaps = self.recording.swap_remove(at).overlaps;
        let Some(state) = self.streams.get_mut(&stream) else {
            // Another thread has destroyed the stream, or found that it does not exist.
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
            // Nothing runs there any more, or the stream does not exist and the program's call failed.
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

/// The context of a stream that the calling thread may use. A capturing stream is not queried, as any query may
/// invalidate its capture.
pub fn context_of(stream: CUstream) -> Option<CUcontext> {
    let is_default = (stream as usize) <= STREAM_PER_THREAD as usize;
    let known = if is_default {
        None // the current context's
    } else if capture::any() && capture::is_capturing(stream) {
        capture::context_of_member(stream)
    } else {
        let mut context = core::ptr::null_mut();
        // SAFETY: `context` outlives the call, and the program uses this stream.
        let asked = capture::beside(|_| unsafe { driver::cuStreamGetCtx(stream, &mut context) });
        (asked == SUCCESS).then_some(context)
    };
    known.or_else(|| Some(current_or_null())).filter(|context| !context.is_null())
}

/// Identifies a stream from one launch to the next; `None` for the legacy stream without a context. The legacy stream
/// differs between contexts, so its context identifies it, for which the driver must be queried. While the program has
/// had only one context, the handle is enough.
#[inline]
pub fn name_of(stream: CUstream) -> Option<usize> {
    if !is_legacy(stream) {
        return Some(stream as usize);
    }
    let context = current_or_null();
    let name = if contexts::is_only(context) { stream as usize } else { context as usize };
    (!context.is_null()).then_some(name)
}
