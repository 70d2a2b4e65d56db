//! Host buffers for copies of chunks. The buffers are anonymous huge pages, registered with the driver
//! so that copies run at the speed of the link. `cuMemHostAlloc` would allocate only 3 GiB/s [H200].
//! Registered pages are allocated as fast as the kernel provides them.
//!
//! Rejected: host memory created with `cuMemCreate`, which could stay mapped at the addresses of
//! evicted chunks. Its creation takes four times as long, and no container limit applies to it. A
//! process that uses it cannot be restored from a checkpoint (`bench/RESULTS.md`).

use super::headroom::{Claim, addresses_left};
use crate::{
    driver::{self, context::current_or_null, types::SUCCESS},
    submit::{Work, captures, threads},
    sys::{
        sync::{Mutex, Rank},
        thread,
    },
};
use alloc::{sync::Arc, vec::Vec};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicU32, Ordering},
};
use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munlock, munmap},
};

/// The size of a huge page.
const HUGE: usize = 2 << 20;
/// Bytes whose pages are allocated between two checks of the host's free memory. Several programs
/// may find the same free memory at the same time. Each of their threads then allocates up to this
/// many bytes too many. The reserve of the cgroup absorbs these bytes.
const PIECE: usize = 16 << 20;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: all contexts and kernels can use the
/// memory.
const REGISTER_FLAGS: u32 = 1 | 2;

/// The host buffer of one chunk. Dropping an unregistered buffer frees its memory. A registered buffer
/// must be passed to the [`waiter`](super::waiter) instead.
#[derive(Debug)]
pub struct Buffer {
    address: usize,
    len: usize,
    /// The context in which the buffer is registered; 0 for none.
    registered: usize,
}

impl Buffer {
    /// Allocates a buffer of `len` bytes with all its pages. Returns `None` if the host has no room.
    pub fn new(len: u64) -> Option<Self> {
        Self::reserve(&[len])?.pop().filter(Self::fill)
    }

    /// Reserves buffers of these sizes without pages. One mapping serves all buffers, because creating a
    /// mapping blocks threads that allocate pages. If the address limit rules out one mapping, uses several
    /// mappings and may return fewer buffers.
    fn reserve_some(sizes: &[u64]) -> Vec<Self> {
        Self::reserve(sizes)
            .unwrap_or_else(|| sizes.iter().map_while(|size| Self::reserve(&[*size])).flatten().collect())
    }

