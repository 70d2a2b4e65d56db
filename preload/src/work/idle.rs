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
        let mut points = Vec::new();
        for context in self.inner.lock().contexts.iter_mut().filter(|context| !context.foreign) {
            match with_current(context.handle, || context.record_all()).flatten() {
                Ok(point) => points.push(point),
                Err(error) if is_dead_in(context.handle, error) => {} // nothing runs there any more
                Err(error) => return Err(error),
            }
        }
        Ok(points)
    }

    /// The same where the driver has no events of contexts (before 12.5): threads wait for the contexts.
    fn synchronize_contexts(&'static self) -> Option<Vec<Arc<Point>>> {
        let wait_for = |context: CUcontext| {
            let point = Arc::new(Point::without_event(context as usize));
            let its = point.clone();
            threads::spawn(c"nvshare-idle", move || self.synchronize(&its)).then_some(point)
        };
        self.contexts().into_iter().map(wait_for).collect()
    }

    /// Waits until all work of the point's context is done. If that cannot be found out, the point is never done.
    fn synchronize(&self, point: &Point) {
        // The context is not destroyed meanwhile.
        let _synchronizing = self.synchronizing.lock();
        if !self.has_context(point.context as CUcontext) {
            return;
        }
        let result = with_current(point.context, || {
            capture::beside(|capturing| match capturing {
                true => ERROR_NOT_READY,
                // SAFETY: no arguments.
                false => unsafe { driver::cuCtxSynchronize() },
            })
        });
        if result.is_ok_and(|result| result == SUCCESS || is_dead_in(point.context, result)) {
            point.set_done();
        }
    }
}
