//! The host's memory bandwidth, which copies of all GPUs and processes share. The state of the
//! bandwidth is in a file that all processes map.

use crate::{Config, lock::open_shared};
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

/// The time until which the host's memory is busy with copies, in nanoseconds of `CLOCK_MONOTONIC`.
type BusyUntil = AtomicU64;

/// Delays below this, in nanoseconds, are accumulated, because sleeping is imprecise.
const NEGLIGIBLE: u64 = 200_000;

fn busy_until() -> Option<&'static BusyUntil> {
    static BUSY_UNTIL: OnceLock<Option<&'static BusyUntil>> = OnceLock::new();
    *BUSY_UNTIL.get_or_init(|| map().ok())
}

fn map() -> io::Result<&'static BusyUntil> {
    let len = size_of::<BusyUntil>();
    let file = open_shared(&Config::get().dir.join("host-link"))?;
    file.set_len(len as u64)?;
    // SAFETY: this is a fresh shared mapping, which is never unmapped. Its file is long enough and
    // never shrinks.
    unsafe {
        let at =
            libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0);
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(&*at.cast::<BusyUntil>()) }
    }
}

/// Waits until the host's memory has transferred `bytes` of a copy. Copies of all processes and
/// directions are transferred in order.
pub fn wait_for_host(bytes: u64) {
    let bandwidth = Config::get().host_bandwidth;
    let Some(busy_until) = busy_until().filter(|_| bandwidth > 0) else { return };
    let time = (u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth)) as u64;
    let now = monotonic();
    let after = |until: u64| Some(until.max(now).saturating_add(time));
    let before = busy_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, after).unwrap_or(now);
    let left = before.max(now).saturating_add(time) - now;
    if left > NEGLIGIBLE {
        thread::sleep(Duration::from_nanos(left));
    }
}

fn monotonic() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a live value. This clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
