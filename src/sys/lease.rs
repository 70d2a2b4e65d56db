//! Leases on files (fcntl(2)).

use std::fs::File;
use std::os::fd::AsRawFd;

use libc::{EAGAIN, F_SETLEASE, F_UNLCK, F_WRLCK};

/// Returns true if an open file description other than this one exists for the file, in any process.
///
/// The file must belong to the calling user. Returns false on file systems without leases, which cannot
/// tell.
pub fn is_open_elsewhere(file: &File) -> bool {
    let set = |lease: libc::c_int| {
        // SAFETY: `file` is open, and F_SETLEASE takes an integer.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), F_SETLEASE, lease) };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    let is_open = set(F_WRLCK).is_err_and(|e| e.raw_os_error() == Some(EAGAIN));
    // The lease is only a question. If it is not released, the kernel delays later opens of the file.
    let _ = set(F_UNLCK);
    is_open
}
