//! The identity of a socket's peer, as the kernel recorded it when the peer connected.
//!
//! This module uses libc, because rustix lacks three features. rustix's `UCred` cannot represent
//! process id 0, the pid of a peer in another PID namespace. rustix also lacks `SO_PEERGROUPS` and
//! `SO_PEERPIDFD`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// User, group and process. `pid` is 0 for a process that this PID namespace does not contain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// Returns the credentials of the process that connected.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let raw: libc::ucred = option(socket, libc::SO_PEERCRED)?;
    Ok(Credentials { pid: raw.pid, uid: raw.uid, gid: raw.gid })
}

/// Returns the groups of the process that connected: first its effective group `gid`, then its
/// supplementary groups.
pub fn groups(socket: BorrowedFd<'_>, gid: u32) -> io::Result<Vec<u32>> {
    /// Linux's `NGROUPS_MAX`.
    const MAX_GROUPS: usize = 65536;
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut length = size_of_val(groups.as_slice()) as libc::socklen_t;
        let place = groups.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `length` bytes, the size of `groups`, and any bytes are
        // valid group ids.
        let result =
            unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, place, &mut length) };
        match check(result) {
            Ok(()) => {
                groups.truncate(length as usize / size_of::<libc::gid_t>());
                groups.insert(0, gid);
                return Ok(groups);
            }
            Err(e) if e.raw_os_error() == Some(libc::ERANGE) && groups.len() < MAX_GROUPS => {
                groups.resize(MAX_GROUPS, 0);
            }
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => return Ok(vec![gid]), // before Linux 4.13
            Err(e) => return Err(e),
        }
    }
}

/// `SO_PEERPIDFD`. Linux supports the option since 6.5. Some versions of the libc crate lack the
/// constant.
const SO_PEERPIDFD: libc::c_int = 77;

/// Returns a pidfd of the peer's process. The pidfd becomes readable when the process ends. Returns
/// `None` if the process has ended or is in another PID namespace. Also returns true if the pidfd
/// surely belongs to the peer. On older kernels, another process may have reused the peer's PID.
///
/// # Errors
/// No file descriptors are left.
pub fn pidfd(socket: BorrowedFd<'_>, pid: i32) -> io::Result<(Option<OwnedFd>, bool)> {
    match option::<libc::c_int>(socket, SO_PEERPIDFD) {
        // SAFETY: the kernel opened this descriptor for this call, so no other value owns it. The
        // kernel also made it close-on-exec.
        Ok(fd) => return Ok((Some(unsafe { OwnedFd::from_raw_fd(fd) }), true)),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => return Err(e),
        Err(_) => {} // an older kernel, or the process has ended
    }
    Ok((pidfd_of(pid)?, false))
}

/// Returns a pidfd of the process that now has this pid. Returns `None` if no process has this pid.
///
/// # Errors
/// No file descriptors are left.
pub fn pidfd_of(pid: i32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = (pid > 0).then(|| Pid::from_raw(pid)).flatten() else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(e) if matches!(e, rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => Err(e.into()),
        Err(_) => Ok(None),
    }
}

/// Returns true if the process of a pidfd has ended.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())) != Ok(0)
}

fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes, which is the size of `T`. In every call of
    // this function, `T` is an integer or a struct of integers.
    unsafe {
        let place = value.as_mut_ptr().cast();
        check(libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, place, &mut length))?;
        Ok(value.assume_init())
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
