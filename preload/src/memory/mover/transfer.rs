//! Transfers: chunks whose copy is in flight, and what happens when it is done.

use super::Mover;
use crate::{
    driver::{self, check, types::*},
    memory::{
        account::Account,
        chunk::{HostCopy, Residency},
        engine::Engine,
        fingerprint::Fingerprinter,
        space::Space,
    },
    sys::sync::Mutex,
    work::capture,
};
use alloc::vec::Vec;

/// The most bytes and copies in flight: more than the link carries until the next look, however small the chunks are.
const MAX_IN_FLIGHT: u64 = 512 << 20;

const MAX_COPIES: usize = 256;

/// The mover's objects in the context where it works.
#[derive(Debug)]
pub(super) struct CopyContext {
    pub(super) context: usize,
    pub(super) stream: CUstream,
    /// Events that are not in use.
    pub(super) events: Vec<CUevent>,
    /// The inner `None` means that fingerprints cannot be computed here.
    pub(super) fingerprinter: Option<Option<Fingerprinter>>,
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
        self.copy_context.as_ref().map_or(core::ptr::null_mut(), |copy_context| copy_context.stream)
    }

    /// Records an event behind a transfer that was started.
    pub(super) fn track(&mut self, mut transfer: Transfer) {
        if let Some(copy_context) = &mut self.copy_context {
            let mut event = copy_context.events.pop().unwrap_or(core::ptr::null_mut());
            // SAFETY: a valid place; an event and a stream of this context. Without an event, landing waits for the stream.
            unsafe {
                if (!event.is_null() || driver::cuEventCreate(&mut event, EVENT_DISABLE_TIMING) == SUCCESS)
                    && check(driver::cuEventRecord(event, copy_context.stream)).is_ok()
                {
                    transfer.event = event;
                }
            }
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
            if there == ERROR_NOT_READY {
                return;
            }
            if let Some(transfer) = self.transfers.pop_front() {
                self.complete_one(transfer, space, report);
            }
        }
    }

    pub(super) fn complete_all(&mut self, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        // This may be a thread of the program, beside a capture of another thread.
        // SAFETY: the mover's own stream.
        capture::relaxed(|| unsafe { driver::cuStreamSynchronize(self.stream()) });
        while let Some(transfer) = self.transfers.pop_front() {
            self.complete_one(transfer, space, report);
        }
    }

    fn complete_one(&mut self, transfer: Transfer, space: &Mutex<Space>, report: &dyn Fn(&Account)) {
        let Transfer { base, offset, len, handle, engine, direction, event } = transfer;
        if let (false, Some(copy_context)) = (event.is_null(), &mut self.copy_context) {
            copy_context.events.push(event);
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
                    let copy = if let Residency::Host(copy) = residency { copy } else { None };
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
        guard.left(len, matches!(residency, Residency::Host(_)));
        guard.put(base, offset, residency);
        report(&guard.account);
    }
}
