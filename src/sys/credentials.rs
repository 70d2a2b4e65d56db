//! The identity of a socket's peer, as the kernel recorded it when the peer connected.
//!
//! This uses libc: rustix's `UCred` cannot hold the process id 0 of a peer in another PID namespace, and rustix has
//! neither `SO_PEERGROUPS` nor `SO_PEERPIDFD`.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// User, group and process. `pid` is 0 for a process that is not visible in this PID namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

/// The credentials of the process that connected.
pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let raw: libc::ucred = option(socket, libc::SO_PEERCRED)?;
    Ok(Credentials { pid: raw.pid, uid: raw.uid, gid: raw.gid })
}

/// The groups of the process that connected: its effective group `gid`, then its supplementary groups.
pub fn groups(socket: BorrowedFd<'_>, gid: u32) -> io::Result<Vec<u32>> {
    /// `NGROUPS_MAX` of Linux.
    const MAX_GROUPS: usize = 65536;
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut length = size_of_val(groups.as_slice()) as libc::socklen_t;
        let place = groups.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `length` bytes, all of them group ids.
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

/// `SO_PEERPIDFD`, since Linux 6.5. Some versions of the libc crate lack it.
const SO_PEERPIDFD: libc::c_int = 77;

/// A descriptor of the peer's process, which becomes readable when the process ends. `None` if the process has ended or
/// is not visible here.
///
/// # Errors
/// If no descriptors are left.
pub fn pidfd(socket: BorrowedFd<'_>, pid: i32) -> io::Result<Option<OwnedFd>> {
    match option::<libc::c_int>(socket, SO_PEERPIDFD) {
        // SAFETY: the kernel opened this descriptor for this call; it is close-on-exec already.
        Ok(fd) => return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => return Err(e),
        Err(_) => {} // an older kernel, or the process has ended
    }
    pidfd_of(pid)
}

/// A descriptor of the process that now has this pid. `None` if the process does not exist.
///
/// # Errors
/// If no descriptors are left.
pub fn pidfd_of(pid: i32) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = (pid > 0).then(|| Pid::from_raw(pid)).flatten() else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(e) if matches!(e, rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => Err(e.into()),
        Err(_) => Ok(None),
    }
}

/// True if the process of a descriptor has ended.
pub fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
    rustix::event::poll(&mut fds, Some(&Timespec::default())) != Ok(0)
}

fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes. T is an integer or a struct of integers in every use here.
    unsafe {
        let place = value.as_mut_ptr().cast();
        check(libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, place, &mut length))?;
        Ok(value.assume_init())
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
