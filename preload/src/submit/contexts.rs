//! The program's contexts on one GPU.

use super::{
    Inner, Work, epoch,
    points::{Context, Point},
    queue::Unmarked,
    streams::{Stream, StreamState},
};
use crate::{
    driver::{
        context::{is_broken_in, with_current},
        types::*,
    },
    sys::time,
};
use alloc::{collections::BTreeMap, sync::Arc, vec::Vec};
use core::time::Duration;

/// The interval between checks whether threads have left a context or another thread has destroyed it.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

/// A context that the program is destroying. The driver's call waits for the context's work, but the
/// client's thread, the gates and other threads must not wait for that call. So during the call this
/// library holds no lock and does not enter the context. The context's work counts as running until the
/// driver's call has returned. Rejected: counting the context as idle. Its kernels still run and would
/// lose their memory.
#[derive(Debug)]
pub(super) struct Dying {
    context: Context,
    streams: BTreeMap<Stream, StreamState>,
    /// A point that is done when the context, and therefore its work, has ended.
    pub(super) end: Arc<Point>,
}

impl Work {
    /// Counts another retain or attach of a known context. Returns `false` if the context is not known.
    pub fn use_context(&self, context: CUcontext) -> bool {
        let mut inner = self.inner.lock();
        let known = inner.context(context as usize);
        known.map(|context| context.uses += 1).is_some()
    }

    /// Counts the creation, or another retain or attach, of a context that is not being destroyed.
    pub fn add_context(&self, context: CUcontext) {
        let mut inner = self.inner.lock();
        if !inner.has(context as usize) {
            inner.contexts.push(Context::new(context as usize, false));
        }
        if let Some(context) = inner.context(context as usize) {
            context.uses += 1;
        }
    }

    /// Whether the program is destroying a context with this handle.
    pub fn is_dying(&self, context: CUcontext) -> bool {
        self.inner.lock().is_dying(context as usize)
    }

    /// Whether the program has this context or is destroying it.
    pub fn knows(&self, context: usize) -> bool {
        self.inner.lock().find_context(context).is_some()
    }

    /// Runs `f` in a context of the program. The context is not destroyed until `f` returns. The calling
    /// thread holds no lock. Returns `None` if the context cannot be entered.
    pub fn enter<R>(&self, context: usize, f: impl FnOnce() -> R) -> Option<R> {
        {
            let mut inner = self.inner.lock();
            inner.context(context).filter(|context| !context.foreign)?.users += 1;
        }
        let result = with_current(context, f).ok();
        self.inner.lock().leave(context);
        result
    }

    /// Makes a call that ends one use of a context. Returns `None` without a call if no other uses remain,
    /// because the call would destroy the context. The context counts as entered until the call has
    /// returned. Otherwise another thread that ends the last use could destroy the context during the call.
    pub fn release_use(&self, context: CUcontext, call: impl FnOnce() -> CUresult) -> Option<CUresult> {
        {
            let mut inner = self.inner.lock();
            let context = inner.context(context as usize).filter(|context| context.uses > 1)?;
            (context.uses, context.users) = (context.uses - 1, context.users + 1);
        }
        let result = call();
        let mut inner = self.inner.lock();
        inner.leave(context as usize);
        if result != SUCCESS
            && let Some(context) = inner.find_context(context as usize)
        {
            context.uses += 1;
        }
        Some(result)
    }

    /// Called before a call that may destroy a context. On return, no thread of this library is in the
    /// context, and none enters it. Returns `false` if the context is not known. Otherwise the caller must
    /// call [`end_of_destroying`](Self::end_of_destroying) afterwards.
    pub fn begin_destroying(&self, context: CUcontext) -> bool {
        let handle = context as usize;
        {
            let mut inner = self.inner.lock();
            // Another thread may already be destroying the context.
            while inner.is_dying(handle) {
                drop(inner);
                time::sleep(POLL_INTERVAL);
                inner = self.inner.lock();
            }
            // The epoch ends, because from now on a new stream may receive the handle of a stream
            // that is destroyed with the context.
            epoch::end();
            let Some(at) = inner.contexts.iter().position(|context| context.handle == handle) else { return false };
            let context = inner.contexts.swap_remove(at);
            context.begin_to_end();
            let of_others = core::mem::take(&mut inner.streams);
            let (streams, of_others) = of_others.into_iter().partition(|(stream, _)| stream.context == handle);
            inner.streams = of_others;
            inner.forget_marks(handle);
            inner.dying.push(Dying { context, streams, end: Arc::new(Point::without_event(handle)) });
        }
        while self.inner.lock().find_context(handle).is_some_and(|context| context.users > 0) {
            time::sleep(POLL_INTERVAL);
        }
        true
    }

