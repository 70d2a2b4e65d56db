//! Keeps this client's host memory within the scheduler's limit. Writes copies of chunks to the swap
//! file, and reads them back before their chunks are restored.
//!
//! The library itself watches the cgroups of its process, because the scheduler may not be able to see
//! these groups. The less memory the groups have left, the more often the library reads them. If a
//! group is short of memory, evicted memory leaves RAM as if it exceeded the scheduler's limit. Unused
//! buffers are freed first, then host copies that are already in the file, and then other copies are
//! written. Memory that fits in no file is unregistered, so that the kernel can page it out. It is
//! registered again right before it is copied to the GPU.

use super::{CHORE_INTERVAL, ClientThread, memory::release_surplus};
use crate::{
    connection,
    env::trace::trace,
    gpu::{self, Gpu},
    memory::{
        account::Account,
        file::{self, SwapFile},
        headroom::{self, Headroom},
        space::Space,
    },
    sys::{sync::Mutex, time::Instant},
};
use alloc::vec::Vec;
use core::time::Duration;
use nvshare_wire::ClientMessage;
use rustix::fd::OwnedFd;

/// The number of chunks being written or read at a time: two per worker thread, so that no worker waits
/// for the client's thread.
const MAX_JOBS: usize = 8;

/// The largest excess over the limit, in bytes, while copies are being written. Eviction pauses
/// while the excess is larger.
const MOST_BEHIND: u64 = 512 << 20;

/// The longest interval between checks of the cgroup, for a client that has host memory.
const GROUP_PERIOD: Duration = Duration::from_secs(1);
/// Upper bound on the growth of a cgroup's other memory, in bytes per second. The kernel can allocate
/// about this much for a few threads.
const GROWTH: u64 = 8 << 30;

/// The places that contain copies of chunks: host memory and swap files.
#[derive(Debug)]
pub(super) struct HostTier {
    /// Bytes of host memory that the scheduler allows; `u64::MAX` if it sets no limit.
    ram: u64,
    /// The file that copies are written to.
    current: Option<SwapFile>,
    /// All files that may still contain copies.
    files: Vec<SwapFile>,
    /// True if the client has more host memory than allowed and no file has room. The kernel may
    /// then page out the host memory.
    pub is_pageable: bool,
    /// The kernel's latest figures, and when they were read.
    seen: Option<(Instant, Headroom)>,
}

impl Default for HostTier {
    fn default() -> Self {
        Self { ram: u64::MAX, current: None, files: Vec::new(), is_pageable: false, seen: None }
    }
}

impl HostTier {
    /// Whether the client has no host memory, no files and no limit.
    fn is_unused(&self) -> bool {
        self.ram == u64::MAX && self.files.is_empty() && self.host_memory() == 0
    }

    /// Returns the bytes of host memory that contain chunks of any GPU, without bytes that are being
    /// written or freed.
    fn host_memory(&self) -> u64 {
        let kept = |account: Account| account.host() - account.releasing;
        let held = gpu::in_use().filter_map(Gpu::account).fold(0u64, |sum, account| sum.saturating_add(kept(account)));
        held.saturating_sub(self.files.iter().map(SwapFile::bytes_in_queue).sum())
    }

    /// Returns the bytes of host memory above the scheduler's limit, or above the room in this process's
    /// cgroups.
    fn excess(&self) -> u64 {
        let held = self.host_memory();
        let releasing = gpu::in_use().filter_map(Gpu::account).map(|account| account.releasing).sum();
        let lacking = self.headroom().lacking.saturating_sub(releasing);
        held.saturating_sub(self.ram).max(lacking.min(held))
    }

    /// Reads the kernel's figures, unless they were read within the last `CHORE_INTERVAL`.
    fn look(&mut self) {
        if self.seen.is_none_or(|(at, _)| at.elapsed() >= CHORE_INTERVAL) {
            self.seen = Some((Instant::now(), Headroom::now()));
        }
    }

    /// Returns the time until the next check of the cgroup. The cgroup's other memory grows without
    /// notice. So the check is due before that memory could use up the headroom.
    fn next_look(&self) -> Duration {
        let headroom = self.headroom();
        if self.host_memory() == 0 || !headroom.is_limited {
            return Duration::MAX;
        }
        Duration::from_micros(headroom.left / (GROWTH / 1_000_000)).clamp(CHORE_INTERVAL, GROUP_PERIOD)
    }

    fn headroom(&self) -> Headroom {
        self.seen.map_or(Headroom::UNLIMITED, |(_, headroom)| headroom)
    }

