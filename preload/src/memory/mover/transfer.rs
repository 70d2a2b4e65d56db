//! Transfers: chunks whose copy is in flight, and their completion.

use super::Mover;
use crate::{
    driver::{self, context::is_dead, query, types::*},
    env::trace::trace,
    memory::{
        engine::{CHUNK, Engine},
        file::HostCopy,
        fingerprint::{Fingerprint, Fingerprinter},
        space::{Space, chunks::Residency},
        staging::Buffer,
    },
    sys::sync::Mutex,
};
use alloc::vec::Vec;

/// The most bytes and copies in flight. Both suffice to keep the link busy until the next poll, for
/// chunks of any size.
const MAX_IN_FLIGHT: u64 = 512 << 20;

const MAX_COPIES: usize = 256;

/// The most copies of full-size chunks in flight, and the number of events that are created in advance.
const FIRST_EVENTS: usize = (MAX_IN_FLIGHT / CHUNK) as usize;

/// The mover's objects in one context.
#[derive(Debug)]
pub(super) struct CopyContext {
    pub(super) context: usize,
    stream: CUstream,
    /// Events that are not in use.
    events: Vec<CUevent>,
    /// `None` if fingerprints cannot be computed in this context.
    fingerprinter: Option<Fingerprinter>,
}

impl CopyContext {
    /// Creates the objects that copies need in `context`, which is current.
    pub(super) fn new(context: usize) -> Result<Self, CUresult> {
        // SAFETY: the place is valid.
        let stream = query::handle(|stream| unsafe { driver::cuStreamCreate(stream, STREAM_NON_BLOCKING) })?;
        // If all events are in use, a transfer creates another.
        let events = (0..FIRST_EVENTS).map_while(|_| new_event()).collect();
        trace!("memory can be moved in context {context:#x}");
        Ok(Self { context, stream, events, fingerprinter: None })
    }

    /// Loads the fingerprint kernel. The driver may wait for running work.
    pub(super) fn load_kernel(&mut self) {
        self.fingerprinter = Fingerprinter::new(self.context).ok();
    }

    /// Computes the fingerprints of chunks (address and size). No work may write to the chunks during this
    /// call.
    pub(super) fn fingerprints(&mut self, chunks: &[(u64, u64)]) -> Option<Vec<Fingerprint>> {
        let result = self.fingerprinter.as_mut()?.fingerprints(chunks, self.stream);
        if result == Err(ERROR_TIMEOUT) {
            trace!("the fingerprint kernel does not finish");
            core::mem::forget(self.fingerprinter.take()); // the kernel may still read and write its buffers
        }
        result.ok()
    }

    /// Returns the host buffers of a broken context. The caller must unregister the buffers.
    pub(super) fn into_buffers(self) -> Option<Buffer> {
        Some(self.fingerprinter?.into_buffer())
    }

    /// Drops the objects of a context that the driver has destroyed, without driver calls.
    pub(super) fn forget(self) {
        if let Some(fingerprinter) = self.fingerprinter {
            fingerprinter.forget_context(self.context);
        }
    }
}

fn new_event() -> Option<CUevent> {
    // SAFETY: the place is valid.
    query::handle(|event| unsafe { driver::cuEventCreate(event, EVENT_DISABLE_TIMING) }).ok()
}

/// A chunk that is mapped on the GPU. The mover has taken it out of the space.
#[derive(Debug)]
pub(super) struct Mapped {
    pub(super) base: u64,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) handle: Handle,
    pub(super) engine: Engine,
}

/// A chunk whose copy is in flight.
#[derive(Debug)]
pub(super) struct Transfer {
    pub(super) chunk: Mapped,
    direction: Direction,
    event: CUevent,
}

/// The direction of a transfer.
#[derive(Debug)]
pub(super) enum Direction {
    /// To host memory.
    Out(Option<HostCopy>),
    /// To the GPU, from this residency. If the transfer fails, the chunk returns to this residency.
    In(Residency),
}

impl Transfer {
    pub(super) fn is_eviction(&self) -> bool {
        matches!(self.direction, Direction::Out(_))
    }
}

impl Mover {
    pub(super) fn has_room(&self) -> bool {
        self.transfers.len() < MAX_COPIES
            && self.transfers.iter().map(|transfer| transfer.chunk.len).sum::<u64>() < MAX_IN_FLIGHT
    }

    pub(super) fn stream(&self) -> CUstream {
        self.ready.first().map_or(core::ptr::null_mut(), |ready| ready.stream)
    }

    /// Records an event after a copy that was just started.
    pub(super) fn track(&mut self, chunk: Mapped, direction: Direction) {
        let mut transfer = Transfer { chunk, direction, event: core::ptr::null_mut() };
        // If no event can be recorded, the transfer is complete when the whole stream is idle.
        if let Some(ready) = self.ready.first_mut()
            && let Some(event) = ready.events.pop().or_else(new_event)
            // SAFETY: the event and the stream belong to this context.
            && unsafe { driver::cuEventRecord(event, ready.stream) } == SUCCESS
        {
            transfer.event = event;
        }
        self.transfers.push_back(transfer);
    }

    /// Completes the transfers that are done.
    pub(super) fn complete(&mut self, space: &Mutex<Space>) {
        while let Some(first) = self.transfers.front() {
            // SAFETY: the event and the stream belong to the mover.
            let there = unsafe {
                match first.event.is_null() {
                    true => driver::cuStreamQuery(self.stream()),
                    false => driver::cuEventQuery(first.event),
                }
            };
            // `ERROR_INVALID_HANDLE` means that the event ended with its context. Any other error concerns only
            // the query.
            if !(matches!(there, SUCCESS | ERROR_INVALID_HANDLE) || is_dead(there)) {
                return;
            }
            if let Some(transfer) = self.transfers.pop_front() {
                self.complete_one(transfer, space);
            }
        }
    }

