//! File descriptors: their limit, a spare descriptor for when the limit is reached, and
//! registration with the runtime.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{LazyLock, Mutex, PoisonError};

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::unix::AsyncFd;

use super::foreign::Foreign;
use super::socket;

/// A descriptor that stays open, and refers to the same file, until it is dropped.
pub trait Owned: AsRawFd {}

impl Owned for OwnedFd {}
impl Owned for Foreign {}

/// Registers a non-blocking descriptor with this thread's runtime.
pub fn watch<T: Owned>(fd: T) -> io::Result<AsyncFd<T>> {
    // SAFETY: an `Owned` descriptor stays open and refers to the same file until it is dropped.
    unsafe { AsyncFd::register(fd) }.map_err(|e| e.into_parts().1)
}

/// Makes a descriptor from another process non-blocking and close-on-exec.
pub fn prepare(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    Ok(rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?)
}

/// The kernel's `TMPFS_MAGIC` and `RAMFS_MAGIC`.
const IN_MEMORY: [i64; 2] = [0x0102_1994, 0x8584_58f6];

/// Whether a descriptor refers to a file in RAM, such as a memfd.
pub fn is_in_memory(fd: impl AsFd) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|found| IN_MEMORY.contains(&found.f_type))
}

/// The reserved descriptor of [`read`].
static FOR_READING: LazyLock<Mutex<Spare>> = LazyLock::new(Mutex::default);

/// Raises the soft limit of open descriptors to the hard limit, because each client needs two
/// descriptors. Reserves the descriptor that [`read`] uses.
pub fn raise_limit() -> io::Result<()> {
    LazyLock::force(&FOR_READING);
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

/// Reads a file, even if the process has no other descriptors left.
pub fn read(path: &str) -> io::Result<String> {
    fs::read_to_string(path).or_else(|_| {
        let mut spare = FOR_READING.lock().unwrap_or_else(PoisonError::into_inner);
        spare.0 = None;
        let text = fs::read_to_string(path);
        spare.refill();
        text
    })
}

/// A reserved descriptor. If the process has no other descriptors left, [`Spare::accept`] closes
/// the reserved one in order to accept a connection, which the caller then refuses.
#[derive(Debug)]
pub struct Spare(Option<OwnedFd>);

impl Spare {
    pub fn new() -> Self {
        Self(File::open("/dev/null").ok().map(OwnedFd::from))
    }

    /// Accepts one connection with the reserved descriptor. The caller drops the connection and
    /// then calls [`refill`](Self::refill).
    pub fn accept(&mut self, listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        self.0 = None;
        socket::accept(listener)
    }

    pub fn refill(&mut self) {
        if self.0.is_none() {
            *self = Self::new();
        }
    }
}

impl Default for Spare {
    fn default() -> Self {
        Self::new()
    }
}