    /// Whether the client has a swap file.
    pub fn has_files(&self) -> bool {
        !self.files.is_empty()
    }

    /// Returns the bytes of host memory that this client may still allocate.
    fn spare(&self) -> u64 {
        self.ram.saturating_sub(self.host_memory())
    }
}

impl ClientThread {
    /// Called when the scheduler offers swap files. Tests only now whether this process can use
    /// these files, because a seccomp filter may kill a process that tries.
    pub(super) fn use_swap_file(&mut self) {
        self.retire_file(); // this scheduler does not know it
        if file::is_supported() {
            connection::send(&ClientMessage::UseSwapFile { ram_max: headroom::most_in_groups() });
        }
    }

    /// Applies the scheduler's limit on host memory, and its reservation of space in the swap file.
    pub(super) fn set_host_memory(&mut self, ram: u64, size: u64, descriptors: Vec<OwnedFd>) {
        self.tier.ram = ram;
        if let Some(descriptor) = descriptors.into_iter().next() {
            self.retire_file();
            self.tier.current = SwapFile::open(descriptor);
            if self.tier.current.is_none() {
                trace!("cannot open the swap file");
            }
            self.tier.files.extend(self.tier.current.clone());
        }
        if let Some(file) = &self.tier.current {
            file.grow(size);
        }
    }

    /// Forgets the limit on host memory. Called when no scheduler sets a limit any more, and when a new
    /// scheduler takes over.
    pub(super) fn forget_host_memory(&mut self) {
        self.tier.ram = u64::MAX;
    }

    /// Stops using the current file, because the scheduler does not know it. Nothing more is written to
    /// the file, and it is kept until its contents have been read.
    pub(super) fn retire_file(&mut self) {
        if let Some(file) = self.tier.current.take() {
            file.retire();
            // The file is closed once its last chunk has been read.
            gpu::in_use().filter_map(Gpu::space).for_each(|space| space.lock().forget_places());
        }
    }

    /// Returns the bytes of host memory that this client may allocate for chunks that are still on
    /// the GPU. If no other client waits for the GPU, half of the headroom of the host and the
    /// cgroups is left to other memory. When other memory grows, this client frees the host memory
    /// that it has allocated for these chunks.
    pub(super) fn spare_host_memory(&self, is_contended: bool) -> u64 {
        let left = Headroom::now().left;
        self.tier.spare().min(if is_contended { left } else { left / 2 })
    }

    /// Whether copies are being written to the file. If so, an eviction that finds no host memory waits for
    /// the writes.
    pub(super) fn is_writing(&self) -> bool {
        self.tier.files.iter().any(|file| file.bytes_in_queue() > 0)
    }

    /// Applies finished reads and writes, and starts new ones. Returns the time until the next call.
    pub(super) fn step_files(&mut self, gpu: &'static Gpu, space: &Mutex<Space>) -> Duration {
        if self.tier.is_unused() {
            return Duration::MAX;
        }
        self.tier.look();
        for file in &self.tier.files {
            file.close_in_program();
            let mut guard = space.lock();
            if guard.land(file) {
                trace!("GPU {}: {} bytes of memory are in the swap file", gpu.index, guard.account.in_file);
                trace!("{} bytes were written to the file", file.bytes_on_disk());
                if guard.account.is_lost {
                    trace!("GPU {}: lost memory that was in the swap file", gpu.index);
                }
                gpu.report(&guard.account);
            }
        }
        self.tier.files.retain(|file| !file.is_over());
        let (account, comes_back) = {
            let guard = space.lock();
            (guard.account, guard.can_restore() && !self.is_preparing_sleep())
        };
        let (excess, most) = (self.tier.excess(), if comes_back { Self::bytes_to_read(&account) } else { 0 });
        if excess > 0 && account.host_cache > most {
            release_surplus(gpu, space, account.host_cache.saturating_sub(excess).max(most));
        }
        if comes_back {
            space.lock().account.is_file_behind = false;
            return self.read_some(space);
        }
        self.write_some(gpu, space)
    }

    /// Returns the bytes of host buffers to keep while memory is read back from a file, even above the
    /// limit. When a chunk is back on the GPU, its buffer is used for the next chunk to be read. Creating
    /// the pages of a new buffer takes longer than reading.
    pub(super) fn bytes_to_read(account: &Account) -> u64 {
        account.in_file.min(MOST_BEHIND)
    }

