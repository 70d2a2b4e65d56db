//! The part of the thread that keeps the host memory of this client within what the scheduler allows: copies go into the swap file,
//! and come back before their chunks do.

use super::{CHORE_INTERVAL, ClientThread, memory::trim_host_cache};
use crate::{
    driver::context::with_current,
    env::trace::trace,
    gpu::{self, Gpu},
    memory::{file::SwapFile, space::Space},
    sys::sync::Mutex,
};
use alloc::vec::Vec;
use core::time::Duration;
use rustix::fd::OwnedFd;

/// Chunks that are written, or read, at once: two for each thread, so that none has to wait for the client's thread.
const MAX_JOBS: usize = 8;

/// By so much, in bytes, copies may exceed what is allowed while they are written. Beyond it nothing more leaves the GPU.
const MOST_BEHIND: u64 = 512 << 20;

/// Where copies of chunks may be.
#[derive(Debug)]
pub(super) struct HostTier {
    /// Bytes of host memory that the scheduler allows; `u64::MAX` without one.
    ram: u64,
    /// The file that copies are written to.
    current: Option<SwapFile>,
    /// All files in which something may be.
    files: Vec<SwapFile>,
}

impl HostTier {
    pub const fn new() -> Self {
        Self { ram: u64::MAX, current: None, files: Vec::new() }
    }

    /// Whether there is nothing to do, and nothing to look after.
    fn is_unused(&self) -> bool {
        self.ram == u64::MAX && self.files.is_empty()
    }

    /// Bytes of host memory that all GPUs' memory takes, without what is being written.
    fn held(&self) -> u64 {
        let held =
            gpu::attached().filter_map(Gpu::account).fold(0u64, |sum, account| sum.saturating_add(account.host()));
        held.saturating_sub(self.files.iter().map(SwapFile::writing).sum())
    }

    /// What of it is more than allowed.
    fn excess(&self) -> u64 {
        self.held().saturating_sub(self.ram)
    }
}

impl ClientThread {
    /// The scheduler allows so much host memory, and has reserved so much of the file.
    pub(super) fn set_host_memory(&mut self, ram: u64, size: u64, descriptors: Vec<OwnedFd>) {
        self.tier.ram = ram;
        if let Some(descriptor) = descriptors.into_iter().next() {
            self.retire_file();
            self.tier.current = SwapFile::open(descriptor);
            self.tier.files.extend(self.tier.current.clone());
        }
        if let Some(file) = &self.tier.current {
            file.grow(size);
        }
    }

    /// There is no scheduler that limits host memory, or a new one, which knows nothing of the file.
    pub(super) fn forget_host_memory(&mut self) {
        self.tier.ram = u64::MAX;
        self.retire_file();
    }

    fn retire_file(&mut self) {
        if let Some(file) = self.tier.current.take() {
            file.retire();
        }
    }

    /// Bytes of host memory that this client may still take.
    pub(super) fn spare_host_memory(&self) -> u64 {
        self.tier.ram.saturating_sub(self.tier.held())
    }

    /// Whether copies are on their way into the file, so that an eviction that finds no host memory should wait for them.
    pub(super) fn is_writing(&self) -> bool {
        self.tier.files.iter().any(|file| file.writing() > 0)
    }

    /// Carries out what has been read and written, and has more of it read or written. Returns the time until the next look.
    pub(super) fn step_files(&mut self, gpu: &'static Gpu, space: &Mutex<Space>) -> Duration {
        if self.tier.is_unused() {
            return Duration::MAX;
        }
        let context = gpu.moving.lock().context().map(|context| context as usize);
        let in_context = |f: &mut dyn FnMut()| match context {
            Some(context) => with_current(context, f).is_ok(),
            None => false,
        };
        for file in &self.tier.files {
            file.close_in_program();
            let landed = Space::land(space, file, |buffer| {
                in_context(&mut || buffer.register(context.unwrap_or(0)));
            });
            if landed {
                let guard = space.lock();
                trace!("GPU {}: {} bytes are in a file", gpu.index, guard.account.in_file);
                if guard.account.is_lost {
                    trace!("GPU {}: memory that was on the disk is lost", gpu.index);
                }
                gpu.report(&guard.account);
            }
        }
        self.tier.files.retain(|file| !file.is_over());
        let (account, comes_back) = {
            let guard = space.lock();
            (guard.account, guard.can_restore())
        };
        if comes_back && !self.is_preparing_sleep() {
            space.lock().account.is_file_behind = false;
            return self.read_some(space);
        }
        self.write_some(gpu, space, account.host_cache, &in_context)
    }

    /// Has chunks read that the program needs. They take host memory until they are on the GPU, so only so many are read ahead.
    fn read_some(&self, space: &Mutex<Space>) -> Duration {
        let mut jobs: usize = self.tier.files.iter().map(SwapFile::jobs).sum();
        while jobs < MAX_JOBS {
            if !space.lock().read_one(MOST_BEHIND) {
                break;
            }
            jobs += 1;
        }
        // One for which there was no host memory is tried again; others say when they are done.
        if jobs > 0 { CHORE_INTERVAL } else { Duration::MAX }
    }

    /// Has copies written, as long as there are more than allowed, or than an eviction leaves room for. Before the process sleeps, too:
    /// then nothing can be written, since freeing a buffer may need the driver.
    fn write_some(
        &self,
        gpu: &Gpu,
        space: &Mutex<Space>,
        cached: u64,
        in_context: &dyn Fn(&mut dyn FnMut()) -> bool,
    ) -> Duration {
        let mut excess = self.tier.excess();
        if excess > 0 && cached > 0 {
            trim_host_cache(gpu, space, cached.saturating_sub(excess));
            excess = self.tier.excess();
        }
        let Some(file) = &self.tier.current else {
            space.lock().account.is_file_behind = false;
            return Duration::MAX;
        };
        let is_full = self.host_full.is_some() && !self.is_writing();
        let mut wanted = if is_full { excess.max(1) } else { excess };
        let mut jobs = file.jobs();
        while wanted > 0 && jobs < MAX_JOBS {
            let written = Space::write_one(space, file, |buffer| {
                !buffer.is_registered() || in_context(&mut || buffer.unregister())
            });
            let Some(bytes) = written else { break };
            wanted = wanted.saturating_sub(bytes);
            jobs += 1;
        }
        let is_behind = jobs > 0 && self.tier.excess() > MOST_BEHIND;
        space.lock().account.is_file_behind = is_behind;
        if jobs > 0 { CHORE_INTERVAL } else { Duration::MAX }
    }
}
