//! Asks the driver whether contexts are idle, before memory is evicted.
//!
//! The rest of this library only knows work that passed a hook. A library may also launch kernels
//! through driver functions that it obtained without the hooks, and these kernels must not lose
//! their memory either. Therefore, before an eviction, the driver itself must confirm that all work
//! submitted to the contexts is done. No such query is allowed during a capture, so memory stays on
//! the GPU until the capture ends.

use super::{Fence, Work, point::Point};
use crate::{
    driver::{
        self,
        context::{is_dead_in, with_current},
        types::*,
    },
    gate::threads,
    work::capture,
};
use alloc::{sync::Arc, vec::Vec};

/// The point behind all work that was submitted to a context.
#[derive(Debug, Default)]
pub struct Passing(Option<Arc<Point>>);

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

    /// Whether a context has finished the work that was submitted before the first query. Returns
    /// `true` if the driver has no context events (before 12.5) and so cannot tell.
    pub fn has_passed(&self, context: usize, passing: &mut Passing) -> bool {
        let mut inner = self.inner.lock();
        if let Some(point) = &passing.0 {
            return point.is_done();
        }
        self.find_room(&mut inner);
        if !inner.has_room() {
            return false;
        }
        let Some(known) = inner.context(context) else { return false };
        match with_current(context, || known.record_all()).flatten() {
            Ok(point) => passing.0.insert(point).is_done(),
            Err(error) => error == ERROR_NOT_FOUND || is_dead_in(context, error),
        }
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
        let synchronize = || capture::synchronizing(|| unsafe { driver::cuCtxSynchronize() });
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
        sys::sync::on_client_thread,
        work::fake,
    };

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
        assert_eq!(capture::begin(stream, || SUCCESS), SUCCESS);
        assert!(work.fence_of_contexts().is_none());
        let mut freed = work.fence_for_freeing().expect("memory is freed even during a capture");
        assert!(work.is_done(&mut freed));
        assert_eq!(driver.count("cuCtxRecordEvent"), 0);
        capture::end(stream);
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
        assert_eq!(capture::begin(stream, || SUCCESS), SUCCESS);
        capture::end(stream);
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
        driver.keep_busy(first);
        let mut passing = Passing::default();
        assert!(!work.has_passed(context as usize, &mut passing));
        driver.keep_busy(second);
        driver.finish(first);
        assert!(work.has_passed(context as usize, &mut passing));
        assert!(!work.has_passed(context as usize, &mut Passing::default()));
        driver.fail("cuCtxRecordEvent", 1, ERROR_NOT_FOUND);
        assert!(work.has_passed(context as usize, &mut Passing::default()), "an old driver cannot tell");
    }

    #[test]
    fn no_thread_is_started_while_a_context_of_a_peer_is_awaited() {
        static PEER: Work = Work::new(|_| None);
        let driver = Driver::new();
        let work: &'static Work = alloc::boxed::Box::leak(alloc::boxed::Box::new(Work::new(|_| Some(&PEER))));
        let [own, other] = [(); 2].map(|()| driver.new_context(0));
        work.add_context(own);
        PEER.add_context(other);
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
        until(|| PEER.inner.lock().contexts.iter().all(|context| !context.is_awaited));
        assert_eq!(driver.count("cuCtxSynchronize"), 2);
    }
}
