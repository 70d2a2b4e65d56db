//! The streams that were given work, and recording points in them.

use super::point::{Point, is_legacy};
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

/// The program has, or had, a stream that waits for the legacy stream, and the other way round.
static BLOCKING_STREAMS: AtomicBool = AtomicBool::new(false);

/// The least number of known streams from which on idle ones are removed.
pub(super) const MIN_PRUNE_THRESHOLD: usize = 64;

/// Identifies a stream: the default streams have one handle in all contexts or all threads. The thread is a number, since the
/// work of its stream may outlive it.
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

impl Stream {
    /// The stream that the calling thread means by this handle.
    pub(super) fn of(handle: CUstream, context: CUcontext) -> Self {
        let thread = if handle == STREAM_PER_THREAD { threads::mine().number.load(Ordering::Relaxed) } else { 0 };
        Self { context: context as usize, handle: handle as usize, thread }
    }

    pub(super) fn handle(self) -> CUstream {
        self.handle as CUstream
    }
}

/// Whether a point in this stream is recorded by the thread that submits there, right behind each submission.
///
/// An event in the legacy stream waits for all blocking streams, and they wait for it. At a later time it would tie together
/// work that the program did not: what waits in one blocking stream for a step that the program takes later in another would
/// wait for ever. As long as there are no blocking streams, an event there ties nothing, and can be recorded by any thread.
#[inline]
pub fn is_marked_at_once(stream: CUstream) -> bool {
    is_legacy(stream) && BLOCKING_STREAMS.load(Ordering::Acquire)
}

/// The program is about to make its first blocking stream, on whichever GPU. Returns `false` if it was not the first.
/// Afterwards [`Work::mark_legacy_streams`] is called for each GPU, before the stream is made.
pub fn first_blocking_stream() -> bool {
    !BLOCKING_STREAMS.load(Ordering::Acquire) && !BLOCKING_STREAMS.swap(true, Ordering::AcqRel)
}

impl Work {
    /// Records a point in each legacy stream, while there is no blocking stream that would have to wait for it.
    pub fn mark_legacy_streams(&self) {
        let mut inner = self.inner.lock();
        // Whoever launches from now on learns of the blocking stream, even where there is nothing to mark.
        epoch::end();
        let unmarked =
            |(stream, state): (&Stream, &StreamState)| (state.dirty && is_legacy(stream.handle())).then_some(*stream);
        let unmarked: Vec<_> = inner.streams.iter().filter_map(unmarked).collect();
        for stream in unmarked {
            inner.point_in_its_context(stream);
        }
    }

    /// Has whatever is submitted from now on to streams that wait for the legacy stream wait for what all of them have been given.
    /// `stream` is the legacy stream of the current context. `false` if that is not possible now, for instance because of a
    /// capture.
    pub fn order_blocking_streams(&self, stream: CUstream) -> bool {
        let Some(context) = context_of(stream) else { return false };
        let mut inner = self.inner.lock();
        let stream = Stream::of(stream, context);
        if !inner.has(stream.context) {
            return false;
        }
        // An event in the legacy stream is work like any other there.
        inner.point_in_its_context(stream).is_some()
    }

    /// The program begins to capture this stream: the last moment to record a point behind its work.
    pub fn mark_stream(&self, stream: CUstream) {
        self.with_stream(stream, Inner::mark_if_dirty);
    }

    /// The program destroys this stream, whose work goes on.
    pub fn forget_stream(&self, stream: CUstream) {
        let is_idle = is_idle(stream);
        let mark = |inner: &mut Inner, stream| {
            if !is_idle {
                inner.mark_if_dirty(stream);
            }
            if let Some(StreamState { last: Some(point), .. }) = inner.streams.remove(&stream)
                && !is_idle
            {
                inner.keep_closed(point);
            }
            epoch::end();
        };
        self.with_stream(stream, mark);
    }

    pub(super) fn with_stream(&self, stream: CUstream, then: impl FnOnce(&mut Inner, Stream)) {
        let Some(context) = context_of(stream) else { return };
        then(&mut self.inner.lock(), Stream::of(stream, context));
    }
}

/// Whether all work of this stream is done, as far as the driver says so.
pub(super) fn is_idle(stream: CUstream) -> bool {
    // SAFETY: the program uses this stream. A stream that captures is never asked.
    capture::beside(|capturing| {
        !(capturing && capture::is_capturing(stream)) && unsafe { driver::cuStreamQuery(stream) } == SUCCESS
    })
}

