//! Copies that cannot be made by the program's own call, because one GPU has no access to memory of
//! this library on another GPU. For the driver's own memory, the driver stages such copies itself.

use super::route::Way;
use crate::{
    driver::{self, check, context::with_current, query, types::*},
    submit::{captures, context_of},
};

/// Makes a copy in the order of this stream: by the program's own call `real`, `between` the contexts of
/// destination and source, or `again` in another stream. If `is_awaited`, the copy is done on return.
pub fn copy(
    way: Way,
    stream: CUstream,
    is_awaited: bool,
    real: impl FnOnce() -> CUresult,
    between: impl FnOnce([CUcontext; 2]) -> CUresult,
    again: impl FnOnce(CUstream) -> CUresult,
) -> CUresult {
    let result = match way {
        Way::Direct => return real(),
        Way::Peers(contexts) => between(contexts),
        Way::Owner(context) => as_owner(context, stream, again),
    };
    if result == SUCCESS && is_awaited {
        // SAFETY: a default stream is always valid.
        return captures::in_relaxed_mode(|| unsafe { driver::cuStreamSynchronize(stream) });
    }
    result
}

/// Makes a call that copies between the host and memory of this context's GPU, in the order of a stream of
/// another context. `call` receives a stream of `context`. The work in that stream runs after the earlier
/// work of the program's stream and before its later work.
fn as_owner(context: CUcontext, stream: CUstream, call: impl FnOnce(CUstream) -> CUresult) -> CUresult {
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
