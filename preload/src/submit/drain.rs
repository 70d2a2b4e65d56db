//! Draining: detecting when submitted work is done.
//!
//! A [`Fence`] is a point in every stream with work. It covers the work that passed a hook. A library may
//! also launch kernels through driver functions that it obtained without the hooks, and these kernels
//! must not lose their memory either. Therefore, before an eviction, the driver itself must confirm that
//! all work submitted to the contexts is done ([`Work::fence_of_contexts`]). No such query is allowed
//! during a capture, so memory stays on the GPU until the capture ends.

use super::{Gate, Lane, Work, captures, closed, points::Point, streams::Stream, threads};
use crate::driver::{
    self,
    context::{is_dead_in, with_current},
    types::*,
};
use alloc::{sync::Arc, vec::Vec};
use core::sync::atomic::Ordering;

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

    /// Like [`is_done`](Self::is_done), for a fence that `record` records at the first query at which that is
    /// possible.
    pub fn has_ended(&self, fence: &mut Option<Fence>, record: impl FnOnce() -> Option<Fence>) -> bool {
        if fence.is_none() {
            *fence = record();
        }
        fence.as_mut().is_some_and(|fence| self.is_done(fence))
    }
}

impl Lane {
    /// The number of submissions of all threads to this GPU and its peers.
    pub fn submissions(&self) -> u64 {
        let peers = self.peers().map(|lane| threads::submissions(lane.index));
        peers.fold(threads::submissions(self.index), u64::wrapping_add)
    }

    /// Whether no thread is inside the gate of this GPU or of a peer.
    pub fn is_quiet(&self) -> bool {
        Gate::is_quiet(self.index) && self.peers().all(|lane| Gate::is_quiet(lane.index))
    }

    pub fn set_drained(&self, drained: bool) {
        self.drained.store(drained, Ordering::SeqCst);
    }

    /// Whether this client runs no work that may access this GPU's memory, and can start no such
    /// work.
    pub fn is_drained(&self) -> bool {
        self.is_shut() && self.is_quiet() && !captures::any()
    }

    /// Whether the work of this client on this GPU and its peers has ended, and calls that need the lock wait.
    /// Calls that need only the memory may be in progress.
    pub fn is_shut(&self) -> bool {
        // The gate must be closed for the lock. Behind a gate that is closed only for memory, earlier work may
        // still be running.
        let is_shut = |lane: &Self| lane.drained.load(Ordering::SeqCst) && lane.gate.is_closed_for(closed::LOCK);
        is_shut(self) && self.peers().all(is_shut)
    }
}

impl Work {
    /// Returns a fence behind all work that was submitted to the contexts of this GPU and its peers, by any
    /// call. Returns `None` if the driver cannot be queried at the moment.
    ///
    /// An event of a primary context also covers the green contexts of its GPU.
    pub fn fence_of_contexts(&'static self) -> Option<Fence> {
        // Without context events, each fence needs a thread for every context. While a thread still waits, no
        // fence can be completed, so no further thread is started.
        if self.is_awaited() || self.peer_works().any(Self::is_awaited) {
            return None;
        }
        let mut fence = self.idle_fence()?;
        for other in self.peer_works() {
            fence.others.push((other, other.idle_fence()?));
        }
        Some(fence)
    }

    /// Returns a fence for memory that is being freed. The fence includes context events if they can be
    /// recorded without waiting and no capture is active. The program itself requested the free, so memory
    /// is freed even during a capture.
    pub fn fence_for_freeing(&self) -> Option<Fence> {
        let mut fence = self.fence()?;
        let add = |work: &Self, fence: &mut Fence| fence.points.extend(work.record_contexts().unwrap_or_default());
        fence.others.iter_mut().for_each(|(work, other)| add(work, other));
        add(self, &mut fence);
        Some(fence)
    }

    /// Returns a fence for a driver call that waits for running work. Before driver 12.5, the fence covers only
    /// work that passed a hook. Returns `None` if the driver cannot be queried at the moment.
    pub fn fence_for_waiting(&self) -> Option<Fence> {
        match self.record_contexts() {
            Err(ERROR_NOT_FOUND) => self.fence_of_own(),
            recorded => recorded.ok().map(Fence::of),
        }
    }

