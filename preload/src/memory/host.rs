//! Host memory that chunks are copied to: anonymous huge pages, registered with the driver so that copies run at the
//! link's speed. `cuMemHostAlloc` makes 3 GiB/s of such memory, this way 8 threads make more than 20 [H200].

use crate::{capture, driver};
use core::ffi::c_void;

/// Left to the host whatever happens: below it nothing more is swapped out.
const HOST_RESERVE: u64 = 512 << 20;
/// `MADV_POPULATE_WRITE` (Linux 5.14).
const MADV_POPULATE_WRITE: libc::c_int = 23;

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
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let address = libc::mmap(core::ptr::null_mut(), len, protection, flags, -1, 0);
            if address == libc::MAP_FAILED {
                return None;
            }
            // Before the first touch: a child must not copy it, a core file not hold it.
            libc::madvise(address, len, libc::MADV_DONTFORK);
            libc::madvise(address, len, libc::MADV_DONTDUMP);
            libc::madvise(address, len, libc::MADV_HUGEPAGE);
            if libc::madvise(address, len, MADV_POPULATE_WRITE) != 0 {
                match *libc::__errno_location() {
                    libc::EINVAL => {
                        (0..len).step_by(4096).for_each(|at| address.cast::<u8>().add(at).write_volatile(0))
                    }
                    _ => {
                        libc::munmap(address, len);
                        return None;
                    }
                }
            }
            Some(Self { address: address as usize, len, registered: false })
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
            libc::munmap(self.address as *mut c_void, self.len);
        }
    }
}

/// What the kernel says can be used without swapping, in bytes; everything if it does not say.
fn available() -> u64 {
    let Ok(text) = std::fs::read_to_string("/proc/meminfo") else { return u64::MAX };
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"));
    line.and_then(|l| l.trim().split(' ').next()?.parse::<u64>().ok()).map_or(u64::MAX, |kib| kib * 1024)
}

/// Buffers of these sizes, made by several threads at once: touching pages is what takes the time. As many as the host
/// has room for, in order.
pub fn make(sizes: &[u64]) -> Vec<Buffer> {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(8).min(sizes.len());
    if threads <= 1 {
        return sizes.iter().map_while(|s| Buffer::new(*s)).collect();
    }
    std::thread::scope(|scope| {
        let makers: Vec<_> = sizes
            .chunks(sizes.len().div_ceil(threads))
            .map_while(|part| {
                let make = move || part.iter().map_while(|s| Buffer::new(*s)).collect::<Vec<_>>();
                std::thread::Builder::new().name("nvshare-host".into()).spawn_scoped(scope, make).ok()
            })
            .collect();
        makers.into_iter().filter_map(|m| m.join().ok()).flatten().collect()
    })
}