impl Inner {
    fn mark_if_dirty(&mut self, stream: Stream) {
        if self.streams.get(&stream).is_some_and(|state| state.dirty) {
            let _ = with_current(stream.context, || self.point_in(stream));
        }
    }

    /// Keeps the last point of a stream that is destroyed. For each that is added, two are asked: so those that are done do not
    /// pile up, whichever of them are done first.
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
            self.streams.retain(|_, state| state.dirty || state.last.as_ref().is_some_and(|point| !point.is_done()));
            self.prune_threshold = MIN_PRUNE_THRESHOLD.max(self.streams.len() * 2);
        }
    }

    /// A point for a mark, behind everything that this stream was given so far. The calling thread can use the stream.
    pub(super) fn point_of_mark(&mut self, stream: Stream) -> Option<Arc<Point>> {
        match self.streams.get(&stream) {
            Some(StreamState { dirty: false, last: Some(point) }) => Some(point.clone()),
            // More will follow, so the stream stays dirty. Were it clean, the epoch would have to end, and the next launch would
            // have to note the stream again.
            Some(StreamState { dirty: true, .. }) if !self.needs_points_at_once(stream) => {
                self.in_its_context(stream, |inner| inner.record(stream)?.ok())
            }
            _ => self.point_in_its_context(stream),
        }
    }

    /// Whether only one thread can use this stream: the one that it belongs to, or to which its context is current.
    pub(super) fn is_foreign(&self, stream: Stream) -> bool {
        stream.thread != 0 || self.contexts.iter().find(|c| c.handle == stream.context).is_none_or(|c| c.foreign)
    }

    /// Whether a point is recorded in this stream right behind each submission, since no other thread can do so later, or none should.
    pub(super) fn needs_points_at_once(&self, stream: Stream) -> bool {
        self.is_foreign(stream) || is_marked_at_once(stream.handle())
    }

    /// Records a point in a stream that the calling thread can use, in any current context.
    pub(super) fn point_in_its_context(&mut self, stream: Stream) -> Option<Arc<Point>> {
        self.in_its_context(stream, |inner| inner.point_in(stream))
    }

    fn in_its_context<R>(&mut self, stream: Stream, f: impl FnOnce(&mut Self) -> Option<R>) -> Option<R> {
        if current_or_null() as usize == stream.context {
            return f(self);
        }
        with_current(stream.context, || f(self)).ok().flatten()
    }

    /// Records a point in a stream whose context is current.
    pub(super) fn point_in(&mut self, stream: Stream) -> Option<Arc<Point>> {
        // Before the point: a thread that reads the old epoch has submitted before the point; one that reads the new epoch
        // notes the stream again, after this.
        epoch::end();
        match self.record(stream)? {
            Ok(point) => {
                self.streams.insert(stream, StreamState { dirty: false, last: Some(point.clone()) });
                Some(point)
            }
            Err(error) => {
                // Nothing runs there any more, or there is no such stream and the program's call failed.
                if is_dead(error) || matches!(error, ERROR_INVALID_HANDLE | ERROR_STREAM_DETACHED) {
                    self.streams.remove(&stream);
                }
                None
            }
        }
    }

    /// Records an event in a stream whose context is current; `None` if the context is not known.
    fn record(&mut self, stream: Stream) -> Option<Result<Arc<Point>, CUresult>> {
        Some(self.context(stream.context)?.record(stream.handle()))
    }
}

/// The context of a stream that the calling thread may use. A stream that captures is not asked, as no query of it is sure to
/// leave its capture whole.
pub fn context_of(stream: CUstream) -> Option<CUcontext> {
    let is_default = (stream as usize) <= STREAM_PER_THREAD as usize;
    let known = if is_default {
        None // the current context's
    } else if capture::any() && capture::is_capturing(stream) {
        capture::context_of_member(stream)
    } else {
        let mut context = core::ptr::null_mut();
        // SAFETY: a valid place, and a stream that the program uses.
        let asked = capture::beside(|_| unsafe { driver::cuStreamGetCtx(stream, &mut context) });
        (asked == SUCCESS).then_some(context)
    };
    known.or_else(|| Some(current_or_null())).filter(|context| !context.is_null())
}

/// Identifies a stream from one launch to the next; `None` for the legacy stream of no context. The legacy stream differs between
/// contexts, so its context names it, which the driver must be asked for: as long as the program has had only one, its handle does.
#[inline]
pub fn name_of(stream: CUstream) -> Option<usize> {
    if !is_legacy(stream) {
        return Some(stream as usize);
    }
    let context = current_or_null();
    let name = if contexts::is_only(context) { stream as usize } else { context as usize };
    (!context.is_null()).then_some(name)
}
