//! Brings a client's memory to where the scheduler wants it: off the GPU chunk by chunk, and back to the same addresses.
//!
//! Copies of several chunks are in flight at once, and the account is reported after each, so that freed bytes serve
//! others while the rest still leaves. The space is locked only between copies, never during one.

use super::{
    host::{self, Buffer},
    space::{Chunk, Place, Space},
};
use crate::{
    cuda::*,
    driver,
    sys::{
        sync::Mutex,
        time::{self, Instant},
    },
    work::with_current,
};
use alloc::{collections::VecDeque, vec::Vec};
use core::time::Duration;

/// Copies in flight: enough that the link never waits for an unmap.
const IN_FLIGHT: usize = 4;
/// How long memory that others are letting go of may take to appear.
const PATIENCE: Duration = Duration::from_millis(300);

/// Why a move ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The host has no room, so what is left stays on the GPU.
    HostFull,
    /// The GPU has no room although the allowance says so.
    GpuFull,
    /// The context does not work any more.
    Broken,
}

/// Moves chunks off the GPU until no more than `target` bytes are mapped. Nothing of this client may be running, and
/// nothing may start: its gate is closed.
pub fn evict(space: &Mutex<Space>, context: CUcontext, target: u64, report: &dyn Fn()) -> Result<(), Stop> {
    let mut buffers = take_buffers(space, target);
    let result = Mover::run(space, context, report, |mover| {
        while mover.leave_one(target, &mut buffers)? {}
        Ok(())
    });
    space.lock().spare.append(&mut buffers);
    result
}

/// Moves chunks onto the GPU as far as the allowance goes.
pub fn restore(space: &Mutex<Space>, context: CUcontext, report: &dyn Fn()) -> Result<(), Stop> {
    Mover::run(space, context, report, |mover| {
        while mover.return_one()? {}
        Ok(())
    })
}

/// Buffers for what has to leave: spare ones, and new ones made by several threads at once.
fn take_buffers(space: &Mutex<Space>, target: u64) -> Vec<Buffer> {
    let mut guard = space.lock();
    if !guard.engine().copies() {
        return Vec::new();
    }
    let excess = guard.account.mapped.saturating_sub(target);
    let mut missing = guard.mapped_lengths(excess);
    let mut buffers = Vec::new();
    missing.retain(|len| match guard.spare.iter().position(|b| b.len() == *len) {
        Some(at) => {
            buffers.push(guard.spare.swap_remove(at));
            false
        }
        None => true,
    });
    drop(guard);
    buffers.extend(host::make(missing));
    buffers
}

/// Moves the chunks of one GPU in one direction.
struct Mover<'a> {
    space: &'a Mutex<Space>,
    report: &'a dyn Fn(),
    stream: CUstream,
    events: Vec<CUevent>,
    flying: VecDeque<Flying>,
}

/// A chunk whose copy is under way.
struct Flying {
    base: u64,
    offset: u64,
    len: u64,
    handle: Handle,
    buffer: Option<Buffer>,
    out: bool,
    event: CUevent,
}

