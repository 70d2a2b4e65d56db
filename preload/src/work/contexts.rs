//! The program's contexts on one GPU.

use super::point::Context;
use super::{Inner, Work, marks::Unmarked};
use crate::{
    driver::{context::with_current, types::*},
    gate::epoch,
};
use alloc::vec::Vec;
use core::sync::atomic::{AtomicUsize, Ordering};

/// The only context that the program has had so far; 0 before the first, [`SEVERAL`] from the second on.
static ONLY: AtomicUsize = AtomicUsize::new(0);

const SEVERAL: usize = usize::MAX;

/// Whether the program has never had another context than this one.
pub(super) fn is_only(context: CUcontext) -> bool {
    !context.is_null() && ONLY.load(Ordering::Acquire) == context as usize
}

/// The program has this context, on whichever GPU, also one that this library does not support. Called before any thread can launch to
/// it, but the one that makes it.
pub fn is_there(context: CUcontext) {
    let context = context as usize;
    let only = ONLY.compare_exchange(0, context, Ordering::AcqRel, Ordering::Acquire);
    if only.is_err_and(|only| only != context) {
        are_several();
    }
}

/// The program has, or is about to have, contexts other than its first. From now on a handle does not identify the legacy stream.
pub fn are_several() {
    if ONLY.swap(SEVERAL, Ordering::AcqRel) != SEVERAL {
        epoch::end();
    }
}

impl Work {
    /// A context was created, or retained or attached once more.
    pub fn add_context(&self, context: CUcontext) {
        let mut inner = self.inner.lock();
        if !inner.has(context as usize) {
            inner.contexts.push(Context::new(context as usize, false));
        }
        if let Some(context) = inner.context(context as usize) {
            context.uses += 1;
        }
    }

    /// Makes a call that ends one use of a context, if others are left: the context stays then. The count and the driver's change
    /// together, or of two threads, one could end the last use while the other still believes in its own.
    pub fn releasing_context(&self, context: CUcontext, call: impl FnOnce() -> CUresult) -> Option<CUresult> {
        let mut inner = self.inner.lock();
        let context = inner.context(context as usize).filter(|context| context.uses > 1)?;
        let result = call();
        if result == SUCCESS {
            context.uses -= 1;
        }
        Some(result)
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
        if let (SUCCESS, false, Some(context)) = (result, gone, inner.context(context as usize)) {
            context.uses = context.uses.saturating_sub(1); // another thread has retained it in this moment
        }
        if !gone || !known {
            return (result, None);
        }
        inner.forget_context(context as usize);
        (result, Some(inner.contexts.iter().all(|c| c.foreign)))
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

    /// Whether all work that may touch memory of this GPU is in this context.
    pub fn is_all_in(&self, context: CUcontext) -> bool {
        let inner = self.inner.lock();
        self.peers() == 0 && inner.has(context as usize) && inner.contexts.len() == 1
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
        self.unmarked = Unmarked::NONE;
        self.outstanding = self.marks.iter().map(|mark| mark.weight).sum();
        epoch::end();
    }
}