    /// Whether a context that is being destroyed is the last context on this GPU, apart from green
    /// contexts.
    pub fn is_last(&self, context: CUcontext) -> bool {
        let inner = self.inner.lock();
        let others = inner.dying.iter().map(|dying| &dying.context).chain(&inner.contexts);
        others.filter(|other| other.handle != context as usize).all(|other| other.foreign)
    }

    /// Called when the destroying call has returned. With `is_gone`, the context no longer exists.
    /// Otherwise it stays. If another thread has retained the context during the call, the call
    /// succeeds and the context stays with one use less.
    pub fn end_of_destroying(&self, context: CUcontext, is_gone: bool, result: CUresult) {
        let mut inner = self.inner.lock();
        let Some(at) = inner.dying.iter().position(|dying| dying.context.handle == context as usize) else { return };
        let Dying { mut context, streams, end } = inner.dying.swap_remove(at);
        end.set_done();
        if is_gone {
            context.end();
            inner.forget_context(context.handle);
            return;
        }
        context.stay();
        context.uses = context.uses.saturating_sub(u32::from(result == SUCCESS));
        inner.contexts.push(context);
        inner.streams.extend(streams);
    }

    /// Uses one new context, once, on the client's thread, before other threads depend on that
    /// thread. On first use, the driver sets up thread-local storage. The setup may need the
    /// dynamic loader's lock, which a thread that waits at the gate may hold.
    pub fn warm_up_contexts(&self) {
        let mut inner = self.inner.lock();
        if let Some(context) = inner.contexts.iter_mut().find(|c| !c.foreign && !c.warm) {
            context.warm = true;
            let _ = with_current(context.handle, || context.warm_up());
        }
    }

    /// Forgets a green context that has been destroyed.
    pub fn forget_foreign(&self, context: CUcontext) {
        self.inner.lock().forget_context(context as usize);
    }

    pub fn has_contexts(&self) -> bool {
        !self.inner.lock().contexts.is_empty()
    }

    pub fn has_context(&self, context: CUcontext) -> bool {
        self.inner.lock().has(context as usize)
    }

    /// Whether all work that may access memory of this GPU runs in this context.
    pub fn is_all_in(&self, context: CUcontext) -> bool {
        let inner = self.inner.lock();
        self.peers() == 0 && inner.has(context as usize) && inner.contexts.len() == 1 && inner.dying.is_empty()
    }

    /// Whether at least one context exists and all contexts are broken.
    pub fn are_all_broken(&self) -> bool {
        let inner = self.inner.lock();
        let mut own = inner.contexts.iter().filter(|c| !c.foreign).peekable();
        own.peek().is_some() && own.all(|context| is_broken_in(context.handle))
    }

    /// Returns the program's contexts on this GPU that can be used to copy memory.
    pub fn contexts(&self) -> Vec<CUcontext> {
        self.inner.lock().contexts.iter().filter(|c| !c.foreign).map(|c| c.handle as CUcontext).collect()
    }
}

impl Inner {
    pub(super) fn has(&self, context: usize) -> bool {
        self.contexts.iter().any(|c| c.handle == context)
    }

    pub(super) fn context(&mut self, context: usize) -> Option<&mut Context> {
        self.contexts.iter_mut().find(|c| c.handle == context)
    }

    fn is_dying(&self, context: usize) -> bool {
        self.dying.iter().any(|dying| dying.context.handle == context)
    }

    /// Like `context`, but also finds a context that is being destroyed.
    fn find_context(&mut self, context: usize) -> Option<&mut Context> {
        let dying = self.dying.iter_mut().map(|dying| &mut dying.context);
        self.contexts.iter_mut().chain(dying).find(|c| c.handle == context)
    }

    /// Records that a thread has left a context.
    pub(super) fn leave(&mut self, context: usize) {
        if let Some(context) = self.find_context(context) {
            context.users -= 1;
        }
    }

    pub(super) fn forget_context(&mut self, context: usize) {
        self.contexts.iter().filter(|c| c.handle == context).for_each(Context::end);
        self.contexts.retain(|c| c.handle != context);
        self.streams.retain(|stream, _| stream.context != context);
        self.closed_streams.retain(|point| point.context != context);
        self.forget_marks(context);
        epoch::end();
    }

