//! Leases on files (fcntl(2)).

use std::fs::File;
use std::os::fd::AsRawFd;

use libc::{EAGAIN, F_SETLEASE, F_UNLCK, F_WRLCK};

/// Returns true if any process has the file open through an open file description other than
/// `file`.
///
/// The file must belong to the calling user. Returns false on file systems that do not support
/// leases.
pub fn is_open_elsewhere(file: &File) -> bool {
    let set = |lease: libc::c_int| {
        // SAFETY: `file` is open, and F_SETLEASE takes an integer.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), F_SETLEASE, lease) };
        if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
    };
    let is_open = set(F_WRLCK).is_err_and(|e| e.raw_os_error() == Some(EAGAIN));
    // The lease was only a test. If this process kept the lease, the kernel would delay later opens
    // of the file.
    let _ = set(F_UNLCK);
    is_open
}
