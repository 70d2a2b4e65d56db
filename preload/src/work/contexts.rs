//! The program's contexts on one GPU.

use super::point::Context;
use super::{Inner, Work};
use crate::{
    driver::{context::with_current, types::*},
    gate::epoch,
};
use alloc::vec::Vec;

impl Work {
    /// A context was created or retained.
    pub fn add_context(&self, context: CUcontext) {
        let mut inner = self.inner.lock();
        if !inner.has(context as usize) {
            inner.contexts.push(Context::new(context as usize, false));
        }
    }

    /// Makes a call that may destroy a context, while nothing of ours uses it. The call returns its result and whether the
    /// context is gone. Returns the result and, if a known context is gone, whether it was the last on this GPU.
    pub fn destroying_context(
        &self,
        context: CUcontext,
        call: impl FnOnce() -> (CUresult, bool),
    ) -> (CUresult, Option<bool>) {
        let _not_synchronizing = self.synchronizing.lock();
        let mut inner = self.inner.lock();
        let known = inner.has(context as usize);
        // A stream made from now on may have the handle of one that goes with the context.
        epoch::end();
        let (result, gone) = call();
        if !gone || !known {
            return (result, None);
        }
        inner.forget_context(context as usize);
        (result, Some(inner.contexts.iter().all(|c| c.foreign)))
    }

    /// `cuCtxAttach`: one more use of the context.
    pub fn attach(&self, context: CUcontext) {
        if let Some(context) = self.inner.lock().context(context as usize) {
            context.attached += 1;
        }
    }

    /// `cuCtxDetach`: one use less; `false` if that was the last.
    pub fn detach(&self, context: CUcontext) -> bool {
        let mut inner = self.inner.lock();
        let Some(context) = inner.context(context as usize).filter(|c| c.attached > 0) else { return false };
        context.attached -= 1;
        true
    }

    /// Uses each new context once on the client's thread, before other threads depend on that: on first use the driver sets up
    /// thread-local storage, which may need the loader's lock, which a thread that waits at the gate may hold.
    pub fn warm_up_contexts(&self) {
        let mut inner = self.inner.lock();
        if let Some(context) = inner.contexts.iter_mut().find(|c| !c.foreign && !c.warm) {
            context.warm = true;
            let _ = with_current(context.handle, || context.warm_up());
        }
    }

    /// A green context is gone.
    pub fn forget_foreign(&self, context: CUcontext) {
        self.inner.lock().forget_context(context as usize);
    }

    pub fn has_contexts(&self) -> bool {
        !self.inner.lock().contexts.is_empty()
    }

    pub fn has_context(&self, context: CUcontext) -> bool {
        self.inner.lock().has(context as usize)
    }

    /// The program's contexts on this GPU that memory can be copied with.
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

    pub(super) fn forget_context(&mut self, context: usize) {
        self.contexts.iter().filter(|c| c.handle == context).for_each(Context::end);
        self.contexts.retain(|c| c.handle != context);
        self.streams.retain(|stream, _| stream.context != context);
        self.closed_streams.retain(|point| point.context != context);
        self.marks.retain(|mark| mark.point.context != context);
        self.outstanding = self.marks.iter().map(|mark| mark.weight).sum();
        epoch::end();
    }
}