    fn forget_marks(&mut self, context: usize) {
        self.marks.retain(|mark| mark.point.context != context);
        self.unmarked = Unmarked::NONE;
        self.outstanding = self.marks.iter().map(|mark| mark.weight).sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::fake::{Driver, until},
        submit::fake,
    };
    use core::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    #[test]
    fn a_context_is_destroyed_after_all_threads_have_left_it() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let handle = context as usize;
        let (is_inside, leaves) = (AtomicBool::new(false), AtomicBool::new(false));
        thread::scope(|scope| {
            scope.spawn(|| {
                work.enter(handle, || {
                    is_inside.store(true, Ordering::SeqCst);
                    until(|| leaves.load(Ordering::SeqCst));
                })
            });
            until(|| is_inside.load(Ordering::SeqCst));
            let destroying = scope.spawn(move || work.begin_destroying(handle as CUcontext));
            until(|| work.is_dying(context));
            assert_eq!(work.enter(handle, || ()), None, "no other thread enters the context");
            assert!(!destroying.is_finished() && work.knows(handle));
            leaves.store(true, Ordering::SeqCst);
            assert!(destroying.join().expect("no panic"));
        });
        work.end_of_destroying(context, true, SUCCESS);
        assert!(!work.knows(handle) && !work.begin_destroying(context));
    }

    #[test]
    fn work_of_a_dying_context_is_pending_until_the_context_has_ended() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        work.note(stream);
        let mut before = work.fence().expect("no capture is active");
        assert!(work.begin_destroying(context));
        driver.forget_calls();
        let mut during = work.fence().expect("no capture is active");
        assert!(!work.is_done(&mut before) && !work.is_done(&mut during));
        assert_eq!(driver.count("cuEventQuery"), 0, "the events may no longer exist");
        work.end_of_destroying(context, true, SUCCESS);
        assert!(work.is_done(&mut before) && work.is_done(&mut during));
        assert_eq!(driver.count("cuEventQuery"), 0);
    }

    #[test]
    fn a_context_that_was_not_destroyed_keeps_its_work() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        let stream = driver.new_stream(context);
        work.note(stream);
        driver.keep_busy(stream);
        assert!(work.begin_destroying(context));
        assert!(!work.has_context(context) && work.knows(context as usize));
        work.end_of_destroying(context, false, ERROR_INVALID_VALUE);
        assert!(work.has_context(context));
        let mut fence = work.fence().expect("no capture is active");
        assert!(!work.is_done(&mut fence));
        driver.finish(stream);
        assert!(work.is_done(&mut fence));
    }

    #[test]
    fn the_last_use_of_a_context_is_released_only_by_destroying_it() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        assert!(work.use_context(context));
        assert_eq!(work.release_use(context, || ERROR_INVALID_VALUE), Some(ERROR_INVALID_VALUE));
        assert_eq!(work.release_use(context, || SUCCESS), Some(SUCCESS), "the failed call ended no use");
        assert_eq!(work.release_use(context, || unreachable!("it would destroy the context")), None);
        assert!(!work.use_context(driver.new_context(0)));
    }

    #[test]
    fn releasing_a_use_delays_the_destruction() {
        let driver = Driver::new();
        let (work, context) = fake::new(&driver);
        work.use_context(context);
        let handle = context as usize;
        thread::scope(|scope| {
            let mut destroying = None;
            work.release_use(context, || {
                let thread = destroying.insert(scope.spawn(move || work.begin_destroying(handle as CUcontext)));
                until(|| work.is_dying(context));
                assert!(!thread.is_finished());
                SUCCESS
            });
            assert!(destroying.expect("a thread").join().expect("no panic"));
        });
    }

    #[test]
    fn each_context_is_warmed_up_once() {
        let driver = Driver::new();
        let (work, _) = fake::new(&driver);
        work.add_context(driver.new_context(0));
        (0..4).for_each(|_| work.warm_up_contexts());
        assert_eq!(driver.count("cuEventQuery"), 2);
    }

    #[test]
    fn contexts_are_all_broken_only_if_each_is() {
        let driver = Driver::new();
        let work = Work::new();
        assert!(!work.are_all_broken(), "there are no contexts");
        (0..2).for_each(|_| work.add_context(driver.new_context(0)));
        driver.fail("cuStreamIsCapturing", 1, 700);
        assert!(!work.are_all_broken());
        driver.fail("cuStreamIsCapturing", 2, 700);
        assert!(work.are_all_broken());
    }
}