    /// Completes all transfers of a broken context, in which no copy is running any more.
    pub(super) fn complete_all(&mut self, space: &Mutex<Space>) {
        while let Some(transfer) = self.transfers.pop_front() {
            self.complete_one(transfer, space);
        }
    }

    fn complete_one(&mut self, transfer: Transfer, space: &Mutex<Space>) {
        if let (false, Some(ready)) = (transfer.event.is_null(), self.ready.first_mut()) {
            ready.events.push(transfer.event);
        }
        match transfer.direction {
            Direction::Out(copy) => {
                space.lock().account.counts.swapped_out += transfer.chunk.len;
                self.complete_eviction(space, transfer.chunk, Residency::Host(copy));
            }
            Direction::In(residency) => self.complete_restore(space, transfer.chunk, residency),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        engine::{Engine, Flags, GRANULE},
        fake::{EVICT_ALL, Memory},
        mover::{Goal, Step, Stop},
    };

    #[test]
    fn a_chunk_is_unmapped_only_after_its_copy_is_done() {
        let memory = Memory::new();
        let at = memory.allocate();
        memory.driver.keep_busy(memory.stream());
        memory.step_until_call(EVICT_ALL, "cuMemcpyDtoHAsync_v2");
        for _ in 0..3 {
            assert!(matches!(memory.step(EVICT_ALL), Step::Busy(_)));
        }
        let account = memory.account();
        assert_eq!((account.mapped, account.in_flight, memory.driver.is_mapped(at)), (GRANULE, GRANULE, true));
        memory.driver.finish(memory.stream());
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        let order = ["cuMemcpyDtoHAsync_v2", "cuMemUnmap", "cuMemRelease"];
        assert_eq!(memory.driver.calls(&order), order);
        assert_eq!(memory.account().in_flight, 0);
    }

    /// Each finished chunk is reported while the others are still in flight.
    #[test]
    fn finished_transfers_complete_before_later_transfers() {
        let memory = Memory::new();
        let addresses = [(); 2].map(|()| memory.allocate());
        memory.driver.keep_busy(memory.stream());
        crate::driver::fake::until(|| {
            assert!(matches!(memory.step(EVICT_ALL), Step::Busy(_)));
            memory.driver.count("cuMemcpyDtoHAsync_v2") == 2
        });
        memory.driver.finish_event(memory.driver.arguments("cuEventRecord")[0][0]);
        assert!(matches!(memory.step(EVICT_ALL), Step::Busy(_)));
        assert_eq!(addresses.map(|at| memory.driver.is_mapped(at)), [false, true]);
        assert_eq!((memory.account().swapped, memory.account().mapped), (GRANULE, GRANULE));
        memory.driver.finish(memory.stream());
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
    }

    #[test]
    fn a_transfer_without_an_event_completes_when_the_stream_is_idle() {
        let memory = Memory::new();
        memory.allocate();
        memory.driver.fail("cuEventRecord", 1, ERROR_INVALID_VALUE);
        memory.driver.keep_busy(memory.stream());
        memory.step_until_call(EVICT_ALL, "cuMemcpyDtoHAsync_v2");
        assert!(matches!(memory.step(EVICT_ALL), Step::Busy(_)));
        assert_eq!((memory.driver.count("cuEventQuery"), memory.driver.count("cuMemUnmap")), (0, 0));
        memory.driver.finish(memory.stream());
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
    }

    #[test]
    fn a_chunk_that_cannot_be_mapped_at_its_aliases_returns_to_host_memory() {
        const ALIAS: u64 = 0x100_0000;
        let memory = Memory::new();
        let created = memory.space.lock().create(GRANULE, Flags::default(), false, memory.work);
        let base = created.expect("room").address;
        memory.space.lock().add_alias(base, ALIAS).expect("the driver maps it");
        memory.driver.write(ALIAS, 9);
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        assert!(!memory.driver.is_mapped(ALIAS) && !memory.driver.is_mapped(base));
        memory.driver.fail_later("cuMemMap", 1, 1, ERROR_OUT_OF_MEMORY);
        assert_eq!(memory.run(Goal::Restore), Step::Stopped(Stop::GpuFull));
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.in_flight), (0, GRANULE, 0));
        assert_eq!(memory.driver.used(), 0);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!((memory.driver.word(ALIAS), memory.driver.word(base)), (Some(9), Some(9)));
    }

    #[test]
    fn bytes_and_copies_in_flight_are_limited() {
        let transfers = |count: u64, len| {
            let mut mover = Mover::new();
            mover.transfers = (0..count)
                .map(|at| Transfer {
                    chunk: Mapped { base: at * len, offset: 0, len, handle: 0, engine: Engine::Swap },
                    direction: Direction::Out(None),
                    event: core::ptr::null_mut(),
                })
                .collect();
            mover.has_room()
        };
        assert!(transfers(MAX_IN_FLIGHT / CHUNK - 1, CHUNK) && !transfers(MAX_IN_FLIGHT / CHUNK, CHUNK));
        assert!(transfers(MAX_COPIES as u64 - 1, 4096) && !transfers(MAX_COPIES as u64, 4096));
    }
}
