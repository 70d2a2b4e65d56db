//! Fences: they show whether all work submitted so far is done.

use super::point::Point;
use super::{Work, streams::Stream};
use crate::driver::context::with_current;
use alloc::{sync::Arc, vec::Vec};

/// The largest number of streams for which samples are taken. Each sample costs an event per stream.
const MAX_SAMPLED_STREAMS: usize = 32;

/// Covers all work that had been submitted when the fence was recorded.
#[derive(Debug, Default)]
pub struct Fence {
    pub(super) points: Vec<Arc<Point>>,
    /// The fences of peer GPUs.
    pub(super) others: Vec<(&'static Work, Fence)>,
}

impl Fence {
    pub(super) fn of(points: Vec<Arc<Point>>) -> Self {
        Self { points, others: Vec::new() }
    }
}

impl Work {
    /// Records a fence behind all submitted work that may access memory of this GPU. Returns `None` if that
    /// is impossible at the moment, for example because of a capture.
    pub fn fence(&self) -> Option<Fence> {
        let mut fence = self.fence_of_own()?;
        for work in self.peer_works() {
            fence.others.push((work, work.fence_of_own()?));
        }
        Some(fence)
    }

    /// Records a fence for a sample of the utilization, unless the program uses too many streams.
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
            return None; // another thread is recording a point
        }
        for stream in dirty {
            // Only one thread can use a foreign stream, and that thread is about to record a point
            // there. If queues may be full, points are recorded when the queues have room again.
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

    /// Whether all work that the fence covers in one context of this GPU is done. Returns `None` if the
    /// driver's answer is inconclusive.
    pub fn is_done_in(&self, fence: &Fence, context: usize) -> Option<bool> {
        // While the lock is held, the context cannot be destroyed.
        let _inner = self.inner.lock();
        let points = fence.points.iter().filter(|point| point.context == context);
        points.map(|point| point.progress()).find(|progress| *progress != Some(true)).unwrap_or(Some(true))
    }

    /// Whether all work that the fence covers is done. A fence that is done stays done and is not queried
    /// again.
    pub fn is_done(&self, fence: &mut Fence) -> bool {
        while let Some((work, other)) = fence.others.last_mut() {
            if !work.is_done(other) {
                return false;
            }
            fence.others.pop();
        }
        // While the lock is held, no context can be destroyed.
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
