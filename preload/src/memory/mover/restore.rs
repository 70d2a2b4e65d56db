//! Restoring: maps chunks on the GPU again at the same addresses, up to the allowance.

use super::{
    Mover, POLL_INTERVAL, RETRY_INTERVAL, Stop,
    transfer::{Direction, Mapped},
};
use crate::{
    driver::{self, context::is_dead, query, types::*},
    env::trace::trace,
    memory::space::{
        Space,
        chunks::{Chunk, Kept, Residency},
    },
    sys::{sync::Mutex, time::Instant},
};
use core::time::Duration;

/// The longest wait for memory that other clients have freed.
const TIMEOUT: Duration = Duration::from_millis(300);

impl Mover {
    /// Starts restoring chunks, up to the limit on copies in flight and the room in the allowance.
    /// Returns the time until the next call, or `None` if no further chunk can be restored.
    pub(super) fn restore_some(&mut self, space: &Mutex<Space>) -> Result<Option<Duration>, Stop> {
        while self.has_room() {
            if core::mem::take(&mut self.refused) {
                return Err(Stop::GpuFull);
            }
            let mut guard = space.lock();
            let Some((base, chunk)) = self.take_lacking(&mut guard) else { return Ok(None) };
            let Chunk { offset, len, flags, mut residency } = chunk;
            let (gpu, engine) = (guard.gpu(), guard.engine_of(flags));
            drop(guard);
            let at = base + offset;
            let handle = match engine.map(gpu, at, len, flags) {
                Ok(handle) => handle,
                Err(error) => {
                    space.lock().stays_away(base, offset, len, residency);
                    if is_dead(error) {
                        return Err(Stop::Broken);
                    }
                    // Other clients report memory only after they have freed it, but the driver may still need a
                    // moment.
                    if self.full_since.get_or_insert_with(Instant::now).elapsed() < TIMEOUT {
                        return Ok(Some(RETRY_INTERVAL));
                    }
                    self.full_since = None;
                    trace!("GPU {gpu}: no room for {len} bytes, while {} are free", query::free_memory().unwrap_or(0));
                    return Err(Stop::GpuFull);
                }
            };
            self.full_since = None;
            let mapped = Mapped { base, offset, len, handle, engine };
            if matches!(residency, Residency::Unbacked) && engine.copies() {
                // The chunk has no contents. The step ends, so that the client's thread reads its messages.
                self.complete_restore(space, mapped, residency);
                return Ok(Some(Duration::ZERO));
            }
            let (stream, context) = (self.stream(), self.context().map_or(0, |context| context as usize));
            if let Residency::Host(Some(copy)) = &mut residency {
                // The buffer is unregistered if the program has been idle for long or if the
                // contents come from a file. A copy from pageable memory would block this thread
                // too, and take at least three times as long as registering and copying [H100,
                // H200].
                copy.buffer.register(context);
            }
            // SAFETY: the chunk has just been mapped, and the buffer is as long as the chunk. Both stay valid
            // until the transfer is complete.
            let copied = unsafe {
                match &residency {
                    Residency::Host(Some(copy)) => {
                        driver::cuMemcpyHtoDAsync_v2(at, copy.buffer.address(), len as usize, stream)
                    }
                    Residency::Constant(value) => {
                        self.stats.uncopied += len;
                        driver::cuMemsetD32Async(at, *value, len as usize / 4, stream)
                    }
                    _ => {
                        engine.prefetch(gpu, at, flags.part_inside(offset, len), true, stream);
                        SUCCESS
                    }
                }
            };
            if copied != SUCCESS {
                engine.unmap(at, len, handle);
                space.lock().stays_away(base, offset, len, residency);
                return Err(if is_dead(copied) { Stop::Broken } else { Stop::GpuFull });
            }
            self.track(mapped, Direction::In(residency));
        }
        Ok(Some(POLL_INTERVAL))
    }

    /// Completes the restore of a chunk whose contents are on the GPU. `residency` is the chunk's previous
    /// residency.
    pub(super) fn complete_restore(&mut self, space: &Mutex<Space>, chunk: Mapped, residency: Residency) {
        let Mapped { base, offset, len, handle, .. } = chunk;
        let mut guard = space.lock();
        match residency {
            Residency::Host(_) => guard.account.counts.swapped_in += len,
            Residency::Constant(_) => guard.account.counts.unmoved += len,
            _ => {} // the chunk had no contents
        }
        if guard.aliases(base).is_some_and(|aliases| aliases.show(offset, len, handle).is_err()) {
            // The GPU may lack room for page tables. The chunk is restored later.
            self.refused = true;
            drop(guard);
            return self.complete_eviction(space, chunk, residency);
        }
        let copy = if let Residency::Host(copy) = residency { copy.map(Kept::Host) } else { None };
        self.stats.back += len;
        guard.put(base, offset, Residency::Gpu { handle, copy });
    }

