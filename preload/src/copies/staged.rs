//! Copies that cannot be made as the program wrote them, because a GPU has no access to memory of this library on
//! another. For plain memory the driver stages such copies itself.

use super::shapes::Copy3D;
use crate::{
    driver::{self, check, context::with_current, hook::Flavour, types::*},
    work::{capture, context_of},
};
use core::ptr::null_mut;

/// Makes a copy like `cuMemcpy` from one GPU to another, with the contexts of destination and source.
pub fn linear(flavour: Flavour, [to, from]: [CUdeviceptr; 2], n: Size, [there, here]: [CUcontext; 2]) -> CUresult {
    // SAFETY: the program's own arguments, and contexts of its own.
    unsafe {
        if flavour.per_thread {
            driver::cuMemcpyPeer_ptds(to, there, from, here, n)
        } else {
            driver::cuMemcpyPeer(to, there, from, here, n)
        }
    }
}

/// Makes such a copy in stream order.
pub fn linear_async(
    [to, from]: [CUdeviceptr; 2],
    n: Size,
    [there, here]: [CUcontext; 2],
    stream: CUstream,
) -> CUresult {
    // SAFETY: the program's own arguments, and contexts of its own.
    unsafe { driver::cuMemcpyPeerAsync(to, there, from, here, n, stream) }
}

/// Makes a copy like `cuMemcpy2D` or `cuMemcpy3D`.
pub fn shaped(flavour: Flavour, copy: &Copy3D, contexts: [CUcontext; 2]) -> CUresult {
    let copy = copy.between(contexts);
    let copy = (&raw const copy).cast();
    // SAFETY: the program's own description, with contexts of its own.
    unsafe { if flavour.per_thread { driver::cuMemcpy3DPeer_ptds(copy) } else { driver::cuMemcpy3DPeer(copy) } }
}

/// Makes such a copy in stream order.
pub fn shaped_async(copy: &Copy3D, contexts: [CUcontext; 2], stream: CUstream) -> CUresult {
    let copy = copy.between(contexts);
    // SAFETY: the program's own description, with contexts of its own.
    unsafe { driver::cuMemcpy3DPeerAsync((&raw const copy).cast(), stream) }
}

/// Makes a call that copies between the host and memory of this context's GPU. It runs with that context current, after
/// the earlier work of the program's default stream and before its later work.
pub fn as_owner(context: CUcontext, flavour: Flavour, call: impl FnOnce() -> CUresult) -> CUresult {
    let stream = flavour.stream(CTX_DEFAULT_STREAM);
    // SAFETY: a default stream is always valid.
    let synchronise = || check(unsafe { driver::cuStreamSynchronize(stream) });
    let copy = || {
        synchronise()?;
        with_current(context as usize, || check(call()).and_then(|()| synchronise()))?
    };
    capture::relaxed(copy).err().unwrap_or(SUCCESS)
}

/// Makes such a call in the order of a stream of another context: `call` gets a stream of this context, whose work
/// comes after the earlier work of the program's stream and before its later work.
pub fn as_owner_async(context: CUcontext, stream: CUstream, call: impl FnOnce(CUstream) -> CUresult) -> CUresult {
    if capture::any() && capture::is_capturing(stream) {
        return call(stream); // a stream that joins the capture would have to stay until the capture ends
    }
    let Some(own) = context_of(stream) else { return call(stream) };
    let copy = || {
        let before = Event::behind(stream, own)?;
        let after = with_current(context as usize, || {
            let other = Stream::new()?;
            before.precedes(other.0)?;
            check(call(other.0))?;
            Event::behind(other.0, context)
        })??;
        with_current(own as usize, || after.precedes(stream))?
    };
    capture::relaxed(copy).err().unwrap_or(SUCCESS)
}

/// An event behind the work of a stream. Dropping it is safe: the driver keeps it while work needs it.
struct Event(CUevent);

impl Event {
    /// Records an event behind the work given to this stream of that context.
    fn behind(stream: CUstream, context: CUcontext) -> Result<Self, CUresult> {
        with_current(context as usize, || {
            let mut event = null_mut();
            // SAFETY: `event` outlives the call, and belongs to the stream's context.
            unsafe {
                check(driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING))?;
                let event = Self(event);
                check(driver::cuEventRecord(event.0, stream))?;
                Ok(event)
            }
        })?
    }

    /// Makes this stream, of any context, wait for it.
    fn precedes(&self, stream: CUstream) -> Result<(), CUresult> {
        // SAFETY: the event was recorded.
        check(unsafe { driver::cuStreamWaitEvent(stream, self.0, 0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is ours, and destroyed once.
        unsafe { driver::cuEventDestroy_v2(self.0) };
    }
}

/// A stream for one copy, which continues after the stream is dropped.
struct Stream(CUstream);

impl Stream {
    /// Creates a stream in the current context.
    fn new() -> Result<Self, CUresult> {
        let mut stream = null_mut();
        // SAFETY: `stream` outlives the call.
        check(unsafe { driver::cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) })?;
        Ok(Self(stream))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is ours, and destroyed once.
        unsafe { driver::cuStreamDestroy_v2(self.0) };
    }
}
