//! Fences: whether all submitted work is done.

use super::point::Point;
use super::{Work, streams::Stream};
use crate::driver::context::with_current;
use alloc::{sync::Arc, vec::Vec};

/// The largest number of streams for which samples are taken, since each sample costs an event per stream.
const MAX_SAMPLED_STREAMS: usize = 32;

/// Covers everything that had been submitted when it was recorded.
#[derive(Debug, Default)]
pub struct Fence {
    pub(super) points: Vec<Arc<Point>>,
    /// The fences of peers.
    pub(super) others: Vec<(&'static Work, Fence)>,
}

impl Fence {
    pub(super) fn of(points: Vec<Arc<Point>>) -> Self {
        Self { points, others: Vec::new() }
    }
}

impl Work {
    /// Records a fence behind all submitted work that may access memory of this GPU. `None` if that is not possible at
    /// the moment, for instance because of a capture.
    pub fn fence(&self) -> Option<Fence> {
        let mut fence = self.fence_of_own()?;
        for work in self.peer_works() {
            fence.others.push((work, work.fence_of_own()?));
        }
        Some(fence)
    }

    /// Records a fence for a sample of the utilization, if it costs little.
    pub fn sample(&self) -> Option<Fence> {
        let count = self.inner.lock().streams.len();
        if count > MAX_SAMPLED_STREAMS { None } else { self.fence() }
    }

    pub(super) fn fence_of_own(&self) -> Option<Fence> {
        let mut inner = self.inner.lock();
        inner.closed_streams.retain(|point| !point.is_done());
        let mut fence = Fence::of(inner.closed_streams.iter().cloned().collect());
        fence.points.extend(inner.dying.iter().map(|dying| dying.end.clone()));
        inner.streams.retain(|_, state| state.is_in_use());
        let dirty: Vec<Stream> = inner.streams.iter().filter(|(_, state)| state.dirty).map(|(s, _)| *s).collect();
        if !dirty.is_empty() {
            self.find_room(&mut inner);
        }
        if !inner.recording.is_empty() {
            return None; // a point follows in a moment
        }
        for stream in dirty {
            // Only the stream's own thread can record a point there, and is about to. If the queue may be full, points
            // are recorded as it empties.
            let made = !inner.is_foreign(stream)
                && inner.has_room()
                && with_current(stream.context, || inner.point_with_room(stream).is_some()) == Ok(true);
            if !made && inner.streams.contains_key(&stream) {
                return None;
            }
        }
        fence.points.extend(inner.streams.values().filter_map(|state| state.last.clone()));
        Some(fence)
    }

    /// Whether all work that the fence covers in one context of this GPU is done; `None` if the driver does not say.
    pub fn is_done_in(&self, fence: &Fence, context: usize) -> Option<bool> {
        // Prevents the destruction of the context.
        let _inner = self.inner.lock();
        let points = fence.points.iter().filter(|point| point.context == context);
        points.map(|point| point.progress()).find(|progress| *progress != Some(true)).unwrap_or(Some(true))
    }

    /// Whether all work that the fence covers is done. A fence that is done stays done, and querying it costs nothing.
    pub fn is_done(&self, fence: &mut Fence) -> bool {
        while let Some((work, other)) = fence.others.last_mut() {
            if !work.is_done(other) {
                return false;
            }
            fence.others.pop();
        }
        // Prevents the destruction of contexts.
        let _inner = self.inner.lock();
        while let Some(point) = fence.points.last() {
            if !point.is_done() {
                return false;
            }
            fence.points.pop();
        }
        true
    }
}