    /// Takes the next chunk that can be restored and fits in the allowance.
    fn take_lacking(&mut self, space: &mut Space) -> Option<(u64, Chunk)> {
        if self.lacking.is_empty() {
            self.lacking = space.chunks_to_restore().into();
        }
        loop {
            let room = space.account.room();
            let at = self.lacking.iter().position(|(_, _, len)| *len <= room)?;
            let (base, offset, _) = self.lacking.remove(at)?;
            // The chunk may have been freed since the list was made.
            if let Some(chunk) = space.take_lacking(base, offset) {
                return Some((base, chunk));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{
        engine::GRANULE,
        fake::{EVICT_ALL, Memory},
        mover::{Goal, Step},
    };

    /// Evicted memory. The first word of each chunk is its number.
    fn evicted(count: u32) -> (Memory, alloc::vec::Vec<u64>) {
        let memory = Memory::new();
        let addresses = (0..count).map(|word| {
            let at = memory.allocate();
            memory.driver.write(at, word);
            at
        });
        let addresses = addresses.collect();
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        memory.driver.forget_calls();
        (memory, addresses)
    }

    #[test]
    fn a_restore_stays_within_the_allowance() {
        let (memory, _) = evicted(3);
        memory.space.lock().allow(1, 2 * GRANULE);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!((memory.account().mapped, memory.driver.used()), (2 * GRANULE, 2 * GRANULE));
        memory.space.lock().allow(2, 3 * GRANULE);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert!(memory.account().can_run());
    }

    #[test]
    fn a_restored_chunk_is_accessible_before_its_contents_are_copied() {
        let (memory, _) = evicted(1);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        let order = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemcpyHtoDAsync_v2", "cuEventRecord"];
        assert_eq!(memory.driver.calls(&order), order);
    }

    #[test]
    fn a_restore_waits_for_memory_that_other_clients_are_freeing() {
        let (memory, addresses) = evicted(1);
        memory.driver.set_room(0);
        assert_eq!(memory.step(Goal::Restore), Step::Busy(RETRY_INTERVAL));
        memory.driver.set_room(GRANULE);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!(memory.driver.word(addresses[0]), Some(0));
    }

    #[test]
    fn a_restore_gives_up_when_the_gpu_stays_full() {
        let (memory, _) = evicted(1);
        memory.driver.set_room(0);
        memory.mover.lock().full_since = Some(Instant::ago(TIMEOUT));
        assert_eq!(memory.step(Goal::Restore), Step::Stopped(Stop::GpuFull));
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.in_flight), (0, GRANULE, 0));
        assert_eq!(memory.step(Goal::Restore), Step::Busy(RETRY_INTERVAL), "a later restore waits again");
    }

    #[test]
    fn a_chunk_keeps_its_copy_until_it_has_been_restored() {
        let (memory, addresses) = evicted(2);
        memory.driver.fail_later("cuMemcpyHtoDAsync_v2", 1, 1, ERROR_INVALID_VALUE);
        assert_eq!(memory.step(Goal::Restore), Step::Busy(crate::memory::mover::POLL_INTERVAL));
        assert_eq!(memory.driver.used(), GRANULE, "the memory of the failed chunk is freed");
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!([0, 1].map(|at| memory.driver.word(addresses[at])), [Some(0), Some(1)]);
    }

    #[test]
    fn memory_without_contents_is_mapped_without_a_transfer() {
        let memory = Memory::new();
        memory.space.lock().allow(1, 0);
        let chunks = [(); 2].map(|()| memory.allocate());
        memory.driver.forget_calls();
        memory.space.lock().allow(2, 2 * GRANULE);
        for mapped in [GRANULE, 2 * GRANULE] {
            assert_eq!(memory.step(Goal::Restore), Step::Busy(Duration::ZERO));
            assert_eq!(memory.account().mapped, mapped);
        }
        assert_eq!(memory.step(Goal::Restore), Step::Done { moved: true });
        assert!(memory.account().can_run() && chunks.iter().all(|at| memory.driver.is_mapped(*at)));
        assert_eq!(memory.driver.count("cuEventRecord"), 0);
    }
}