    /// Reserves buffers of these sizes without pages, from one mapping.
    fn reserve(sizes: &[u64]) -> Option<Vec<Self>> {
        let len = usize::try_from(sizes.iter().sum::<u64>()).ok()?;
        let whole = len.checked_add(HUGE).filter(|whole| *whole as u64 <= addresses_left())?;
        // SAFETY: the mapping is new and anonymous. Unmapping its ends aligns it to huge pages, and the other
        // calls apply to the rest.
        let start = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let map = mmap_anonymous(core::ptr::null_mut(), whole, ProtFlags::empty(), flags).ok()?;
            let start = (map as usize).next_multiple_of(HUGE);
            for (at, end) in [(map as usize, start), (start + len, map as usize + whole)] {
                if at < end {
                    let _ = munmap(at as *mut c_void, end - at);
                }
            }
            // After `mlockall`, the kernel would allocate all pages of a mapping when it becomes writable, even if
            // the host lacks memory.
            let _ = munlock(start as *mut c_void, len);
            if mprotect(start as *mut c_void, len, MprotectFlags::READ | MprotectFlags::WRITE).is_err() {
                let _ = munmap(start as *mut c_void, len);
                return None;
            }
            // The advice precedes the first access, so that child processes and core files contain
            // no copy.
            for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump, Advice::LinuxHugepage] {
                let _ = madvise(start as *mut c_void, len, advice);
            }
            start
        };
        let mut at = start;
        let buffers = sizes.iter().map(|len| {
            let buffer = Self { address: at, len: *len as usize, registered: 0 };
            at += buffer.len;
            buffer
        });
        Some(buffers.collect())
    }

    /// Allocates the pages. Returns `false` if the host has no room for them.
    fn fill(&self) -> bool {
        (0..self.len).step_by(PIECE).all(|at| self.fill_piece(at, PIECE.min(self.len - at)))
    }

    fn fill_piece(&self, at: usize, len: usize) -> bool {
        // The claim is made for each piece, because other processes may have allocated memory since
        // the last claim.
        let Some(_claim) = Claim::new(len as u64) else { return false };
        // SAFETY: the memory belongs to this buffer and is not in use yet.
        unsafe {
            let address = self.address().byte_add(at);
            match madvise(address, len, Advice::LinuxPopulateWrite) {
                Ok(()) => true,
                // Before Linux 5.14.
                Err(Errno::INVAL) => {
                    (0..len).step_by(4096).for_each(|at| address.cast::<u8>().add(at).write_volatile(0));
                    true
                }
                Err(_) => false,
            }
        }
    }

    /// Registers the buffer in the current context, so that copies are asynchronous and fast. If
    /// registration fails, copies still work, but slower.
    pub fn register(&mut self, context: usize) {
        if self.registered == 0 {
            // SAFETY: the memory belongs to this buffer and stays mapped until it is unregistered.
            let result = captures::beside(|_| unsafe {
                driver::cuMemHostRegister_v2(self.address as *mut c_void, self.len, REGISTER_FLAGS)
            });
            if result == SUCCESS {
                self.registered = context;
            }
        }
    }

    /// Unregisters the buffer, so that the kernel can page its memory out again. The context in which the
    /// buffer is registered must be current, and the caller ensures that no capture is invalidated. The
    /// driver may wait for running work.
    pub fn unregister(&mut self) {
        if core::mem::take(&mut self.registered) != 0 {
            // SAFETY: the buffer is registered, and no copy uses it.
            unsafe { driver::cuMemHostUnregister(self.address as *mut c_void) };
        }
    }

    /// The context in which the buffer is registered.
    pub fn registration(&self) -> Option<usize> {
        (self.registered != 0).then_some(self.registered)
    }

    /// Marks the buffer as unregistered if it was registered in this context, which no longer exists.
    pub fn forget_context(&mut self, context: usize) {
        if self.registered == context {
            self.forget_registration();
        }
    }

    /// Marks the buffer as unregistered, because the context in which it was registered no longer exists.
    pub fn forget_registration(&mut self) {
        self.registered = 0;
    }

    pub fn address(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    /// The contents. No copy may write to the buffer during the borrow.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the whole buffer is mapped, and zeroed until a copy writes to it. The caller ensures that no
        // copy writes to the buffer now.
        unsafe { core::slice::from_raw_parts(self.address as *const u8, self.len) }
    }

    /// The contents, for writing. No copy may use the buffer during the borrow.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: the whole buffer is mapped, and `self` is borrowed exclusively. The caller ensures that no
        // copy uses the buffer.
        unsafe { core::slice::from_raw_parts_mut(self.address as *mut u8, self.len) }
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        debug_assert!(self.registered == 0, "dropping a staging buffer that is registered with the driver");
        if self.registered != 0 {
            return; // the driver would copy to any memory that reuses the address
        }
        // SAFETY: no copy uses the buffer, because buffers are dropped after their copies are done.
        let _ = unsafe { munmap(self.address as *mut c_void, self.len) };
    }
}

/// Allocates buffers on several threads, because most of the time is spent on page faults. Each buffer
/// can be taken as soon as its pages are allocated.
///
/// A thread's first driver call may wait for the dynamic loader's lock. Another thread holds that
/// lock while it runs a library's constructors, perhaps until this eviction is over. Therefore the
/// eviction does not wait for threads that are still in their first driver call:
/// [`take`](Self::take) allocates a buffer itself instead.
#[derive(Debug)]
pub struct StagingAllocator(Arc<Queue>);

/// The result of [`StagingAllocator::take`].
#[derive(Debug)]
pub enum Taken {
    Buffer(Buffer),
    /// Other threads are still allocating buffers.
    Later,
    /// The host has no room, or no buffer of the caller's size was requested.
    Nothing,
}

#[derive(Debug)]
struct Queue {
    context: usize,
    work: &'static Work,
    /// Threads that have not ended.
    workers: AtomicU32,
    state: Mutex<BufferState>,
}

#[derive(Debug)]
struct BufferState {
    /// Buffers without pages. The last one is needed first.
    unfilled: Vec<Buffer>,
    /// The number of buffers whose pages threads are allocating.
    filling: usize,
    filled: Vec<Buffer>,
}

