//! Transfers: chunks whose copy is in flight, and what happens when it is done.

use super::Mover;
use crate::{
    driver::{self, check, context::is_dead, types::*},
    env::trace::trace,
    memory::{
        account::Account,
        chunk::{Kept, Residency},
        engine::{CHUNK, Engine},
        file::HostCopy,
        fingerprint::{Fingerprint, Fingerprinter},
        space::Space,
        staging::Buffer,
    },
    sys::sync::Mutex,
};
use alloc::vec::Vec;

/// The most bytes and copies in flight: more than the link carries until the next look, however small the chunks are.
const MAX_IN_FLIGHT: u64 = 512 << 20;

const MAX_COPIES: usize = 256;

/// The most copies of large chunks in flight, for which there are events from the beginning.
const FIRST_EVENTS: usize = (MAX_IN_FLIGHT / CHUNK) as usize;

/// The mover's objects in a context in which it can work.
#[derive(Debug)]
pub(super) struct CopyContext {
    pub(super) context: usize,
    stream: CUstream,
    /// Events that are not in use.
    events: Vec<CUevent>,
    /// `None` if it has not been tried, or there was no memory. The inner `None` means that fingerprints cannot be computed here.
    fingerprinter: Option<Option<Fingerprinter>>,
}

impl CopyContext {
    /// Makes what copies need in the current context, which is this.
    pub(super) fn new(context: usize) -> Result<Self, CUresult> {
        let mut stream = core::ptr::null_mut();
        // SAFETY: a valid place.
        check(unsafe { driver::cuStreamCreate(&mut stream, STREAM_NON_BLOCKING) })?;
        // A transfer for which there is none makes one.
        let events = (0..FIRST_EVENTS).map_while(|_| new_event()).collect();
        trace!("memory can be moved in context {context:#x}");
        Ok(Self { context, stream, events, fingerprinter: None })
    }

    /// Loads the kernel for fingerprints, unless there is no memory for it now. The driver may wait for running work.
    pub(super) fn load_kernel(&mut self) {
        self.fingerprinter = match Fingerprinter::new(self.context) {
            Err(ERROR_OUT_OF_MEMORY) => None,
            made => Some(made.ok()),
        };
    }

    /// The fingerprints of chunks (address and size), which nothing writes to meanwhile.
    pub(super) fn fingerprints(&mut self, chunks: &[(u64, u64)]) -> Option<Vec<Fingerprint>> {
        let fingerprinter = self.fingerprinter.as_mut()?;
        let result = fingerprinter.as_mut()?.fingerprints(chunks, self.stream);
        if result == Err(ERROR_TIMEOUT) {
            trace!("the kernel for fingerprints does not end");
            core::mem::forget(fingerprinter.take()); // the kernel may still read and write its buffers
        }
        result.ok()
    }

    /// Whether the kernel for fingerprints has been loaded, or cannot be. Otherwise it is being loaded from here on.
    pub(super) fn has_kernel(&mut self, space: &Mutex<Space>) -> bool {
        if self.fingerprinter.is_none() {
            let guard = space.lock();
            self.fingerprinter = guard.waiter().take_loaded(self.context);
            if self.fingerprinter.is_none() {
                guard.waiter().load(self.context);
            }
        }
        self.fingerprinter.is_some()
    }

    /// Its context is broken. What is left are buffers, to be unregistered.
    pub(super) fn into_buffers(self) -> Option<Buffer> {
        Some(self.fingerprinter??.into_buffer())
    }

    /// Its context is gone, with all that the driver had of it.
    pub(super) fn forget(self) {
        if let Some(fingerprinter) = self.fingerprinter.flatten() {
            fingerprinter.forget_context(self.context);
        }
    }
}

fn new_event() -> Option<CUevent> {
    let mut event = core::ptr::null_mut();
    // SAFETY: a valid place.
    check(unsafe { driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) }).ok().map(|()| event)
}

/// A chunk whose copy is in flight.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) base: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) handle: Handle,
    pub(super) engine: &'static dyn Engine,
    pub(super) direction: Direction,
    pub(super) event: CUevent,
}

/// The direction of a transfer.
#[derive(Debug)]
pub(super) enum Direction {
    /// To host memory.
    Out(Option<HostCopy>),
    /// To the GPU, from where the contents are. They are still there if the transfer fails.
    In(Residency),
}

impl Mover {
    pub(super) fn has_room(&self) -> bool {
        self.transfers.len() < MAX_COPIES && self.transfers.iter().map(|f| f.len).sum::<u64>() < MAX_IN_FLIGHT
    }

    pub(super) fn stream(&self) -> CUstream {
        self.ready.first().map_or(core::ptr::null_mut(), |ready| ready.stream)
    }

    /// Records an event behind a transfer that was started.
    pub(super) fn track(&mut self, mut transfer: Transfer) {
        // Without an event, landing waits for the stream.
        if let Some(ready) = self.ready.first_mut()
            && let Some(event) = ready.events.pop().or_else(new_event)
            // SAFETY: an event and a stream of this context.
            && unsafe { driver::cuEventRecord(event, ready.stream) } == SUCCESS
        {
            transfer.event = event;
        }
        self.transfers.push_back(transfer);
    }

    /// Completes the transfers that are done.
    pub(super) fn complete(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        while let Some(first) = self.transfers.front() {
            // SAFETY: the mover's own event, or stream.
            let there = unsafe {
                match first.event.is_null() {
                    true => driver::cuStreamQuery(self.stream()),
                    false => driver::cuEventQuery(first.event),
                }
            };
            // An event that is gone went with its context. Any other error concerns the call alone.
            if !(matches!(there, SUCCESS | ERROR_INVALID_HANDLE) || is_dead(there)) {
                return;
            }
            if let Some(transfer) = self.transfers.pop_front() {
                self.complete_one(transfer, space, report);
            }
        }
    }

    /// Completes all transfers in a context that is broken, where none runs any more.
    pub(super) fn complete_all(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        while let Some(transfer) = self.transfers.pop_front() {
            self.complete_one(transfer, space, report);
        }
    }

    fn complete_one(&mut self, transfer: Transfer, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        let Transfer { base, offset, len, handle, engine, direction, event } = transfer;
        if let (false, Some(ready)) = (event.is_null(), self.ready.first_mut()) {
            ready.events.push(event);
        }
        let residency = match direction {
            Direction::Out(copy) => {
                space.lock().account.counts.swapped_out += len;
                Residency::Host(copy)
            }
            Direction::In(residency) => {
                let mut guard = space.lock();
                match residency {
                    Residency::Host(_) => guard.account.counts.swapped_in += len,
                    Residency::Constant(_) => guard.account.counts.unmoved += len,
                    _ => {} // the chunk had no contents
                }
                if guard.show(base, offset, len, handle).is_ok() {
                    let copy = if let Residency::Host(copy) = residency { copy.map(Kept::Host) } else { None };
                    self.stats.back += len;
                    guard.put(base, offset, Residency::Gpu { handle, copy });
                    return report(&guard.account);
                }
                // There may be no room for page tables: the chunk comes back later.
                self.refused = true;
                residency
            }
        };
        space.lock().hide(base, offset);
        engine.unmap(base + offset, len, handle);
        let mut guard = space.lock();
        self.stats.out += len;
        guard.left(len, &residency);
        guard.put(base, offset, residency);
        report(&guard.account);
    }
}