    /// Starts reading chunks that the program needs. Reading ahead is bounded, because the chunks occupy
    /// host memory until they are on the GPU.
    fn read_some(&self, space: &Mutex<Space>) -> Duration {
        let mut jobs: usize = self.tier.files.iter().map(SwapFile::jobs).sum();
        if jobs >= MAX_JOBS {
            return CHORE_INTERVAL;
        }
        let mut spare = self.tier.spare().min(self.tier.headroom().left);
        while jobs < MAX_JOBS {
            let Some(bytes) = space.lock().read_one(MOST_BEHIND, spare) else { break };
            spare = spare.saturating_sub(bytes);
            jobs += 1;
        }
        // While jobs run, retries soon, because a chunk may have found no host memory. Without jobs, no retry
        // is due.
        if jobs > 0 { CHORE_INTERVAL } else { Duration::MAX }
    }

    /// Starts writing copies while they exceed the limit, or while an eviction finds no host
    /// memory. Also writes before the process sleeps, because no copy can be written during sleep:
    /// freeing its buffer may need the driver.
    fn write_some(&mut self, gpu: &Gpu, space: &Mutex<Space>) -> Duration {
        let is_full = self.on(gpu).host_full.is_some() && !self.is_writing();
        let excess = self.tier.excess();
        let Some(file) = &self.tier.current else {
            space.lock().account.is_file_behind = false;
            self.tier.is_pageable = excess > 0;
            return self.tier.next_look();
        };
        // The file's first thread wakes this thread when the file is open. Until then, the copies need not be
        // paged out.
        let is_opening = file.is_opening();
        let in_file = space.lock().account.in_file;
        let mut wanted = if is_full { excess.max(1) } else { excess };
        let mut jobs = file.jobs();
        while wanted > 0 && jobs < MAX_JOBS {
            let Some(bytes) = space.lock().write_one(file) else { break };
            wanted = wanted.saturating_sub(bytes);
            jobs += 1;
        }
        let is_pageable = jobs == 0 && !is_opening && excess > 0;
        {
            let guard = space.lock();
            // If the file already had a copy's contents, `write_one` has changed the account
            // without a write.
            if guard.account.in_file != in_file {
                gpu.report(&guard.account);
            }
        }
        let is_behind = jobs > 0 && self.tier.excess() > MOST_BEHIND;
        space.lock().account.is_file_behind = is_behind;
        self.tier.is_pageable = is_pageable;
        if jobs > 0 { CHORE_INTERVAL } else { self.tier.next_look() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{client::thread::fake::Client, driver::fake::Driver, memory::engine::GRANULE};
    use rustix::fs::{Mode, OFlags, open, unlink};
    use std::format;

    /// Passes the client an unlinked file with room for 8 chunks, and allows it `ram` chunks of host memory.
    fn set_host_memory(client: &mut Client, ram: u64) {
        let path = format!("{}/nvshare-tier-{}-{ram}", std::env::temp_dir().display(), std::process::id());
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::RDWR | OFlags::CLOEXEC;
        let file = open(&path, flags, Mode::RUSR | Mode::WUSR).expect("a file");
        unlink(&path).expect("the file");
        client.thread.set_host_memory(ram * GRANULE, 8 * GRANULE, Vec::from([file]));
    }

    /// A client with two evicted chunks, and the addresses of the chunks.
    fn evicted() -> (Client, &'static Gpu, [u64; 2]) {
        let mut client = Client::new(1);
        let gpu = client.gpu();
        let addresses = [1, 2].map(|word| client.allocate(gpu, word));
        client.evict(gpu, 1);
        (client, gpu, addresses)
    }

    fn account(gpu: &Gpu) -> Account {
        gpu.account().expect("a space")
    }

    fn restore(client: &mut Client, gpu: &Gpu, addresses: [u64; 2]) {
        client.allow(gpu, 2, 2);
        client.step_until(|_| account(gpu).can_run());
        assert_eq!(addresses.map(|at| client.driver.word(at)), [Some(1), Some(2)]);
    }

    #[test]
    fn copies_beyond_the_limit_are_written_to_the_file_and_read_back() {
        if !file::is_supported() {
            return;
        }
        let (mut client, gpu, addresses) = evicted();
        set_host_memory(&mut client, 1);
        client.step_until(|_| account(gpu).in_file == GRANULE && account(gpu).releasing == 0);
        let now = account(gpu);
        assert_eq!((now.swapped, now.host(), now.in_flight), (2 * GRANULE, GRANULE, 0));
        client.step();
        assert_eq!(account(gpu).in_file, GRANULE, "the rest is within the limit");
        restore(&mut client, gpu, addresses);
        assert_eq!((account(gpu).in_file, account(gpu).is_lost), (0, false));
    }

    /// The threads of the file may start at any time after the file has arrived.
    #[test]
    fn copies_are_written_once_the_file_was_opened_without_another_event() {
        if !file::is_supported() {
            return;
        }
        let (mut client, gpu, _) = evicted();
        set_host_memory(&mut client, 0);
        client.run_until(|client| {
            assert!(!client.thread.tier.is_pageable, "the copies stay in RAM");
            account(gpu).in_file == 2 * GRANULE
        });
    }

    /// While the buffer of a copy is being unregistered, the copy cannot be written.
    #[test]
    fn copies_are_written_to_a_file_that_arrives_while_their_buffers_are_unregistered() {
        if !file::is_supported() {
            return;
        }
        let mut client = Client::new(1);
        let gpu = client.gpu();
        client.allocate(gpu, 1);
        client.evict(gpu, 1);
        client.driver.block("cuMemHostUnregister");
        client.thread.set_host_memory(0, 0, Vec::new());
        client.step_until(|client| client.thread.tier.is_pageable && account(gpu).in_flight == GRANULE);
        set_host_memory(&mut client, 0);
        client.step_until(|client| client.thread.tier.current.as_ref().is_some_and(|file| file.room() > 0));
        client.step();
        assert_eq!(account(gpu).in_file, 0);
        client.driver.unblock("cuMemHostUnregister");
        client.run_until(|_| account(gpu).in_file == GRANULE);
    }

    #[test]
    fn a_file_that_a_new_scheduler_does_not_know_is_kept_until_it_has_been_read() {
        if !file::is_supported() {
            return;
        }
        let (mut client, gpu, addresses) = evicted();
        set_host_memory(&mut client, 0);
        client.step_until(|_| account(gpu).in_file == 2 * GRANULE);
        client.thread.forget_host_memory();
        assert!(client.thread.tier.current.is_some() && client.thread.tier.ram == u64::MAX);
        client.thread.use_swap_file();
        assert!(client.thread.tier.current.is_none());
        client.step();
        assert_eq!((client.thread.tier.files.len(), account(gpu).in_file), (1, 2 * GRANULE));
        restore(&mut client, gpu, addresses);
        client.step_until(|client| client.thread.tier.files.is_empty());
    }

    #[test]
    fn an_unchanged_chunk_is_not_written_again() {
        if !file::is_supported() {
            return;
        }
        let driver = Driver::new();
        driver.add_kernel();
        let mut client = Client::on(driver, 1);
        let gpu = client.gpu();
        let at = client.allocate(gpu, 1);
        set_host_memory(&mut client, 0);
        for (seq, word, written) in [(1, 1, 1), (3, 1, 1), (5, 2, 2)] {
            client.driver.write(at, word);
            client.evict(gpu, seq);
            client.step_until(|_| account(gpu).in_file == GRANULE);
            let file = client.thread.tier.current.clone().expect("a file");
            assert_eq!((file.bytes_on_disk(), file.room()), (written * GRANULE, 7 * GRANULE));
            client.allow(gpu, seq + 1, 1);
            client.step_until(|_| account(gpu).can_run());
            assert_eq!(client.driver.word(at), Some(word));
        }
    }

    #[test]
    fn without_a_file_excess_host_memory_can_be_paged_out() {
        let (mut client, gpu, _) = evicted();
        client.step();
        assert!(!client.thread.tier.is_pageable);
        client.thread.set_host_memory(GRANULE, 0, Vec::new());
        client.step();
        assert!(client.thread.tier.is_pageable && client.thread.tier.excess() == GRANULE);
        assert_eq!((client.thread.tier.spare(), account(gpu).in_file), (0, 0));
        client.thread.forget_host_memory();
        client.step();
        assert!(!client.thread.tier.is_pageable);
    }

    #[test]
    fn the_cgroup_is_checked_before_its_other_memory_can_use_up_the_headroom() {
        let (mut client, ..) = evicted();
        let mut next_look = |left, is_limited| {
            client.thread.tier.seen = Some((Instant::now(), Headroom { left, lacking: 0, is_limited }));
            client.thread.tier.next_look()
        };
        assert_eq!(next_look(0, false), Duration::MAX, "no cgroup limits the memory");
        assert_eq!(next_look(0, true), CHORE_INTERVAL);
        assert_eq!(next_look(u64::MAX, true), GROUP_PERIOD);
        let between = next_look(GROWTH / 4, true);
        assert!(between > CHORE_INTERVAL && between <= Duration::from_millis(300), "{between:?}");
    }
}