impl StagingAllocator {
    /// Starts at most `workers` threads. They allocate buffers of these sizes and register them in
    /// `context`, until the host has no room.
    pub fn start(sizes: &[u64], context: usize, work: &'static Work, workers: usize) -> Self {
        let mut unfilled = Buffer::reserve_some(sizes);
        unfilled.reverse();
        let state = BufferState { unfilled, filling: 0, filled: Vec::new() };
        let state = Mutex::new(Rank::StagingBuffers, state);
        let queue = Arc::new(Queue { context, work, workers: AtomicU32::new(0), state });
        for _ in 0..thread::cpus().min(workers).min(sizes.len()) {
            queue.workers.fetch_add(1, Ordering::SeqCst);
            let worker = queue.clone();
            if !threads::spawn(c"nvshare-host", move || worker.run()) {
                queue.workers.fetch_sub(1, Ordering::SeqCst);
            }
        }
        Self(queue)
    }

    /// Takes a buffer of `len` bytes with its pages: a finished buffer, or a new buffer if no thread is
    /// allocating.
    pub fn take(&self, len: u64) -> Taken {
        let mut state = self.0.state.lock();
        if let Some(at) = state.filled.iter().position(|buffer| buffer.len() == len) {
            return Taken::Buffer(state.filled.swap_remove(at));
        }
        if state.filling > 0 {
            return Taken::Later;
        }
        let Some(at) = state.unfilled.iter().rposition(|buffer| buffer.len() == len) else { return Taken::Nothing };
        let buffer = state.unfilled.remove(at);
        drop(state);
        if self.0.fill(&buffer) { Taken::Buffer(buffer) } else { Taken::Nothing }
    }

    /// Whether all threads have stopped allocating: all buffers are finished, the host has no room, or no
    /// thread could allocate.
    pub fn is_done(&self) -> bool {
        let state = self.0.state.lock();
        self.0.workers.load(Ordering::SeqCst) == 0 || (state.unfilled.is_empty() && state.filling == 0)
    }

    /// Stops the allocation of buffers. Buffers that are already being allocated are finished.
    pub fn stop(&self) {
        self.0.stop();
    }

    /// Takes all finished buffers.
    pub fn rest(&self) -> Vec<Buffer> {
        core::mem::take(&mut self.0.state.lock().filled)
    }
}

impl Queue {
    fn run(&self) {
        // This first driver call may wait. The thread has not yet taken a buffer or entered a context.
        let _ = current_or_null();
        while let Some(mut buffer) = self.next() {
            let filled = self.fill(&buffer);
            if filled {
                // `enter` refuses a context that is being destroyed. The buffer then stays unregistered.
                let _ = self.work.enter(self.context, || buffer.register(self.context));
            }
            let mut state = self.state.lock();
            state.filling -= 1;
            state.filled.extend(filled.then_some(buffer));
        }
        self.workers.fetch_sub(1, Ordering::SeqCst);
    }

    fn next(&self) -> Option<Buffer> {
        let mut state = self.state.lock();
        let buffer = state.unfilled.pop()?;
        state.filling += 1;
        Some(buffer)
    }

    /// Allocates the pages of a buffer. If the host has no room for them, stops the allocation of all other
    /// buffers too.
    fn fill(&self, buffer: &Buffer) -> bool {
        let filled = buffer.fill();
        if !filled {
            self.stop();
        }
        filled
    }

    fn stop(&self) {
        let unfilled = core::mem::take(&mut self.state.lock().unfilled);
        drop(unfilled); // not under the lock, because unmapping takes long
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static WORK: Work = Work::new();

    /// The thread that allocates buffers waits in its first driver call, for example because the program
    /// destroys a context while the program's thread holds the dynamic loader's lock.
    #[test]
    fn a_thread_in_its_first_driver_call_delays_no_eviction_and_no_end_of_a_context() {
        let unfilled = Buffer::reserve_some(&[1 << 20; 2]);
        let state = Mutex::new(Rank::StagingBuffers, BufferState { unfilled, filling: 0, filled: Vec::new() });
        let queue = Arc::new(Queue { context: 0, work: &WORK, workers: AtomicU32::new(1), state });
        let staging = StagingAllocator(queue);
        assert!(!staging.is_done());
        assert!(matches!(staging.take(1 << 20), Taken::Buffer(_)), "the caller allocates the pages itself");
        staging.stop();
        assert!(staging.is_done() && staging.rest().is_empty());
        assert!(matches!(staging.take(1 << 20), Taken::Nothing));
    }
}