    fn idle_fence(&'static self) -> Option<Fence> {
        let points = match self.record_contexts() {
            Err(ERROR_NOT_FOUND) => self.synchronize_contexts()?,
            recorded => recorded.ok()?,
        };
        Some(Fence::of(points))
    }

    fn record_contexts(&self) -> Result<Vec<Arc<Point>>, CUresult> {
        let mut inner = self.inner.lock();
        self.find_room(&mut inner);
        if !inner.has_room() {
            return Err(ERROR_NOT_READY);
        }
        let mut points: Vec<_> = inner.dying.iter().map(|dying| dying.end.clone()).collect();
        for context in inner.contexts.iter_mut().filter(|context| !context.foreign) {
            match with_current(context.handle, || context.record_all()).flatten() {
                Ok(point) => points.push(point),
                Err(error) if is_dead_in(context.handle, error) => {} // no work runs in a broken context
                Err(error) => return Err(error),
            }
        }
        Ok(points)
    }

    /// Like `record_contexts`, for drivers without context events (before 12.5): starts threads that wait
    /// for the contexts. Returns `None` while a context is being destroyed.
    fn synchronize_contexts(&'static self) -> Option<Vec<Arc<Point>>> {
        let contexts: Vec<usize> = {
            let mut inner = self.inner.lock();
            if !inner.dying.is_empty() {
                return None;
            }
            let own = inner.contexts.iter_mut().filter(|context| !context.foreign);
            own.map(|context| {
                context.is_awaited = true;
                context.handle
            })
            .collect()
        };
        let wait_for = |context: usize| {
            let point = Arc::new(Point::without_event(context));
            let its = point.clone();
            let is_started = threads::spawn(c"nvshare-idle", move || self.synchronize(&its));
            if !is_started {
                self.is_not_awaited(context);
            }
            is_started.then_some(point)
        };
        let points: Vec<_> = contexts.into_iter().map(wait_for).collect();
        points.into_iter().collect()
    }

    /// Waits until all work of the point's context is done. If the wait fails, the point stays pending.
    fn synchronize(&self, point: &Point) {
        // SAFETY: the call takes no arguments.
        let synchronize = || captures::synchronize(|| unsafe { driver::cuCtxSynchronize() });
        let result = self.enter(point.context, || {
            let result = synchronize()?;
            Some(result == SUCCESS || is_dead_in(point.context, result))
        });
        if result.flatten() == Some(true) {
            point.set_done();
        }
        self.is_not_awaited(point.context);
    }

    /// Whether a thread waits for a context. Its wait does not cover later submissions.
    fn is_awaited(&self) -> bool {
        self.inner.lock().contexts.iter().any(|context| context.is_awaited)
    }

    fn is_not_awaited(&self, context: usize) {
        if let Some(context) = self.inner.lock().context(context) {
            context.is_awaited = false;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::fake::{Driver, until},
        submit::{LANES, fake},
        sys::sync::on_client_thread,
    };
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
        assert_eq!(captures::begin(stream, begin), SUCCESS);
        assert!(work.fence().is_none());
        assert_eq!(driver.count("cuEventRecord"), 0, "the event would be captured");
        captures::end(stream);
        driver.set_capturing(stream, None);
        assert!(work.fence().is_some());
    }

    #[test]
    fn a_fence_covers_work_of_peers() {
        let driver = Driver::new();
        let [work, peer] = [0, 1].map(|index| &LANES[index].work);
        let context = driver.new_context(1);
        peer.add_context(context);
        let stream = driver.new_stream(context);
        peer.note(stream);
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

    #[test]
    fn a_fence_of_contexts_covers_work_that_passed_no_hook() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        driver.keep_busy(stream);
        let mut known = work.fence().expect("no capture is active");
        let mut all = work.fence_of_contexts().expect("no capture is active");
        assert_eq!((work.is_done(&mut known), work.is_done(&mut all)), (true, false));
        driver.finish(stream);
        assert!(work.is_done(&mut all));
    }

