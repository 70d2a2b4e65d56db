//! File descriptors: their limit, a spare descriptor for when the limit is reached, and their registration
//! with the runtime.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::unix::AsyncFd;

use super::socket;

/// Registers a non-blocking descriptor with the runtime of this thread.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` stays open and refers to the same file until it is dropped.
    unsafe { AsyncFd::register(fd) }.map_err(|e| e.into_parts().1)
}

/// Makes a descriptor that another process created non-blocking and close-on-exec.
pub fn prepare(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    Ok(rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?)
}

/// Raises the limit of open descriptors to the hard limit: each client needs two.
pub fn raise_limit() -> io::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
}

/// A reserved descriptor, for accepting and refusing a connection when no others are left.
#[derive(Debug)]
pub struct Spare(Option<OwnedFd>);

impl Spare {
    pub fn new() -> Self {
        Self(File::open("/dev/null").ok().map(OwnedFd::from))
    }

    /// Accepts one connection with the reserve. The caller drops it, then calls [`refill`](Self::refill).
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
