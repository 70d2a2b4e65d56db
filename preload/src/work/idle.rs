//! Asking the driver whether contexts are idle, before memory leaves the GPU.
//!
//! All else here knows only of work that passed a hook. A kernel that was launched past the hooks, by a library that got hold
//! of the driver's own functions, must not lose its memory either. So before memory leaves, the driver itself must say that
//! everything that the contexts have been given is done. Neither way to ask is allowed beside a capture; memory stays then.

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

/// The point behind what a context had been given.
#[derive(Debug, Default)]
pub struct Passing(Option<Arc<Point>>);

impl Work {
    /// A fence behind everything that the contexts of this GPU and its peers have been given, by whatever call. `None` if the
    /// driver cannot be asked at the moment.
    ///
    /// An event of a primary context covers the green contexts of its GPU as well.
    pub fn fence_of_contexts(&'static self) -> Option<Fence> {
        let mut fence = self.idle_fence()?;
        for other in self.peer_works() {
            fence.others.push((other, other.idle_fence()?));
        }
        Some(fence)
    }

    /// A fence for memory that is being freed. The driver is asked as well, where it answers without a wait and no capture is
    /// under way: this is what the program has asked for, so memory does not stay for a capture.
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
                Err(error) if is_dead_in(context.handle, error) => {} // nothing runs there any more
                Err(error) => return Err(error),
            }
        }
        Ok(points)
    }

    /// Whether what a context had been given when that was first asked is done. Where the driver has no events of contexts (before 12.5),
    /// it is not known, and counts as done.
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

    /// The same where the driver has no events of contexts (before 12.5): threads wait for the contexts. `None` while one still waits
    /// for a context: it knows nothing of what was submitted since.
    fn synchronize_contexts(&'static self) -> Option<Vec<Arc<Point>>> {
        let contexts: Vec<usize> = {
            let mut inner = self.inner.lock();
            if !inner.dying.is_empty() || inner.contexts.iter().any(|context| context.is_awaited) {
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

    /// Waits until all work of the point's context is done. If that cannot be found out, the point is never done.
    fn synchronize(&self, point: &Point) {
        // SAFETY: no arguments.
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

    fn is_not_awaited(&self, context: usize) {
        if let Some(context) = self.inner.lock().context(context) {
            context.is_awaited = false;
        }
    }
}
