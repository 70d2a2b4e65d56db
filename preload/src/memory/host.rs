//! Host memory that chunks are copied to: anonymous huge pages, registered with the driver so that copies run at the
//! link's speed. `cuMemHostAlloc` makes 3 GiB/s of such memory, this way 8 threads make more than 20 [H200].

use crate::{
    capture, driver, futex,
    sys::{file, sync::Mutex, thread},
};
use alloc::{sync::Arc, vec::Vec};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use rustix::{
    io::Errno,
    mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap},
};

/// Left to the host whatever happens: below it nothing more is swapped out.
const HOST_RESERVE: u64 = 512 << 20;
/// Threads that make buffers: more do not make them faster [H200].
const MAKERS: usize = 8;

/// One chunk's buffer. Its memory is given back when dropped.
#[derive(Debug)]
pub struct Buffer {
    address: usize,
    len: usize,
    registered: bool,
}

impl Buffer {
    /// A buffer of that many bytes, its pages there already; `None` if the host has no room for it.
    pub fn new(len: u64) -> Option<Self> {
        if available() < len.saturating_add(HOST_RESERVE) {
            return None;
        }
        let len = usize::try_from(len).ok()?;
        // SAFETY: a new anonymous mapping, advice on it, and writes to it.
        unsafe {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let address = mmap_anonymous(core::ptr::null_mut(), len, protection, MapFlags::PRIVATE).ok()?;
            let buffer = Self { address: address as usize, len, registered: false };
            // Before the first touch: a child must not copy it, a core file not hold it.
            for advice in [Advice::LinuxDontFork, Advice::LinuxDontDump, Advice::LinuxHugepage] {
                let _ = madvise(address, len, advice);
            }
            match madvise(address, len, Advice::LinuxPopulateWrite) {
                Ok(()) => {}
                // Before Linux 5.14.
                Err(Errno::INVAL) => {
                    (0..len).step_by(4096).for_each(|at| address.cast::<u8>().add(at).write_volatile(0))
                }
                Err(_) => return None,
            }
            Some(buffer)
        }
    }

    /// Makes copies to and from it asynchronous and fast. Not being able to only makes them slower. Needs a context.
    pub fn register(&mut self) {
        if !self.registered {
            // SAFETY: memory of ours that stays mapped until unregistered.
            let result =
                capture::beside(|_| unsafe { driver::cuMemHostRegister_v2(self.address as *mut c_void, self.len, 0) });
            self.registered = result == crate::cuda::SUCCESS;
        }
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
        // SAFETY: nothing copies to it any more: buffers are dropped after their copies are done.
        unsafe {
            if self.registered {
                capture::beside(|_| driver::cuMemHostUnregister(self.address as *mut c_void));
            }
            let _ = munmap(self.address as *mut c_void, self.len);
        }
    }
}

/// What the kernel says can be used without swapping, in bytes; everything if it does not say.
fn available() -> u64 {
    let text = file::read(c"/proc/meminfo");
    let mut lines = text.split(|b| *b == b'\n');
    let kib = lines.find_map(|line| line.strip_prefix(b"MemAvailable:")).and_then(|line| {
        let digits = line.trim_ascii_start().split(|b| *b == b' ').next()?;
        core::str::from_utf8(digits).ok()?.parse::<u64>().ok()
    });
    kib.map_or(u64::MAX, |kib| kib * 1024)
}

/// Buffers of these sizes, made by several threads at once: touching pages is what takes the time. As many as the host
/// has room for.
pub fn make(sizes: Vec<u64>) -> Vec<Buffer> {
    let threads = thread::cpus().min(MAKERS).min(sizes.len());
    let workshop =
        Arc::new(Workshop { missing: Mutex::new(sizes), made: Mutex::new(Vec::new()), busy: AtomicU32::new(0) });
    // This thread is one of them, so it works without any other.
    for _ in 1..threads {
        workshop.busy.fetch_add(1, Ordering::SeqCst);
        let shared = workshop.clone();
        let started = thread::spawn(c"nvshare-host", move || {
            shared.make();
            shared.leave();
        });
        if !started {
            workshop.leave();
        }
    }
    workshop.make();
    loop {
        match workshop.busy.load(Ordering::SeqCst) {
            0 => break,
            busy => futex::wait(&workshop.busy, busy, Duration::from_secs(1)),
        }
    }
    core::mem::take(&mut workshop.made.lock())
}

/// Where several threads make buffers.
struct Workshop {
    missing: Mutex<Vec<u64>>,
    made: Mutex<Vec<Buffer>>,
    /// Threads that are at it.
    busy: AtomicU32,
}

impl Workshop {
    fn make(&self) {
        loop {
            let Some(len) = self.missing.lock().pop() else { return };
            match Buffer::new(len) {
                Some(buffer) => self.made.lock().push(buffer),
                None => self.missing.lock().clear(), // the host has no room for more
            }
        }
    }

    fn leave(&self) {
        self.busy.fetch_sub(1, Ordering::SeqCst);
        futex::wake_all(&self.busy);
    }
}
