//! Eviction: copies chunks to host buffers unless a current copy exists, and unmaps the chunks from the
//! GPU.

use super::{
    Mover, POLL_INTERVAL, RETRY_INTERVAL, Stop,
    transfer::{Direction, Transfer},
};
use crate::{
    driver::{self, context::is_dead, types::*},
    env::trace::trace,
    memory::{
        account::Account,
        chunk::{Chunk, Kept, Leaving, Residency},
        file::HostCopy,
        space::Space,
        staging::Taken,
    },
    sys::{sync::Mutex, time::Instant},
};
use alloc::vec::Vec;
use core::time::Duration;

/// The longest time that an eviction waits for the fingerprint kernel to be loaded.
const LOAD_TIMEOUT: Duration = Duration::from_secs(1);

impl Mover {
    /// Starts evictions until `target` bytes remain or the limit on copies in flight is reached.
    /// Returns the time until the next call, or `None` if no further eviction can start.
    pub(super) fn evict_some(
        &mut self,
        space: &Mutex<Space>,
        target: u64,
        report: &dyn Fn(&Account),
    ) -> Result<Option<Duration>, Stop> {
        if self.is_idle() {
            // No work is running, so all frees are done. Unused pool memory is released instead of copied.
            let mut guard = space.lock();
            if guard.release_pools_at_rest() > 0 {
                report(&guard.account);
            }
        }
        while self.has_room() {
            let guard = space.lock();
            let leaving: u64 =
                self.transfers.iter().filter(|f| matches!(f.direction, Direction::Out(_))).map(|f| f.len).sum();
            let excess = guard.account.mapped.saturating_sub(leaving).saturating_sub(target);
            if excess == 0 {
                drop(guard);
                self.unplan(space);
                return Ok(None);
            }
            if guard.account.is_file_behind {
                return Ok(Some(RETRY_INTERVAL));
            }
            if self.plan.is_empty() {
                drop(guard);
                // Wait for the buffers of the previous plan.
                if !self.stop_staging(space) || !self.has_kernel(space) {
                    return Ok(Some(RETRY_INTERVAL));
                }
                self.plan = space.lock().take_leaving(excess).into();
                if self.plan.is_empty() {
                    return Ok(None);
                }
                self.fingerprint_plan();
                self.allocate_for_plan(space);
                continue;
            }
            drop(guard);
            let Some(leaving) = self.plan.pop_front() else { return Ok(None) };
            match self.evict_one(space, leaving, report)? {
                None => {}
                Some((leaving, after)) => {
                    self.plan.push_front(leaving);
                    return Ok(Some(after));
                }
            }
        }
        Ok(Some(POLL_INTERVAL))
    }

    /// Starts the eviction of one chunk. If the chunk has to wait, returns it with the waiting time.
    fn evict_one(
        &mut self,
        space: &Mutex<Space>,
        leaving: Leaving,
        report: &dyn Fn(&Account),
    ) -> Result<Option<(Leaving, Duration)>, Stop> {
        let Leaving { base, chunk: Chunk { offset, len, flags, residency }, is_copied, fingerprint } = leaving;
        let Residency::Gpu { handle, copy } = residency else { return Ok(None) };
        let at = base + offset;
        let (gpu, engine) = {
            let guard = space.lock();
            (guard.gpu(), guard.engine_of(flags))
        };
        let transfer =
            |direction| Transfer { base, offset, len, handle, engine, direction, event: core::ptr::null_mut() };
        if !engine.copies() {
            engine.prefetch(gpu, at, flags.part_inside(offset, len), false, self.stream());
            self.track(transfer(Direction::Out(None)));
            return Ok(None);
        }
        let take_off = || {
            space.lock().hide(base, offset);
            engine.unmap(at, len, handle);
        };
        if let Some(value) = fingerprint.and_then(|p| p.constant) {
            take_off();
            let mut guard = space.lock();
            guard.keep_buffers(copy.and_then(|copy| copy.without_buffer().0));
            self.evict_without_copy(&mut guard, base, offset, len, Residency::Constant(value), report);
            return Ok(None);
        }
        let buffer = match copy {
            Some(copy) if fingerprint.is_some() && copy.fingerprint() == fingerprint => {
                take_off();
                let there = match copy {
                    Kept::Host(copy) => Residency::Host(Some(copy)),
                    Kept::File(copy) => Residency::File(copy),
                };
                self.evict_without_copy(&mut space.lock(), base, offset, len, there, report);
                return Ok(None);
            }
            Some(copy) => copy.without_buffer().0, // drops the copy in a file
            None => None,
        };
        let mut buffer = match buffer {
            Some(buffer) => buffer,
            None => {
                let spare = space.lock().take_free_buffer(len);
                let taken = match (spare, &self.staging) {
                    (Some(spare), _) => Taken::Buffer(spare),
                    (None, Some(staging)) => staging.take(len),
                    (None, None) => Taken::Nothing,
                };
                let found = match taken {
                    Taken::Buffer(buffer) => Some(buffer),
                    Taken::Later => {
                        let chunk = Chunk { offset, len, flags, residency: Residency::Gpu { handle, copy: None } };
                        return Ok(Some((Leaving { base, chunk, is_copied, fingerprint }, POLL_INTERVAL)));
                    }
                    Taken::Nothing => space.lock().take_copy(len),
                };
                let Some(buffer) = found else {
                    space.lock().put(base, offset, Residency::Gpu { handle, copy: None });
                    return Err(Stop::HostFull);
                };
                buffer
            }
        };
        buffer.register(self.context().map_or(0, |context| context as usize));
        // SAFETY: the chunk is mapped and idle, and the buffer is as long as the chunk. Both stay valid until
        // the transfer is complete.
        let copied = unsafe { driver::cuMemcpyDtoHAsync_v2(buffer.address(), at, len as usize, self.stream()) };
        if copied != SUCCESS {
            let mut guard = space.lock();
            guard.put(base, offset, Residency::Gpu { handle, copy: None });
            guard.keep_buffers([buffer]);
            return Err(if is_dead(copied) { Stop::Broken } else { Stop::HostFull });
        }
        self.track(transfer(Direction::Out(Some(HostCopy { buffer, fingerprint, file: None }))));
        Ok(None)
    }