impl<'a> Mover<'a> {
    /// Runs `f` with a mover; whatever `f` does, every copy has landed when this returns.
    fn run(
        space: &'a Mutex<Space>,
        context: CUcontext,
        report: &'a dyn Fn(),
        f: impl FnOnce(&mut Self) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        with_current(context as usize, || {
            let mut stream = core::ptr::null_mut();
            // SAFETY: a valid place.
            if unsafe { driver::cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) } != SUCCESS {
                return Err(Stop::Broken);
            }
            let mut mover = Self { space, report, stream, events: Vec::new(), flying: VecDeque::new() };
            let result = f(&mut mover);
            while let Some(flying) = mover.flying.pop_front() {
                mover.land(flying);
            }
            for event in mover.events {
                // SAFETY: created here, and no longer in use.
                unsafe { driver::cuEventDestroy_v2(event) };
            }
            // SAFETY: as above.
            unsafe { driver::cuStreamDestroy_v2(stream) };
            result
        })
        .unwrap_or(Err(Stop::Broken))
    }

    /// Starts one more chunk on its way out; `false` when enough are.
    fn leave_one(&mut self, target: u64, buffers: &mut Vec<Buffer>) -> Result<bool, Stop> {
        let mut guard = self.space.lock();
        let leaving: u64 = self.flying.iter().map(|f| f.len).sum();
        if guard.account.mapped.saturating_sub(leaving) <= target {
            return Ok(false);
        }
        let Some((base, Chunk { offset, len, place: Place::Gpu(handle) })) = guard.take_mapped() else {
            return Ok(false);
        };
        let (gpu, engine) = (guard.gpu(), guard.engine());
        drop(guard);
        let stays = |stop| {
            self.space.lock().put(base, offset, Place::Gpu(handle));
            Err(stop)
        };
        let at = base + offset;
        let mut buffer = None;
        if engine.copies() {
            let fitting = buffers.iter().position(|b| b.len() == len).map(|i| buffers.swap_remove(i));
            let Some(mut to) = fitting.or_else(|| Buffer::new(len)) else { return stays(Stop::HostFull) };
            to.register();
            // SAFETY: the chunk is mapped and idle, the buffer is as long, and both stay until the copy has landed.
            let copied = unsafe { driver::cuMemcpyDtoHAsync_v2(to.address(), at, len as usize, self.stream) };
            if copied != SUCCESS {
                return stays(Stop::Broken);
            }
            buffer = Some(to);
        } else {
            engine.prefetch(gpu, at, len, false, self.stream);
        }
        self.fly(Flying { base, offset, len, handle, buffer, out: true, event: core::ptr::null_mut() });
        Ok(true)
    }

    /// Starts one more chunk on its way back; `false` when none is lacking or nothing more is allowed.
    fn return_one(&mut self) -> Result<bool, Stop> {
        let mut guard = self.space.lock();
        let Some((base, Chunk { offset, len, place })) = guard.take_lacking() else { return Ok(false) };
        let (gpu, engine) = (guard.gpu(), guard.engine());
        drop(guard);
        let had_contents = matches!(place, Place::Host(_));
        let stays = |place, stop| {
            let mut guard = self.space.lock();
            guard.left(len, had_contents);
            guard.put(base, offset, place);
            Err(stop)
        };
        let at = base + offset;
        let handle = match map_patiently(|| engine.map(gpu, at, len)) {
            Ok(handle) => handle,
            Err(ERROR_OUT_OF_MEMORY) => return stays(place, Stop::GpuFull),
            Err(_) => return stays(place, Stop::Broken),
        };
        let buffer = if let Place::Host(buffer) = place { buffer } else { None };
        if let Some(from) = &buffer {
            // SAFETY: the chunk has just been mapped, the buffer is as long, and both stay until the copy has landed.
            let copied = unsafe { driver::cuMemcpyHtoDAsync_v2(at, from.address(), len as usize, self.stream) };
            if copied != SUCCESS {
                engine.unmap(at, len, handle);
                return stays(Place::Host(buffer), Stop::Broken);
            }
        } else {
            engine.prefetch(gpu, at, len, true, self.stream);
        }
        self.fly(Flying { base, offset, len, handle, buffer, out: false, event: core::ptr::null_mut() });
        Ok(true)
    }

    /// Marks the copy's end, and lands the oldest when enough are in flight.
    fn fly(&mut self, mut flying: Flying) {
        let mut event = self.events.pop().unwrap_or(core::ptr::null_mut());
        // SAFETY: a valid place; an event and a stream of this context. Without an event, landing waits for the stream.
        unsafe {
            if !event.is_null() || driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) == SUCCESS {
                driver::cuEventRecord(event, self.stream);
                flying.event = event;
            }
        }
        self.flying.push_back(flying);
        if self.flying.len() >= IN_FLIGHT
            && let Some(oldest) = self.flying.pop_front()
        {
            self.land(oldest);
        }
    }

    /// Waits for a copy and does what follows it. A context that fails meanwhile has lost its contents: nothing is left
    /// to be saved, and the program is told by its own next call.
    fn land(&mut self, flying: Flying) {
        let Flying { base, offset, len, handle, buffer, out, event } = flying;
        if event.is_null() {
            // SAFETY: the mover's own stream.
            unsafe { driver::cuStreamSynchronize(self.stream) };
        } else {
            // SAFETY: the mover's own event.
            while unsafe { driver::cuEventQuery(event) } == ERROR_NOT_READY {
                time::sleep(Duration::from_micros(30));
            }
            self.events.push(event);
        }
        let engine = { self.space.lock().engine() };
        if out {
            engine.unmap(base + offset, len, handle);
        }
        let mut guard = self.space.lock();
        if out {
            guard.left(len, true);
            guard.put(base, offset, Place::Host(buffer));
        } else {
            guard.spare.extend(buffer);
            guard.put(base, offset, Place::Gpu(handle));
        }
        drop(guard);
        (self.report)();
    }
}

/// Others free their memory before they say so, but the driver may need a moment.
fn map_patiently(map: impl Fn() -> Result<Handle, CUresult>) -> Result<Handle, CUresult> {
    let begin = Instant::now();
    loop {
        match map() {
            Err(ERROR_OUT_OF_MEMORY) if begin.elapsed() < PATIENCE => time::sleep(Duration::from_millis(2)),
            result => return result,
        }
    }
}
