//! Eviction: copies chunks to host buffers unless a current copy exists, and unmaps the chunks from the
//! GPU. Also allocates the buffers.

use super::{
    Mover, POLL_INTERVAL, RETRY_INTERVAL, Stop,
    transfer::{Direction, Mapped},
};
use crate::{
    driver::{self, context::is_dead, types::*},
    env::trace::trace,
    memory::{
        engine::Engine,
        file::HostCopy,
        space::{
            Space,
            chunks::{Chunk, Kept, Leaving, Residency},
        },
        staging::{StagingAllocator, Taken},
    },
    sys::{sync::Mutex, time::Instant},
};
use alloc::vec::Vec;
use core::time::Duration;

/// The number of threads that allocate buffers during an eviction. Ahead of an eviction, only
/// `WORKERS_AHEAD` threads allocate buffers, because the program still needs the processors.
const WORKERS: usize = 8;

const WORKERS_AHEAD: usize = 2;

impl Mover {
    /// Starts evictions until `target` bytes remain or the limit on copies in flight is reached.
    /// Returns the time until the next call, or `None` if no further eviction can start.
    pub(super) fn evict_some(&mut self, space: &Mutex<Space>, target: u64) -> Result<Option<Duration>, Stop> {
        if self.is_idle() {
            // No work is running, so all frees are done. Unused pool memory is released instead of copied.
            let mut guard = space.lock();
            guard.release_pools_at_rest();
            let (gpu, strays) = (guard.gpu(), guard.take_strays());
            drop(guard);
            for (at, len) in strays {
                Engine::Managed.prefetch(gpu, at, len, false, self.stream());
            }
        }
        while self.has_room() {
            let guard = space.lock();
            let evictions = self.transfers.iter().filter(|transfer| transfer.is_eviction());
            let leaving: u64 = evictions.map(|transfer| transfer.chunk.len).sum();
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
                if !self.stop_staging(space) {
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
            if let Some(after) = self.evict_one(space, leaving)? {
                return Ok(Some(after));
            }
        }
        Ok(Some(POLL_INTERVAL))
    }

    /// Starts the eviction of one chunk. Returns a time if the step must end: after it, the chunk is tried
    /// again. A chunk that needs no copy is evicted immediately, and then the step ends too, so that
    /// other clients can use the chunk's bytes.
    fn evict_one(&mut self, space: &Mutex<Space>, leaving: Leaving) -> Result<Option<Duration>, Stop> {
        let Leaving { base, chunk: Chunk { offset, len, flags, residency }, is_copied, fingerprint } = leaving;
        let Residency::Gpu { handle, copy } = residency else { return Ok(None) };
        let at = base + offset;
        let (gpu, engine) = {
            let guard = space.lock();
            (guard.gpu(), guard.engine_of(flags))
        };
        let mapped = Mapped { base, offset, len, handle, engine };
        if !engine.copies() {
            engine.prefetch(gpu, at, flags.part_inside(offset, len), false, self.stream());
            self.track(mapped, Direction::Out(None));
            return Ok(None);
        }
        if let Some(value) = fingerprint.and_then(|p| p.constant) {
            space.lock().keep_buffers(copy.and_then(|copy| copy.without_buffer().0));
            self.evict_without_copy(space, mapped, Residency::Constant(value));
            return Ok(Some(Duration::ZERO));
        }
        let copy = match copy {
            Some(copy) if fingerprint.is_some() && copy.fingerprint() == fingerprint => {
                let there = match copy {
                    Kept::Host(copy) => Residency::Host(Some(copy)),
                    Kept::File(copy) => Residency::File(copy),
                };
                self.evict_without_copy(space, mapped, there);
                return Ok(Some(Duration::ZERO));
            }
            copy => copy,
        };
        // Drops the copy in a file.
        let old = copy.and_then(|copy| copy.without_buffer().0);
        let mut buffer = match old.map_or_else(|| self.take_buffer(space, len), Taken::Buffer) {
            Taken::Buffer(buffer) => buffer,
            Taken::Later => {
                let chunk = Chunk { offset, len, flags, residency: Residency::Gpu { handle, copy: None } };
                self.plan.push_front(Leaving { base, chunk, is_copied, fingerprint });
                return Ok(Some(POLL_INTERVAL));
            }
            Taken::Nothing => {
                space.lock().put(base, offset, Residency::Gpu { handle, copy: None });
                return Err(Stop::HostFull);
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
        self.track(mapped, Direction::Out(Some(HostCopy { buffer, fingerprint, file: None })));
        Ok(None)
    }

    /// Completes the eviction of a chunk whose contents are stored in `residency`.
    pub(super) fn complete_eviction(&mut self, space: &Mutex<Space>, chunk: Mapped, residency: Residency) {
        let Mapped { base, offset, len, handle, engine } = chunk;
        if let Some(aliases) = space.lock().aliases(base) {
            aliases.hide(offset);
        }
        engine.unmap(base + offset, len, handle);
        let mut guard = space.lock();
        self.stats.out += len;
        guard.on_eviction(base, len, &residency);
        guard.put(base, offset, residency);
    }

    /// Evicts a chunk whose contents `residency` already stores.
    fn evict_without_copy(&mut self, space: &Mutex<Space>, chunk: Mapped, residency: Residency) {
        self.stats.uncopied += chunk.len;
        space.lock().account.counts.unmoved += chunk.len;
        self.complete_eviction(space, chunk, residency);
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

/// The host buffers of evictions: their allocation, and the reuse of unused buffers.
impl Mover {
    /// Starts allocating buffers for a likely eviction of `bytes` bytes.
    pub fn prepare(&mut self, space: &Mutex<Space>, contexts: &[CUcontext], bytes: u64) {
        if self.pauses > 0 || !self.is_idle() || self.choose_context(contexts).is_err() {
            return;
        }
        let guard = space.lock();
        let bytes = bytes.min(guard.account.host_cache_max.saturating_sub(guard.account.host_cache));
        let needed = guard.buffers_for(bytes);
        drop(guard);
        self.start_staging(space, needed, WORKERS_AHEAD);
        self.preparing = self.staging.is_some();
        trace!("allocating staging buffers in advance: {}", self.preparing);
    }

    /// Starts allocating the missing buffers for the plan.
    pub(super) fn allocate_for_plan(&mut self, space: &Mutex<Space>) {
        let needs = |leaving: &&Leaving| {
            let is_constant = leaving.fingerprint.is_some_and(|fingerprint| fingerprint.constant.is_some());
            leaving.is_copied && !is_constant && leaving.needs_buffer()
        };
        let needed = self.plan.iter().filter(needs).map(|leaving| leaving.chunk.len).collect();
        self.start_staging(space, needed, WORKERS);
    }

    pub(super) fn start_staging(&mut self, space: &Mutex<Space>, mut lengths: Vec<u64>, workers: usize) {
        let (mut spare, work) = {
            let guard = space.lock();
            (guard.free_buffer_lengths(), guard.waiter().work())
        };
        lengths.retain(|len| match spare.iter().position(|spare| spare == len) {
            Some(at) => {
                spare.swap_remove(at);
                false
            }
            None => true,
        });
        if let (false, Some(context)) = (lengths.is_empty(), self.context()) {
            self.staging = Some(StagingAllocator::start(&lengths, context as usize, work, workers));
        }
    }

    /// Takes a buffer for a chunk: a free buffer, a new buffer, or the buffer of a copy whose chunk is on the
    /// GPU.
    fn take_buffer(&self, space: &Mutex<Space>, len: u64) -> Taken {
        if let Some(free) = space.lock().take_free_buffer(len) {
            return Taken::Buffer(free);
        }
        match self.staging.as_ref().map_or(Taken::Nothing, |staging| staging.take(len)) {
            Taken::Nothing => space.lock().take_copy(len).map_or(Taken::Nothing, Taken::Buffer),
            taken => taken,
        }
    }

    /// Stops allocating buffers. Returns whether all allocating threads have ended.
    pub(super) fn stop_staging(&mut self, space: &Mutex<Space>) -> bool {
        self.preparing = false;
        self.collect_staging(space)
    }

    /// Keeps the finished buffers. Returns whether the allocation of buffers has ended.
    pub(super) fn collect_staging(&mut self, space: &Mutex<Space>) -> bool {
        let Some(staging) = &self.staging else { return true };
        if !self.preparing {
            staging.stop();
        }
        let done = staging.is_done();
        space.lock().keep_buffers(staging.rest());
        if done {
            self.staging = None;
            self.preparing = false;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        driver::fake::until,
        memory::{
            engine::GRANULE,
            fake::{EVICT_ALL, Memory},
            mover::{Goal, Step},
        },
    };

    const COPY: &str = "cuMemcpyDtoHAsync_v2";
    const REGISTER: &str = "cuMemHostRegister_v2";

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

    fn prepare(memory: &Memory, bytes: u64) {
        memory.mover.lock().prepare(memory.space, &[memory.context], bytes);
    }

    /// Waits for the threads that allocate buffers, and collects the buffers.
    fn collect(memory: &Memory) {
        until(|| memory.mover.lock().staging.as_ref().is_none_or(StagingAllocator::is_done));
        assert_eq!(memory.run(Goal::Idle), Step::Done { moved: false });
    }

    #[test]
    fn an_eviction_uses_the_buffers_that_were_prepared() {
        let memory = Memory::new();
        let _ = [(); 2].map(|()| memory.allocate());
        prepare(&memory, 2 * GRANULE);
        collect(&memory);
        assert_eq!(memory.space.lock().free_buffer_lengths(), [GRANULE; 2]);
        assert_eq!((memory.account().host_cache, memory.driver.count(REGISTER)), (2 * GRANULE, 2));
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        assert_eq!((memory.account().host_cache, memory.account().swapped), (0, 2 * GRANULE));
        assert_eq!(memory.driver.count(REGISTER), 2, "the eviction needed no other buffer");
    }

    #[test]
    fn prepared_buffers_stay_within_the_limit_on_cached_host_memory() {
        let memory = Memory::new();
        let _ = [(); 3].map(|()| memory.allocate());
        memory.space.lock().account.host_cache_max = GRANULE;
        prepare(&memory, 3 * GRANULE);
        collect(&memory);
        assert_eq!(memory.account().host_cache, GRANULE);
        prepare(&memory, 3 * GRANULE);
        assert!(memory.mover.lock().staging.is_none(), "the limit is reached");
    }

    #[test]
    fn a_paused_mover_prepares_no_buffers() {
        let memory = Memory::new();
        memory.allocate();
        memory.mover.lock().pause();
        prepare(&memory, GRANULE);
        assert!(memory.mover.lock().staging.is_none());
        memory.mover.lock().resume();
        prepare(&memory, GRANULE);
        assert!(memory.mover.lock().staging.is_some());
        collect(&memory);
    }

    #[test]
    fn an_eviction_keeps_its_buffers_for_the_next() {
        let memory = Memory::new();
        memory.allocate();
        for _ in 0..3 {
            assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
            assert_eq!(memory.run(Goal::Restore), Step::Done { moved: true });
        }
        assert_eq!((memory.driver.count(COPY), memory.driver.count(REGISTER)), (3, 1));
    }

    /// So the bytes of each chunk are reported while the eviction continues.
    #[test]
    fn a_step_ends_with_each_chunk_that_needs_no_copy() {
        let memory = Memory::with_kernel();
        let chunks = [(); 2].map(|()| memory.allocate());
        chunks.iter().for_each(|at| memory.driver.fill(*at, 7));
        assert_eq!(memory.step(EVICT_ALL), Step::Busy(Duration::ZERO));
        assert_eq!((memory.account().mapped, memory.account().counts.unmoved), (GRANULE, GRANULE));
        assert_eq!(memory.run(EVICT_ALL), Step::Done { moved: true });
        assert_eq!((memory.account().mapped, memory.driver.count(COPY)), (0, 0));
    }
}
