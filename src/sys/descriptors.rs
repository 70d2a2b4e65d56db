//! File descriptors: their limit, a spare descriptor for when the limit is reached, and
//! registration with the runtime.

use std::fs::File;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::FdFlags;
use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::io::unix::AsyncFd;

use super::socket;

/// Registers a non-blocking descriptor with this thread's runtime.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` stays open and refers to the same file until it is dropped.
    unsafe { AsyncFd::register(fd) }.map_err(|e| e.into_parts().1)
}

/// Makes a descriptor from another process non-blocking and close-on-exec.
pub fn prepare(fd: BorrowedFd<'_>) -> io::Result<()> {
    let flags = rustix::fs::fcntl_getfl(fd)?;
    rustix::fs::fcntl_setfl(fd, flags | OFlags::NONBLOCK)?;
    Ok(rustix::io::fcntl_setfd(fd, FdFlags::CLOEXEC)?)
}

/// Raises the soft limit of open descriptors to the hard limit, because each client needs two
/// descriptors.
pub fn raise_limit() -> io::Result<()> {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    Ok(setrlimit(Resource::Nofile, limit)?)
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
