//! Host memory that chunks are copied to: anonymous huge pages, registered with the driver so that copies run at the speed of
//! the link. `cuMemHostAlloc` allocates 3 GiB/s of such memory [H200]; this way it is as fast as the kernel provides pages.
//!
//! Chunks that `cuMemCreate` makes of host memory could stay mapped at the addresses of what was evicted. They take four times as long
//! to make, no limit of a container holds for them, and a process that has any cannot be restored from a checkpoint
//! (`bench/RESULTS.md`).

use super::headroom::Claim;
use crate::{
    driver::{self, context::with_current, types::SUCCESS},
    gate::threads,
    sys::{
        sync::{Mutex, Rank},
        thread,
    },
    work::capture,
};
use alloc::{sync::Arc, vec::Vec};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicU32, Ordering},
};
use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
};

/// The size of a huge page.
const HUGE: usize = 2 << 20;
/// `CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP`: for every context, and for kernels.
const REGISTER_FLAGS: u32 = 1 | 2;

/// The host buffer of one chunk. Dropping it frees the memory.
#[derive(Debug)]
pub struct Buffer {
    address: usize,
    len: usize,
    /// The context with which it is registered; 0 for none.
    registered: usize,
}

impl Buffer {
    /// A buffer of so many bytes with all its pages; `None` if the host has no room for it.
    pub fn new(len: u64) -> Option<Self> {
        Self::reserve(&[len])?.pop().filter(Self::fill)
    }

    /// Buffers of these sizes without pages, from one mapping. Creating a mapping makes threads wait that allocate pages.
    fn reserve(sizes: &[u64]) -> Option<Vec<Self>> {
        let len = usize::try_from(sizes.iter().sum::<u64>()).ok()?;
        let whole = len.checked_add(HUGE)?;
        // SAFETY: a new anonymous mapping, of which the ends go that make it begin where a huge page does; advice on it.
        let start = unsafe {
            let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
            let map = mmap_anonymous(core::ptr::null_mut(), whole, ProtFlags::READ | ProtFlags::WRITE, flags).ok()?;
            let start = (map as usize).next_multiple_of(HUGE);
            for (at, end) in [(map as usize, start), (start + len, map as usize + whole)] {
                if at < end {
                    let _ = munmap(at as *mut c_void, end - at);
                }
            }
            // Before the first touch: neither a child process nor a core file gets a copy.
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

    /// Allocates the pages; `false` if the host has no room for them.
    fn fill(&self) -> bool {
        // Checked here: other processes may have taken what was available a moment ago.
        let Some(_claim) = Claim::new(self.len()) else { return false };
        let address = self.address();
        // SAFETY: memory of ours that is not in use yet.
        unsafe {
            match madvise(address, self.len, Advice::LinuxPopulateWrite) {
                Ok(()) => true,
                // Before Linux 5.14.
                Err(Errno::INVAL) => {
                    (0..self.len).step_by(4096).for_each(|at| address.cast::<u8>().add(at).write_volatile(0));
                    true
                }
                Err(_) => false,
            }
        }
    }

    /// Registers it in the current context, so that copies are asynchronous and fast. Copies still work if that fails.
    pub fn register(&mut self, context: usize) {
        if self.registered == 0 {
            // SAFETY: memory of ours that stays mapped until unregistered.
            let result = capture::beside(|_| unsafe {
                driver::cuMemHostRegister_v2(self.address as *mut c_void, self.len, REGISTER_FLAGS)
            });
            if result == SUCCESS {
                self.registered = context;
            }
        }
    }

    /// Lets the kernel page it out again. Needs a current context, as dropping it does.
    pub fn unregister(&mut self) {
        if core::mem::take(&mut self.registered) != 0 {
            // SAFETY: registered, and nothing copies to it or from it.
            capture::beside(|_| unsafe { driver::cuMemHostUnregister(self.address as *mut c_void) });
        }
    }

    /// The context is gone, and the registration with it.
    pub fn forget_context(&mut self, context: usize) {
        if self.registered == context {
            self.registered = 0;
        }
    }

    pub fn is_registered(&self) -> bool {
        self.registered != 0
    }

    pub fn address(&self) -> *mut c_void {
        self.address as *mut c_void
    }

    pub fn len(&self) -> u64 {
        self.len as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.unregister();
        // SAFETY: nothing copies to it any more: buffers are dropped after their copies are done.
        let _ = unsafe { munmap(self.address as *mut c_void, self.len) };
    }
}

/// Allocates buffers on several threads, since most of the time goes into touching pages. Buffers are used as they come.
#[derive(Debug)]
pub struct StagingAllocator(Arc<Queue>);

#[derive(Debug)]
struct Queue {
    /// Buffers without pages. The last is needed first.
    unfilled: Mutex<Vec<Buffer>>,
    filled: Mutex<Vec<Buffer>>,
    context: usize,
    /// The number of running threads.
    busy: AtomicU32,
}

impl StagingAllocator {
    /// Allocates buffers of these sizes, registered with that context, as far as the host has room, on at most `workers`
    /// threads.
    pub fn start(sizes: &[u64], context: usize, workers: usize) -> Self {
        let mut unfilled = Buffer::reserve(sizes).unwrap_or_default();
        unfilled.reverse();
        let threads = thread::cpus().min(workers).min(sizes.len());
        let (unfilled, filled) =
            (Mutex::new(Rank::UnfilledBuffers, unfilled), Mutex::new(Rank::FilledBuffers, Vec::new()));
        let queue = Arc::new(Queue { unfilled, filled, context, busy: AtomicU32::new(0) });
        for _ in 0..threads {
            queue.busy.fetch_add(1, Ordering::SeqCst);
            let worker = queue.clone();
            if !threads::spawn(c"nvshare-host", move || worker.run()) {
                queue.busy.fetch_sub(1, Ordering::SeqCst);
            }
        }
        Self(queue)
    }

    /// A finished buffer of that size.
    pub fn take(&self, len: u64) -> Option<Buffer> {
        let mut filled = self.0.filled.lock();
        let at = filled.iter().position(|buffer| buffer.len() == len)?;
        Some(filled.swap_remove(at))
    }

    /// Whether more buffers will come.
    pub fn is_busy(&self) -> bool {
        self.0.busy.load(Ordering::SeqCst) > 0
    }

    /// Allocates no more than what has been started.
    pub fn stop(&self) {
        self.0.unfilled.lock().clear();
    }

    /// The finished buffers that have not been taken.
    pub fn rest(&self) -> Vec<Buffer> {
        core::mem::take(&mut self.0.filled.lock())
    }
}

impl Queue {
    fn run(&self) {
        loop {
            let Some(mut buffer) = self.unfilled.lock().pop() else { break };
            if !buffer.fill() {
                self.unfilled.lock().clear(); // the host has no room for more
                break;
            }
            let _ = with_current(self.context, || buffer.register(self.context));
            self.filled.lock().push(buffer);
        }
        self.busy.fetch_sub(1, Ordering::SeqCst);
    }
}
