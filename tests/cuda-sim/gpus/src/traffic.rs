//! How many bytes have moved between each GPU and the host, whoever moved them. One file of counters, which all processes
//! map.

use crate::{Config, EngineKind, MAX_GPUS, lock::open_shared};
use std::{
    io,
    os::fd::AsRawFd,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
};

/// For each GPU, in and out.
type Counters = [[AtomicU64; 2]; MAX_GPUS];

fn counters() -> Option<&'static Counters> {
    static COUNTERS: OnceLock<Option<&'static Counters>> = OnceLock::new();
    *COUNTERS.get_or_init(|| map().ok())
}

fn map() -> io::Result<&'static Counters> {
    let len = size_of::<Counters>();
    let file = open_shared(&Config::get().dir.join("traffic"))?;
    file.set_len(len as u64)?;
    // SAFETY: a fresh shared mapping of a file that is long enough and never shrinks; it is never unmapped.
    unsafe {
        let at =
            libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(&*at.cast::<Counters>()) }
    }
}

/// Counts what an engine moves. What is computed is no traffic.
pub fn add(gpu: usize, engine: EngineKind, bytes: u64) {
    let way = match engine {
        EngineKind::In => 0,
        EngineKind::Out => 1,
        EngineKind::Compute => return,
    };
    if let Some(counters) = counters() {
        counters[gpu][way].fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Bytes that have moved to a GPU, and from it.
pub fn moved(gpu: usize) -> [u64; 2] {
    counters().map_or([0; 2], |counters| [0, 1].map(|way| counters[gpu][way].load(Ordering::Relaxed)))
}
