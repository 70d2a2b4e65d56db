//! Copies that cannot be made by the program's own call, because one GPU has no access to memory of
//! this library on another GPU. For the driver's own memory, the driver stages such copies itself.

use super::shapes::Copy3D;
use crate::{
    driver::{self, check, context::with_current, hook::Flavour, query, types::*},
    submit::{captures, context_of},
};

/// Copies like `cuMemcpy` from one GPU to another. `there` and `here` are the contexts of
/// destination and source.
pub fn linear(flavour: Flavour, [to, from]: [CUdeviceptr; 2], n: Size, [there, here]: [CUcontext; 2]) -> CUresult {
    // SAFETY: the arguments and both contexts are the program's own.
    unsafe {
        if flavour.per_thread {
            driver::cuMemcpyPeer_ptds(to, there, from, here, n)
        } else {
            driver::cuMemcpyPeer(to, there, from, here, n)
        }
    }
}

/// Copies like `cuMemcpyAsync` from one GPU to another.
pub fn linear_async(
    [to, from]: [CUdeviceptr; 2],
    n: Size,
    [there, here]: [CUcontext; 2],
    stream: CUstream,
) -> CUresult {
    // SAFETY: the arguments and both contexts are the program's own.
    unsafe { driver::cuMemcpyPeerAsync(to, there, from, here, n, stream) }
}

/// Copies like `cuMemcpy2D` or `cuMemcpy3D` from one GPU to another.
pub fn copy_3d(flavour: Flavour, copy: &Copy3D, contexts: [CUcontext; 2]) -> CUresult {
    let copy = copy.between(contexts);
    let copy = (&raw const copy).cast();
    // SAFETY: the description and both contexts are the program's own.
    unsafe { if flavour.per_thread { driver::cuMemcpy3DPeer_ptds(copy) } else { driver::cuMemcpy3DPeer(copy) } }
}

/// Copies like `cuMemcpy2DAsync` or `cuMemcpy3DAsync` from one GPU to another.
pub fn copy_3d_async(copy: &Copy3D, contexts: [CUcontext; 2], stream: CUstream) -> CUresult {
    let copy = copy.between(contexts);
    // SAFETY: the description and both contexts are the program's own.
    unsafe { driver::cuMemcpy3DPeerAsync((&raw const copy).cast(), stream) }
}

/// Makes a call that copies between the host and memory of this context's GPU, with this context
/// current. The copy runs after the earlier work of the program's default stream and before its later
/// work.
pub fn as_owner(context: CUcontext, flavour: Flavour, call: impl FnOnce() -> CUresult) -> CUresult {
    let stream = flavour.stream(CTX_DEFAULT_STREAM);
    // SAFETY: a default stream is always valid.
    let synchronise = || check(unsafe { driver::cuStreamSynchronize(stream) });
    let copy = || {
        synchronise()?;
        with_current(context as usize, || check(call()).and_then(|()| synchronise()))?
    };
    captures::in_relaxed_mode(copy).err().unwrap_or(SUCCESS)
}

/// Makes a call like [`as_owner`], but in the order of a stream of another context. `call` receives
/// a stream of `context`. The work in that stream runs after the earlier work of the program's
/// stream and before its later work.
pub fn as_owner_async(context: CUcontext, stream: CUstream, call: impl FnOnce(CUstream) -> CUresult) -> CUresult {
    if captures::any() && captures::is_capturing(stream) {
        return call(stream); // our stream would join the capture and have to outlive it
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
    captures::in_relaxed_mode(copy).err().unwrap_or(SUCCESS)
}

/// An event behind the work of a stream. It may be dropped at any time: the driver keeps the event
/// while work needs it.
struct Event(CUevent);

impl Event {
    /// Records an event behind the work submitted to this stream of `context`.
    fn behind(stream: CUstream, context: CUcontext) -> Result<Self, CUresult> {
        with_current(context as usize, || {
            // SAFETY: the place is valid.
            let event = Self(query::handle(|event| unsafe { driver::cuEventCreate(event, EVENT_DISABLE_TIMING) })?);
            // SAFETY: the event belongs to the stream's context.
            check(unsafe { driver::cuEventRecord(event.0, stream) }).map(|()| event)
        })?
    }

    /// Makes this stream, of any context, wait for the event.
    fn precedes(&self, stream: CUstream) -> Result<(), CUresult> {
        // SAFETY: the event was recorded.
        check(unsafe { driver::cuStreamWaitEvent(stream, self.0, 0) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: this object owns the event, which is destroyed only here.
        unsafe { driver::cuEventDestroy_v2(self.0) };
    }
}

/// A stream for one copy. The copy continues after the stream is dropped.
struct Stream(CUstream);

impl Stream {
    /// Creates a stream in the current context.
    fn new() -> Result<Self, CUresult> {
        // SAFETY: the place is valid.
        query::handle(|stream| unsafe { driver::cuStreamCreate(stream, STREAM_NON_BLOCKING) }).map(Self)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: this object owns the stream, which is destroyed only here.
        unsafe { driver::cuStreamDestroy_v2(self.0) };
    }
}
