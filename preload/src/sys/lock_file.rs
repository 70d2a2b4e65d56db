//! A lock between processes: `flock(2)` on a file. The kernel releases the lock when the process ends,
//! even if it is killed. The lock needs only read permission for the file, so it works on a read-only
//! mount, and between users.
//!
//! The child of a fork would share the lock, so the child closes its copy ([`Descriptor`]). If the
//! program closes the descriptor, the lock is released, and [`LockFile::is_open`] returns `false`.

use super::file::Descriptor;
use core::ffi::CStr;
use rustix::{
    fs::{FileType, FlockOperation, Mode, OFlags, flock},
    io::Errno,
};

#[derive(Debug)]
pub struct LockFile(Descriptor);

/// The outcome of an attempt to lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TryLock {
    Got,
    /// Another process holds the lock.
    Taken,
    Failed,
}

impl LockFile {
    /// Opens the file, if it exists.
    pub fn open(path: &CStr) -> Option<Self> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::empty()).ok()?;
        let stat = rustix::fs::fstat(&file).ok()?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return None;
        }
        Descriptor::new(file).map(Self)
    }

    /// Whether the descriptor still refers to the file. The program may have closed it.
    pub fn is_open(&self) -> bool {
        self.0.is_open()
    }

    fn flock(&self, operation: FlockOperation) -> TryLock {
        match self.0.get().map(|file| flock(file, operation)) {
            Some(Ok(())) => TryLock::Got,
            Some(Err(Errno::WOULDBLOCK)) => TryLock::Taken,
            _ => TryLock::Failed,
        }
    }

    /// Locks the file exclusively. A shared lock of this process is lost, even if the attempt fails.
    pub fn lock_exclusive(&self) -> TryLock {
        self.flock(FlockOperation::NonBlockingLockExclusive)
    }

    /// Locks the file in shared mode.
    pub fn lock_shared(&self) -> TryLock {
        self.flock(FlockOperation::NonBlockingLockShared)
    }

    pub fn unlock(&self) {
        self.flock(FlockOperation::Unlock);
    }

    /// Whether another process has locked the file exclusively. This process must not hold a lock on it.
    pub fn is_taken(&self) -> bool {
        let tried = self.lock_shared(); // shared, so that concurrent checks do not disturb each other
        if tried == TryLock::Got {
            self.unlock();
        }
        tried == TryLock::Taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{ffi::CString, format};

    #[test]
    fn a_lock_is_exclusive_or_shared() {
        let path = CString::new(format!("/tmp/nvshare-lock-test-{}", std::process::id())).unwrap();
        assert!(LockFile::open(&path).is_none());
        std::fs::write(path.to_str().unwrap(), "").unwrap();
        let [a, b, c] = [(); 3].map(|()| LockFile::open(&path).expect("a file"));
        assert!(!a.is_taken());
        assert_eq!(
            (a.lock_exclusive(), b.lock_exclusive(), b.lock_shared()),
            (TryLock::Got, TryLock::Taken, TryLock::Taken)
        );
        assert!(b.is_taken() && a.is_open());
        a.unlock();
        assert_eq!(
            (a.lock_shared(), b.lock_shared(), c.lock_exclusive()),
            (TryLock::Got, TryLock::Got, TryLock::Taken)
        );
        drop((a, b));
        assert_eq!(c.lock_exclusive(), TryLock::Got);
        std::fs::remove_file(path.to_str().unwrap()).unwrap();
    }

    #[test]
    fn only_regular_files_can_be_locked() {
        assert!(LockFile::open(c"/tmp").is_none());
        assert!(LockFile::open(c"/dev/null").is_none());
    }
}
