//! How many bytes have moved between each GPU and the host, whoever moved them, and the time that this takes of the host's
//! memory. One file of counters, which all processes map.

use crate::{Config, EngineKind, MAX_GPUS, lock::open_shared, place::place};
use std::{
    io,
    os::fd::AsRawFd,
    ptr,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::Duration,
};

#[derive(Debug)]
struct Counters {
    /// For each GPU, in and out.
    moved: [[AtomicU64; 2]; MAX_GPUS],
    /// Until when the host's memory is busy with copies, in nanoseconds of `CLOCK_MONOTONIC`.
    host_busy_until: AtomicU64,
}

/// Copies are as long as that late, since sleeping is not more precise; what is short adds up.
const NEGLIGIBLE: u64 = 200_000;

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
    add_at(place(gpu), engine, bytes);
}

/// The same by the GPU's number in the machine.
pub(crate) fn add_at(gpu: usize, engine: EngineKind, bytes: u64) {
    let way = match engine {
        EngineKind::In => 0,
        EngineKind::Out => 1,
        EngineKind::Compute => return,
    };
    if let Some(counters) = counters() {
        counters.moved[gpu][way].fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Waits until the host's memory has done its part of a copy of so many bytes, in turn with those of all other processes
/// and directions.
pub fn wait_for_host(bytes: u64) {
    let bandwidth = Config::get().host_bandwidth;
    let Some(counters) = counters().filter(|_| bandwidth > 0) else { return };
    let time = (u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth)) as u64;
    let now = monotonic();
    let after = |busy_until: u64| Some(busy_until.max(now).saturating_add(time));
    let before = counters.host_busy_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).unwrap_or(now);
    let left = before.max(now).saturating_add(time) - now;
    if left > NEGLIGIBLE {
        thread::sleep(Duration::from_nanos(left));
    }
}

fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

/// Bytes that have moved to a GPU of the machine, and from it.
pub fn moved(gpu: usize) -> [u64; 2] {
    counters().map_or([0; 2], |counters| [0, 1].map(|way| counters.moved[gpu][way].load(Ordering::Relaxed)))
}
