//! A lock between processes: `flock` on a file. It ends with its process, however that ends, and needs no permission but to
//! read the file; so it works through a mount that is read-only, and for several users.
//!
//! A child of a fork shares the lock, so it closes its copy ([`close_in_child`]). The program may close any descriptor: the
//! lock is then gone, and [`LockFile::is_intact`] says so.

use super::file::{Identity, InheritedDescriptor};
use core::{
    ffi::CStr,
    sync::atomic::{AtomicUsize, Ordering},
};
use rustix::{
    fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd},
    fs::{FileType, FlockOperation, Mode, OFlags, flock},
    io::{Errno, fcntl_dupfd_cloexec},
};

/// Out of the way of programs that count on getting the lowest numbers.
const LOWEST_DESCRIPTOR: RawFd = 400;
/// As many as there can be: three for each GPU.
const MOST: usize = 3 * nvshare_wire::MAX_SLOTS as usize;

static NAMES: [InheritedDescriptor; MOST] = [const { InheritedDescriptor::none() }; MOST];
/// How many of the names have ever been used.
static USED: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
pub struct LockFile {
    descriptor: RawFd,
    identity: Identity,
    name: &'static InheritedDescriptor,
}

/// How an attempt to take a lock went.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tried {
    Got,
    /// Another process has it.
    Taken,
    Failed,
}

impl LockFile {
    /// Opens the file of that name; `create`: or makes one that everybody may read.
    pub fn open(path: &CStr, create: bool) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let new = flags | OFlags::CREATE | OFlags::EXCL;
        let everybody = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::ROTH;
        // In a directory that everybody may write to, a file of somebody else's must not be opened to be created.
        let file = match rustix::fs::open(path, flags, Mode::empty()) {
            Err(Errno::NOENT) if create => match rustix::fs::open(path, new, everybody) {
                Ok(file) => {
                    let _ = rustix::fs::fchmod(&file, everybody); // whatever the program's umask is
                    Ok(file)
                }
                // Somebody was faster.
                Err(_) => rustix::fs::open(path, flags, Mode::empty()),
            },
            file => file,
        }
        .ok()?;
        let stat = rustix::fs::fstat(&file).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        let file = fcntl_dupfd_cloexec(&file, LOWEST_DESCRIPTOR).unwrap_or(file);
        let identity = Identity::of(&file)?;
        let name = free_name()?;
        name.set(Some((file.as_raw_fd(), identity)));
        Some(Self { descriptor: file.into_raw_fd(), identity, name })
    }

    fn get(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: it is open, and only borrowed for a call.
        self.identity.is(self.descriptor).then(|| unsafe { BorrowedFd::borrow_raw(self.descriptor) })
    }

    /// Whether the program has left it alone, and the name still means this file.
    pub fn is_intact(&self, path: &CStr) -> bool {
        let named = rustix::fs::lstat(path).map(|stat| (stat.st_dev, stat.st_ino));
        self.get().is_some_and(|file| rustix::fs::fstat(file).map(|stat| (stat.st_dev, stat.st_ino)) == named)
    }

    fn flock(&self, operation: FlockOperation) -> Tried {
        match self.get().map(|file| flock(file, operation)) {
            Some(Ok(())) => Tried::Got,
            Some(Err(Errno::WOULDBLOCK)) => Tried::Taken,
            _ => Tried::Failed,
        }
    }

    /// Takes it for this process alone, if nobody has it.
    pub fn take(&self) -> Tried {
        self.flock(FlockOperation::NonBlockingLockExclusive)
    }

    /// Takes it together with others.
    pub fn join(&self) -> Tried {
        self.flock(FlockOperation::NonBlockingLockShared)
    }

    pub fn leave(&self) {
        self.flock(FlockOperation::Unlock);
    }

    /// Whether another process has it. This one must not.
    pub fn is_taken(&self) -> bool {
        let tried = self.join(); // so that those who ask do not get in each other's way
        if tried == Tried::Got {
            self.leave();
        }
        tried == Tried::Taken
    }
}

impl Drop for LockFile {
    fn drop(&mut self) {
        self.name.set(None);
        if self.identity.is(self.descriptor) {
            // SAFETY: open, and ours.
            drop(unsafe { OwnedFd::from_raw_fd(self.descriptor) });
        }
    }
}

/// Only the client's thread opens and closes lock files.
fn free_name() -> Option<&'static InheritedDescriptor> {
    let (at, name) = NAMES.iter().enumerate().find(|(_, name)| name.get().is_none())?;
    USED.fetch_max(at + 1, Ordering::SeqCst);
    Some(name)
}

/// In the child of a fork.
pub fn close_in_child() {
    for name in NAMES.iter().take(USED.load(Ordering::SeqCst)) {
        if let Some((descriptor, identity)) = name.get()
            && identity.is(descriptor)
        {
            // SAFETY: the child's copy, which nothing in the child uses from here on.
            drop(unsafe { OwnedFd::from_raw_fd(descriptor) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{ffi::CString, format};

    #[test]
    fn one_takes_it_alone_or_many_together() {
        let path = CString::new(format!("/tmp/nvshare-lock-test-{}", std::process::id())).unwrap();
        assert!(LockFile::open(&path, false).is_none());
        let [a, b, c] = [(); 3].map(|()| LockFile::open(&path, true).expect("a file"));
        assert!(!a.is_taken());
        assert_eq!((a.take(), b.take(), b.join()), (Tried::Got, Tried::Taken, Tried::Taken));
        assert!(b.is_taken() && a.is_intact(&path));
        a.leave();
        assert_eq!((a.join(), b.join(), c.take()), (Tried::Got, Tried::Got, Tried::Taken));
        drop((a, b));
        assert_eq!(c.take(), Tried::Got);
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
        assert!(!c.is_intact(&path));
    }

    #[test]
    fn what_is_no_file_is_no_lock() {
        assert!(LockFile::open(c"/tmp", true).is_none());
        assert!(LockFile::open(c"/dev/null", true).is_none());
    }
}
