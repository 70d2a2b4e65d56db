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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{driver::fake::Driver, driver::types::*, work::capture, work::fake};
    use std::thread;

    #[test]
    fn a_fence_waits_for_every_stream_with_work() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let streams = [(); 2].map(|()| driver.new_stream(context));
        for stream in streams {
            work.note(stream);
            driver.keep_busy(stream);
        }
        let mut fence = work.fence().expect("no capture is active");
        for stream in streams {
            assert!(!work.is_done(&mut fence));
            driver.finish(stream);
        }
        assert!(work.is_done(&mut fence));
    }

    #[test]
    fn a_fence_does_not_wait_for_later_work() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let [first, second] = [(); 2].map(|()| driver.new_stream(context));
        work.note(first);
        let mut fence = work.fence().expect("no capture is active");
        driver.keep_busy(second);
        work.note(second);
        assert!(work.is_done(&mut fence));
        assert!(!work.is_done(&mut work.fence().expect("no capture is active")));
    }

    #[test]
    fn a_fence_that_is_done_is_not_queried_again() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        work.note(driver.new_stream(context));
        let mut fence = work.fence().expect("no capture is active");
        assert!(work.is_done(&mut fence));
        driver.forget_calls();
        assert!(work.is_done(&mut fence) && driver.count("cuEventQuery") == 0);
    }

    /// The driver waits in `cuEventRecord` while the queue of the stream is full.
    #[test]
    fn no_lock_is_held_while_a_point_is_recorded() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context) as usize;
        work.note(stream as CUstream);
        driver.block("cuEventRecord");
        thread::scope(|scope| {
            scope.spawn(|| work.mark_stream(stream as CUstream));
            driver.wait_for_calls("cuEventRecord", 1);
            assert!(work.fence().is_none(), "the point of another thread is missing");
            assert!(!driver.was_any_lock_held("cuEventRecord"));
            driver.unblock("cuEventRecord");
        });
        assert!(work.fence().is_some());
    }

    #[test]
    fn a_capturing_stream_with_work_has_no_fence() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        work.note(stream);
        let begin = || {
            driver.set_capturing(stream, Some(1));
            SUCCESS
        };
        assert_eq!(capture::begin(stream, begin), SUCCESS);
        assert!(work.fence().is_none());
        assert_eq!(driver.count("cuEventRecord"), 0, "the event would be captured");
        capture::end(stream);
        driver.set_capturing(stream, None);
        assert!(work.fence().is_some());
    }

    #[test]
    fn a_fence_covers_work_of_peers() {
        static PEER: Work = Work::new(|_| None);
        let driver = Driver::new();
        let work: &'static Work = alloc::boxed::Box::leak(alloc::boxed::Box::new(Work::new(|_| Some(&PEER))));
        let context = driver.new_context(1);
        PEER.add_context(context);
        let stream = driver.new_stream(context);
        PEER.note(stream);
        driver.keep_busy(stream);
        assert!(work.is_done(&mut work.fence().expect("no capture is active")));
        work.set_peers(1 << 1);
        let mut fence = work.fence().expect("no capture is active");
        assert!(!work.is_done(&mut fence));
        driver.finish(stream);
        assert!(work.is_done(&mut fence));
    }

    #[test]
    fn an_inconclusive_answer_is_neither_done_nor_pending() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        work.note(driver.new_stream(context));
        let mut fence = work.fence().expect("no capture is active");
        driver.fail("cuEventQuery", 2, 906);
        assert_eq!(work.is_done_in(&fence, context as usize), None);
        assert!(!work.is_done(&mut fence));
        assert_eq!(work.is_done_in(&fence, context as usize), Some(true));
        assert_eq!(work.is_done_in(&fence, 1), Some(true), "no work of that context is covered");
    }
}