    /// Accounts for a chunk that was evicted without a copy.
    fn evict_without_copy(
        &mut self,
        guard: &mut Space,
        base: u64,
        offset: u64,
        len: u64,
        residency: Residency,
        report: &dyn Fn(&Account),
    ) {
        self.stats.out += len;
        self.stats.uncopied += len;
        guard.account.counts.unmoved += len;
        guard.on_eviction(len, &residency);
        guard.put(base, offset, residency);
        report(&guard.account);
    }

    /// Cancels the plan: its chunks stay on the GPU.
    pub(super) fn unplan(&mut self, space: &Mutex<Space>) {
        if !self.plan.is_empty() {
            let mut guard = space.lock();
            for Leaving { base, chunk, .. } in self.plan.drain(..) {
                guard.put(base, chunk.offset, chunk.residency);
            }
        }
    }

    /// Whether the eviction need not wait for the fingerprint kernel, because the kernel is loaded
    /// in the mover's context or cannot be loaded, or [`LOAD_TIMEOUT`] has passed.
    fn has_kernel(&mut self, space: &Mutex<Space>) -> bool {
        let has = !space.lock().engine().copies() || self.ready.first_mut().is_none_or(|ready| ready.has_kernel(space));
        has || self.loading_since.get_or_insert_with(Instant::now).elapsed() > LOAD_TIMEOUT
    }

    /// Computes the fingerprints of the planned chunks.
    pub(super) fn fingerprint_plan(&mut self) {
        let copied = self.plan.iter().filter(|leaving| leaving.is_copied);
        let chunks: Vec<_> = copied.map(|leaving| (leaving.base + leaving.chunk.offset, leaving.chunk.len)).collect();
        if chunks.is_empty() {
            return;
        }
        let begin = Instant::now();
        let Some(fingerprints) = self.ready.first_mut().and_then(|ready| ready.fingerprints(&chunks)) else { return };
        let copied = self.plan.iter_mut().filter(|leaving| leaving.is_copied);
        copied.zip(fingerprints).for_each(|(leaving, fingerprint)| leaving.fingerprint = Some(fingerprint));
        trace!("computed fingerprints of {} chunks in {} µs", chunks.len(), begin.elapsed().as_micros());
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

    const COPY: &str = "cuMemcpyDtoHAsync_v2";

    #[test]
    fn an_unchanged_chunk_is_not_copied_again() {
        let memory = Memory::with_kernel();
        let at = memory.allocate();
        memory.driver.write(at, 1);
        for (word, copies) in [(1, 1), (1, 1), (2, 2)] {
            memory.driver.write(at, word);
            assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
            assert_eq!((memory.driver.count(COPY), memory.account().mapped), (copies, 0));
            assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
            assert_eq!(memory.driver.word(at), Some(word));
        }
        assert_eq!(memory.account().counts.unmoved, GRANULE);
    }

    #[test]
    fn a_chunk_of_one_repeated_value_takes_no_host_memory() {
        let memory = Memory::with_kernel();
        let at = memory.allocate();
        memory.driver.fill(at, 0x3f80_0000);
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.host()), (0, 0, 0));
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!(memory.driver.word(at), Some(0x3f80_0000));
        assert_eq!((memory.driver.count(COPY), memory.driver.count("cuMemcpyHtoDAsync_v2")), (0, 0));
    }

    #[test]
    fn a_chunk_whose_copy_fails_stays_on_the_gpu() {
        let memory = Memory::new();
        let at = memory.allocate();
        memory.driver.write(at, 5);
        memory.driver.fail(COPY, 1, ERROR_INVALID_VALUE);
        assert_eq!(memory.run(EVICT_ALL), Step::Stopped(Stop::HostFull));
        let account = memory.account();
        assert_eq!((account.mapped, account.swapped, account.in_flight), (GRANULE, 0, 0));
        assert_eq!(memory.driver.count("cuMemUnmap"), 0);
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        assert_eq!(memory.driver.word(at), Some(5));
    }

    #[test]
    fn an_eviction_stops_at_its_target() {
        let memory = Memory::new();
        let _ = [(); 3].map(|()| memory.allocate());
        assert_eq!(memory.run(Goal::Evict { target: 2 * GRANULE }), Step::Done { moved: true });
        assert_eq!((memory.account().mapped, memory.driver.count(COPY)), (2 * GRANULE, 1));
    }

    #[test]
    fn a_new_goal_cancels_the_plan() {
        let memory = Memory::new();
        let _ = [(); 2].map(|()| memory.allocate());
        let plan = memory.space.lock().take_leaving(2 * GRANULE);
        memory.mover.lock().plan = plan.into();
        assert_eq!(memory.account().in_flight, 2 * GRANULE);
        assert_eq!(memory.run(Goal::Restore), Step::Done { moved: false });
        assert_eq!((memory.account().in_flight, memory.account().can_run()), (0, true));
    }
}
