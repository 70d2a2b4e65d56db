//! The host buffers of an eviction: their allocation, and the reuse of unused buffers.

use super::Mover;
use crate::{
    driver::types::*,
    env::trace::trace,
    memory::{chunk::Leaving, space::Space, staging::StagingAllocator},
    sys::sync::Mutex,
};
use alloc::vec::Vec;

/// The number of threads that allocate buffers during an eviction. Ahead of an eviction, only
/// `WORKERS_AHEAD` threads allocate buffers, because the program still needs the processors.
const WORKERS: usize = 8;

const WORKERS_AHEAD: usize = 2;

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

    const REGISTER: &str = "cuMemHostRegister_v2";

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
        assert_eq!((memory.driver.count("cuMemcpyDtoHAsync_v2"), memory.driver.count(REGISTER)), (3, 1));
    }
}