    #[test]
    fn contexts_are_not_queried_during_a_capture() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        assert_eq!(captures::begin(stream, || SUCCESS), SUCCESS);
        assert!(work.fence_of_contexts().is_none());
        let mut freed = work.fence_for_freeing().expect("memory is freed even during a capture");
        assert!(work.is_done(&mut freed));
        assert_eq!(driver.count("cuCtxRecordEvent"), 0);
        captures::end(stream);
        assert!(work.fence_of_contexts().is_some());
    }

    #[test]
    fn a_broken_context_counts_as_idle() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        driver.keep_busy(driver.new_stream(context));
        driver.fail("cuCtxRecordEvent", 1, 700);
        let mut fence = work.fence_of_contexts().expect("no work runs in a broken context");
        assert!(work.is_done(&mut fence));
        driver.fail("cuCtxRecordEvent", 1, ERROR_OUT_OF_MEMORY);
        assert!(work.fence_of_contexts().is_none(), "the error concerns only this call");
    }

    /// Before 12.5, the driver has no context events.
    #[test]
    fn a_thread_without_locks_waits_for_contexts_of_old_drivers() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        driver.fail("cuCtxRecordEvent", usize::MAX, ERROR_NOT_FOUND);
        driver.block("cuCtxSynchronize");
        let client = on_client_thread();
        let mut fence = work.fence_of_contexts().expect("a thread was started");
        driver.wait_for_calls("cuCtxSynchronize", 1);
        assert!(!work.is_done(&mut fence) && !driver.was_any_lock_held("cuCtxSynchronize"));
        for _ in 0..3 {
            assert!(work.fence_of_contexts().is_none(), "the thread's wait does not cover later submissions");
        }
        drop(client);
        // A capture begins although a thread still waits for the context.
        let stream = driver.new_stream(context);
        assert_eq!(captures::begin(stream, || SUCCESS), SUCCESS);
        captures::end(stream);
        driver.unblock("cuCtxSynchronize");
        until(|| work.is_done(&mut fence));
        assert_eq!(driver.count("cuCtxSynchronize"), 1);
        until(|| work.fence_of_contexts().is_some());
    }

    #[test]
    fn a_failed_wait_for_a_context_does_not_count_as_idle() {
        let driver = Driver::new();
        let (work, _) = fake::new(&driver);
        driver.fail("cuCtxRecordEvent", usize::MAX, ERROR_NOT_FOUND);
        driver.fail("cuCtxSynchronize", 1, ERROR_INVALID_VALUE);
        let mut failed = work.fence_of_contexts().expect("a thread was started");
        let mut fence = None;
        until(|| {
            fence = work.fence_of_contexts();
            fence.is_some()
        });
        let mut fence = fence.expect("a thread was started");
        until(|| work.is_done(&mut fence));
        assert!(!work.is_done(&mut failed));
    }

    #[test]
    fn work_submitted_after_the_first_query_is_not_awaited() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let [first, second] = [(); 2].map(|()| driver.new_stream(context));
        let has_ended = |fence: &mut Option<Fence>| work.has_ended(fence, || work.fence_for_waiting());
        driver.keep_busy(first);
        let mut fence = None;
        driver.fail("cuCtxRecordEvent", 1, ERROR_NOT_READY);
        assert!(!has_ended(&mut fence) && fence.is_none(), "the driver cannot be queried");
        assert!(!has_ended(&mut fence));
        driver.keep_busy(second);
        driver.finish(first);
        assert!(has_ended(&mut fence));
        assert!(!has_ended(&mut None));
        driver.fail("cuCtxRecordEvent", 1, ERROR_NOT_FOUND);
        assert!(has_ended(&mut None), "an old driver knows only work that passed a hook");
    }

    #[test]
    fn no_thread_is_started_while_a_context_of_a_peer_is_awaited() {
        let driver = Driver::new();
        let [work, peer] = [0, 1].map(|index| &LANES[index].work);
        let [own, other] = [(); 2].map(|()| driver.new_context(0));
        work.add_context(own);
        peer.add_context(other);
        work.set_peers(1 << 1);
        driver.fail("cuCtxRecordEvent", usize::MAX, ERROR_NOT_FOUND);
        driver.block_in(other, "cuCtxSynchronize");
        drop(work.fence_of_contexts().expect("two threads were started"));
        driver.wait_for_calls("cuCtxSynchronize", 2);
        for _ in 0..4 {
            until(|| work.inner.lock().contexts.iter().all(|context| !context.is_awaited));
            assert!(work.fence_of_contexts().is_none(), "the peer is awaited");
        }
        driver.unblock("cuCtxSynchronize");
        until(|| peer.inner.lock().contexts.iter().all(|context| !context.is_awaited));
        assert_eq!(driver.count("cuCtxSynchronize"), 2);
    }
}
