//! Copies that cannot be made as the program wrote them, because a GPU has no access to memory of this library on another. For
//! plain memory the driver stages such copies by itself.

use super::shapes::Copy3D;
use crate::{
    driver::{self, check, context::with_current, hook::Flavour, types::*},
    work::{capture, context_of},
};
use core::ptr::null_mut;

/// `cuMemcpy` and its kin, from one GPU to another; contexts of destination and source.
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

/// The same in stream order.
pub fn linear_async(
    [to, from]: [CUdeviceptr; 2],
    n: Size,
    [there, here]: [CUcontext; 2],
    stream: CUstream,
) -> CUresult {
    // SAFETY: as above.
    unsafe { driver::cuMemcpyPeerAsync(to, there, from, here, n, stream) }
}

/// `cuMemcpy2D`, `cuMemcpy3D`.
pub fn shaped(flavour: Flavour, copy: &Copy3D, contexts: [CUcontext; 2]) -> CUresult {
    let copy = copy.between(contexts);
    let copy = (&raw const copy).cast();
    // SAFETY: as above.
    unsafe { if flavour.per_thread { driver::cuMemcpy3DPeer_ptds(copy) } else { driver::cuMemcpy3DPeer(copy) } }
}

/// The same in stream order.
pub fn shaped_async(copy: &Copy3D, contexts: [CUcontext; 2], stream: CUstream) -> CUresult {
    let copy = copy.between(contexts);
    // SAFETY: as above.
    unsafe { driver::cuMemcpy3DPeerAsync((&raw const copy).cast(), stream) }
}

/// Makes a call that copies between the host and memory of this context's GPU: with that context current, after what the
/// program's default stream was given, and before what it will be.
pub fn as_owner(context: CUcontext, flavour: Flavour, call: impl FnOnce() -> CUresult) -> CUresult {
    let stream = flavour.stream(CTX_DEFAULT_STREAM);
    // SAFETY: a default stream.
    let synchronise = || check(unsafe { driver::cuStreamSynchronize(stream) });
    let copy = || {
        synchronise()?;
        with_current(context as usize, || check(call()).and_then(|()| synchronise()))?
    };
    capture::relaxed(copy).err().unwrap_or(SUCCESS)
}

/// The same in the order of a stream of another context: `call` gets a stream of this context, which comes after what the
/// program's stream was given and before what it will be.
pub fn as_owner_async(context: CUcontext, stream: CUstream, call: impl FnOnce(CUstream) -> CUresult) -> CUresult {
    if capture::any() && capture::is_capturing(stream) {
        return call(stream); // a stream that joins the capture would have to stay until that ends
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

/// An event behind the work of a stream. The driver keeps what work still needs of it.
struct Event(CUevent);

impl Event {
    /// Behind what this stream of that context was given.
    fn behind(stream: CUstream, context: CUcontext) -> Result<Self, CUresult> {
        with_current(context as usize, || {
            let mut event = null_mut();
            // SAFETY: a valid place; an event of the stream's context.
            unsafe {
                check(driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING))?;
                let event = Self(event);
                check(driver::cuEventRecord(event.0, stream))?;
                Ok(event)
            }
        })?
    }

    /// Has this stream, of any context, wait for it.
    fn precedes(&self, stream: CUstream) -> Result<(), CUresult> {
        // SAFETY: an event that was recorded.
        check(unsafe { driver::cuStreamWaitEvent(stream, self.0, 0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: ours; destroyed once.
        unsafe { driver::cuEventDestroy_v2(self.0) };
    }
}

/// A stream for one copy, which goes on when it is dropped.
struct Stream(CUstream);

impl Stream {
    /// Of the current context.
    fn new() -> Result<Self, CUresult> {
        let mut stream = null_mut();
        // SAFETY: a valid place.
        check(unsafe { driver::cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) })?;
        Ok(Self(stream))
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: ours; destroyed once.
        unsafe { driver::cuStreamDestroy_v2(self.0) };
    }
}
