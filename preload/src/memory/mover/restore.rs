//! Restoring: maps chunks on the GPU again at the same addresses, up to the allowance.

use super::{
    Mover, POLL_INTERVAL, RETRY_INTERVAL, Stop,
    transfer::{Direction, Transfer},
};
use crate::{
    driver::{self, context::is_dead, query, types::*},
    env::trace::trace,
    memory::{
        chunk::{Chunk, Residency},
        space::Space,
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
            let (direction, event) = (Direction::In(residency), core::ptr::null_mut());
            self.track(Transfer { base, offset, len, handle, engine, direction, event });
        }
        Ok(Some(POLL_INTERVAL))
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
}
