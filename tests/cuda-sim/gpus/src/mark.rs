//! An event that processes share. A mapped file contains the number of the event's recordings, and
//! the number of the last recording that was reached.

use crate::{Config, lock::open_shared};
use std::{
    fs::{self, File},
    io,
    os::fd::AsRawFd,
    path::PathBuf,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

/// The counters of one event, as this process has mapped them.
#[derive(Debug)]
pub struct Mark {
    name: Name,
    counters: *mut [AtomicU64; 2],
    /// Whether this process created the file. The creator also removes it.
    owner: bool,
}

/// The name of an event for other processes: the ID of the process that created it, and the event's
/// number.
pub type Name = [u64; 2];

const LEN: usize = 16;

// SAFETY: the counters are atomic, and stay mapped while this object lives.
unsafe impl Send for Mark {}
// SAFETY: the counters are atomic, and stay mapped while this object lives.
unsafe impl Sync for Mark {}

impl Mark {
    pub fn new() -> io::Result<Mark> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let name = [u64::from(std::process::id()), NEXT.fetch_add(1, Ordering::Relaxed)];
        let file = open_shared(&path(name))?;
        file.set_len(0)?;
        file.set_len(LEN as u64)?;
        Mark::map(name, &file, true)
    }

    /// Opens an event that any process has created.
    pub fn open(name: Name) -> io::Result<Mark> {
        let file = File::options().read(true).write(true).open(path(name))?;
        Mark::map(name, &file, false)
    }

    fn map(name: Name, file: &File, owner: bool) -> io::Result<Mark> {
        // SAFETY: this is a new mapping at an address of the kernel's choice. Its file has at least
        // this length.
        let at = unsafe {
            libc::mmap(ptr::null_mut(), LEN, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED, file.as_raw_fd(), 0)
        };
        if at == libc::MAP_FAILED {
            Err(io::Error::last_os_error())
        } else {
            Ok(Mark { name, counters: at.cast(), owner })
        }
    }

    pub fn name(&self) -> Name {
        self.name
    }

    fn counters(&self) -> &[AtomicU64; 2] {
        // SAFETY: the counters are mapped while `self` lives.
        unsafe { &*self.counters }
    }

    /// Records the event, and returns the number of the recording.
    pub fn record(&self) -> u64 {
        self.counters()[0].fetch_add(1, Ordering::AcqRel) + 1
    }

    /// The number of the last recording, or 0 without one.
    pub fn last(&self) -> u64 {
        self.counters()[0].load(Ordering::Acquire)
    }

    /// Marks a recording and all earlier ones as reached.
    pub fn reach(&self, recording: u64) {
        self.counters()[1].fetch_max(recording, Ordering::AcqRel);
    }

    pub fn reached(&self, recording: u64) -> bool {
        self.counters()[1].load(Ordering::Acquire) >= recording
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        // SAFETY: `map` has mapped the counters, and no reference to them is left.
        unsafe { libc::munmap(self.counters.cast(), LEN) };
        if self.owner && self.name[0] == u64::from(std::process::id()) {
            let _ = fs::remove_file(path(self.name));
        }
    }
}

fn path([process, number]: Name) -> PathBuf {
    Config::get().dir.join("events").join(format!("{process}-{number}"))
}
