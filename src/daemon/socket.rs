//! The system calls around sockets: one listening socket that only one daemon can have, packets in and out, and what
//! the kernel says about a peer. Nothing here knows what a packet means.

use std::ffi::CString;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use nvshare_wire::MAX_DESCRIPTORS;
use tokio::io::unix::AsyncFd;

/// What kind of socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Packets: the clients' socket.
    Packets,
    /// A stream: the control socket, for D-Bus.
    Stream,
    /// A stream as well, which may be one of TCP.
    Metrics,
}

impl Kind {
    fn raw(self) -> libc::c_int {
        match self {
            Self::Packets => libc::SOCK_SEQPACKET,
            Self::Stream | Self::Metrics => libc::SOCK_STREAM,
        }
    }
}

/// Why a socket cannot be bound.
#[derive(Debug)]
pub enum BindError {
    /// Another daemon holds the lock file.
    Locked {
        path: PathBuf,
        pid: String,
    },
    /// Something that does not take the lock answers there.
    Answers {
        path: PathBuf,
    },
    /// There is a file of that name which is not a socket.
    NotASocket {
        path: PathBuf,
    },
    Os {
        what: &'static str,
        path: PathBuf,
        error: io::Error,
    },
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Locked { path, pid } => write!(
                f,
                "another nvshare-scheduler ({pid}) already serves {}: stop it first, or choose another path with --socket",
                path.display()
            ),
            Self::Answers { path } => write!(
                f,
                "another process already answers on {}: stop it first, or choose another path with --socket",
                path.display()
            ),
            Self::NotASocket { path } => {
                write!(f, "{} exists and is not a socket: move it away, or choose another path", path.display())
            }
            Self::Os { what, path, error } => write!(f, "cannot {what} {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for BindError {}

/// A listening socket that this process has bound, and removes when it is dropped.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    lock_path: PathBuf,
    /// Held for as long as the socket is ours.
    _lock: File,
    made_directory: Option<PathBuf>,
}

impl Bound {
    /// Whether the directory goes away with the socket.
    pub fn made_directory(&self) -> bool {
        self.made_directory.is_some()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        // The lock is still held, so nobody else's socket can be there.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.lock_path);
        if let Some(directory) = &self.made_directory {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Binds `path` and listens. A socket that a dead daemon left is taken over; one that is served is left alone.
///
/// Sets the process's umask for a moment: call it before there are other threads.
pub fn listen(path: &Path, kind: Kind, mode: u32) -> Result<(OwnedFd, Bound), BindError> {
    let os = |what, error| BindError::Os { what, path: path.into(), error };
    let made_directory = make_directory(path).map_err(|e| os("create the directory of", e))?;
    let lock_path = {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        PathBuf::from(name)
    };
    let lock = take_lock(&lock_path, path)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => return Err(BindError::NotASocket { path: path.into() }),
        Ok(_) => match connect(path, kind) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(|e| os("remove the stale socket", e))?;
            }
            // Connected, or somebody listens who is slow or speaks otherwise.
            _ => return Err(BindError::Answers { path: path.into() }),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(os("look at", e)),
    }
    let socket = new_socket(kind).map_err(|e| os("create a socket for", e))?;
    let (address, length) = address(path).map_err(|e| os("bind", e))?;
    // The mode is right from the first moment: it follows the umask at bind.
    // SAFETY: both calls only take values, and the address is a live sockaddr_un of that length.
    let bound = unsafe {
        let umask = libc::umask(!mode & 0o777);
        let rc = libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length);
        let result = check(rc);
        libc::umask(umask);
        result
    };
    bound.map_err(|e| os("bind", e))?;
    let bound = Bound { path: path.into(), lock_path, _lock: lock, made_directory };
    // SAFETY: a plain call on a descriptor that we own.
    check(unsafe { libc::listen(socket.as_raw_fd(), libc::SOMAXCONN) }).map_err(|e| os("listen on", e))?;
    Ok((socket, bound))
}

fn make_directory(path: &Path) -> io::Result<Option<PathBuf>> {
    let Some(directory) = path.parent().filter(|d| !d.as_os_str().is_empty() && !d.exists()) else { return Ok(None) };
    std::fs::create_dir_all(directory)?;
    Ok(Some(directory.into()))
}

/// Takes the lock file, or says who has it. The file is removed at the end by whoever holds it, so a lock counts only
/// if the file of that name is still the one that was locked.
fn take_lock(lock_path: &Path, path: &Path) -> Result<File, BindError> {
    let os = |error| BindError::Os { what: "open", path: lock_path.into(), error };
    loop {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(lock_path)
            .map_err(os)?;
        // SAFETY: a plain call on a descriptor that we own.
        let locked = check(unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) });
        if let Err(error) = locked {
            if error.kind() != io::ErrorKind::WouldBlock {
                return Err(os(error));
            }
            let mut pid = String::new();
            let _ = file.read_to_string(&mut pid);
            let pid = if pid.is_empty() { "starting now".into() } else { format!("process {}", pid.trim()) };
            return Err(BindError::Locked { path: path.into(), pid });
        }
        let ours = file.metadata().map_err(os)?;
        let named = std::fs::symlink_metadata(lock_path).ok();
        if named.is_some_and(|named| named.ino() == ours.ino() && named.dev() == ours.dev()) {
            let _ =
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
            return Ok(file);
        }
    }
}

/// Connects to a socket without waiting.
pub fn connect(path: &Path, kind: Kind) -> io::Result<OwnedFd> {
    let socket = new_socket(kind)?;
    let (address, length) = address(path)?;
    // SAFETY: the address is a live sockaddr_un of that length.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

fn new_socket(kind: Kind) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: the descriptor is new and nobody else's.
    unsafe {
        let fd = check(libc::socket(libc::AF_UNIX, kind.raw() | flags, 0))?;
        Ok(OwnedFd::from_raw_fd(fd))
    }
}

fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all zeros is a valid sockaddr_un.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = CString::new(path.as_os_str().as_bytes())?.into_bytes_with_nul();
    if bytes.len() > address.sun_path.len() {
        let most = address.sun_path.len() - 1;
        return Err(io::Error::other(format!(
            "the path of a socket has at most {most} bytes, this one {}",
            bytes.len() - 1
        )));
    }
    for (to, from) in address.sun_path.iter_mut().zip(&bytes) {
        *to = *from as libc::c_char;
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + bytes.len();
    Ok((address, length as libc::socklen_t))
}

/// The next connection, or `WouldBlock`.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no address is asked for; the descriptor is new and nobody else's.
    unsafe {
        let fd = libc::accept4(listener.as_raw_fd(), std::ptr::null_mut(), std::ptr::null_mut(), flags);
        Ok(OwnedFd::from_raw_fd(check(fd)?))
    }
}

/// Ends a connection for everybody who has it: both sides read the end.
pub fn hang_up(socket: BorrowedFd<'_>) {
    // SAFETY: a plain call on a descriptor that lives.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// Whether a socket that somebody gave us listens and is of that kind.
pub fn is_listening(socket: BorrowedFd<'_>, kind: Kind) -> bool {
    option::<libc::c_int>(socket, libc::SO_ACCEPTCONN).is_ok_and(|listens| listens == 1)
        && option::<libc::c_int>(socket, libc::SO_TYPE).is_ok_and(|raw| raw == kind.raw())
        && (is_local(socket) || (kind == Kind::Metrics && is_of_network(socket)))
}

/// Whether it is a socket of this host alone.
pub fn is_local(socket: BorrowedFd<'_>) -> bool {
    option::<libc::c_int>(socket, libc::SO_DOMAIN).is_ok_and(|domain| domain == libc::AF_UNIX)
}

fn is_of_network(socket: BorrowedFd<'_>) -> bool {
    let domain = option::<libc::c_int>(socket, libc::SO_DOMAIN);
    domain.is_ok_and(|domain| [libc::AF_INET, libc::AF_INET6].contains(&domain))
}

/// Makes a descriptor that somebody gave us non-blocking and close-on-exec.
pub fn prepare(fd: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: plain calls on a descriptor that lives.
    unsafe {
        let flags = check(libc::fcntl(fd.as_raw_fd(), libc::F_GETFL))?;
        check(libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, flags | libc::O_NONBLOCK))?;
        check(libc::fcntl(fd.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC))?;
    }
    Ok(())
}

/// Room for the descriptors of one packet; the kernel closes those beyond.
#[repr(C, align(8))]
struct Control([u8; 16 + 4 * MAX_DESCRIPTORS]);

/// Receives one packet and the descriptors that came with it. Returns its real length, which is more than the buffer's
/// where it was cut off; 0 is the end.
pub fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8], descriptors: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut control = Control([0; _]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: the kernel writes at most `buffer.len()` bytes, and as many of `control` as it has. With MSG_TRUNC the
    // result may be larger. The descriptors are new and nobody else's.
    unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        (message.msg_control, message.msg_controllen) = (control.0.as_mut_ptr().cast(), control.0.len() as _);
        let n = libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_TRUNC | libc::MSG_CMSG_CLOEXEC);
        let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
        let mut header = libc::CMSG_FIRSTHDR(&message);
        while let Some(found) = header.as_ref() {
            if (found.cmsg_level, found.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
                let count = (found.cmsg_len - libc::CMSG_LEN(0) as usize) / size_of::<libc::c_int>();
                descriptors.extend((0..count).map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())));
            }
            header = libc::CMSG_NXTHDR(&message, header);
        }
        Ok(n)
    }
}

/// Sends one packet, or says `WouldBlock`.
pub fn send(socket: BorrowedFd<'_>, packet: &[u8]) -> io::Result<()> {
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: the kernel reads `packet.len()` bytes.
    let n = unsafe { libc::send(socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), flags) };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Sends one packet with descriptors, or says `WouldBlock`.
pub fn send_with(socket: BorrowedFd<'_>, packet: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    if descriptors.is_empty() {
        return send(socket, packet);
    }
    let descriptors = descriptors.get(..MAX_DESCRIPTORS).unwrap_or(descriptors);
    let bytes = size_of_val(descriptors);
    let mut control = Control([0; _]);
    let mut part = libc::iovec { iov_base: packet.as_ptr().cast_mut().cast(), iov_len: packet.len() };
    // SAFETY: the kernel reads `packet.len()` bytes and the control message, which has room for so many descriptors.
    let n = unsafe {
        let mut message: libc::msghdr = std::mem::zeroed();
        (message.msg_iov, message.msg_iovlen) = (&raw mut part, 1);
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = libc::CMSG_SPACE(bytes as u32) as _;
        let header = &mut *libc::CMSG_FIRSTHDR(&message);
        (header.cmsg_level, header.cmsg_type) = (libc::SOL_SOCKET, libc::SCM_RIGHTS);
        header.cmsg_len = libc::CMSG_LEN(bytes as u32) as _;
        let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
        descriptors.iter().enumerate().for_each(|(i, fd)| data.add(i).write_unaligned(fd.as_raw_fd()));
        libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT)
    };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Two ends of one connection, for packets.
pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: room for two descriptors, which are ours alone once the call has succeeded.
    unsafe {
        if libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1])))
    }
}

/// Who connected, as the kernel remembers it. `pid` is 0 for a process that our PID namespace cannot see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    pub pid: i32,
    pub uid: u32,
    pub gid: u32,
}

pub fn credentials(socket: BorrowedFd<'_>) -> io::Result<Credentials> {
    let raw: libc::ucred = option(socket, libc::SO_PEERCRED)?;
    Ok(Credentials { pid: raw.pid, uid: raw.uid, gid: raw.gid })
}

/// All groups of the process that connected, the one it acts with first.
pub fn groups(socket: BorrowedFd<'_>, gid: u32) -> io::Result<Vec<u32>> {
    // As many as a process can be in.
    const MOST: usize = 65536;
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let mut length = size_of_val(groups.as_slice()) as libc::socklen_t;
        let place = groups.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most `length` bytes, all of them group ids.
        let result =
            unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERGROUPS, place, &mut length) };
        match check(result) {
            Ok(_) => {
                groups.truncate(length as usize / size_of::<libc::gid_t>());
                groups.insert(0, gid);
                return Ok(groups);
            }
            // Then `length` is what it takes.
            Err(e) if e.raw_os_error() == Some(libc::ERANGE) && groups.len() < MOST => groups.resize(MOST, 0),
            Err(e) if e.raw_os_error() == Some(libc::ENOPROTOOPT) => return Ok(vec![gid]), // before Linux 4.13
            Err(e) => return Err(e),
        }
    }
}

/// `SO_PEERPIDFD`, Linux 6.5; not in every libc crate yet.
const SO_PEERPIDFD: libc::c_int = 77;

/// A descriptor of the peer's process, readable once it has died. `None` where there is no such process to be seen.
pub fn pidfd(socket: BorrowedFd<'_>, pid: i32) -> io::Result<Option<OwnedFd>> {
    match option::<libc::c_int>(socket, SO_PEERPIDFD) {
        // SAFETY: the kernel made this descriptor for us; it is close-on-exec already.
        Ok(fd) => return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) })),
        Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => return Err(e),
        Err(_) => {} // an older kernel, or a process that is gone
    }
    if pid <= 0 {
        return Ok(None);
    }
    // SAFETY: a plain system call; the descriptor is new and nobody else's.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        match check(fd as libc::c_int) {
            Ok(fd) => Ok(Some(OwnedFd::from_raw_fd(fd))),
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => Err(e),
            Err(_) => Ok(None),
        }
    }
}

fn option<T>(socket: BorrowedFd<'_>, name: libc::c_int) -> io::Result<T> {
    let mut value = std::mem::MaybeUninit::<T>::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes. T is an integer or a struct of integers in every use here.
    unsafe {
        let place = value.as_mut_ptr().cast();
        check(libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, name, place, &mut length))?;
        Ok(value.assume_init())
    }
}

pub(super) fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}

/// A descriptor kept in reserve, given up to be able to accept (and refuse) when there are no others left.
#[derive(Debug)]
pub struct Spare(Option<OwnedFd>);

impl Spare {
    pub fn new() -> Self {
        Self(File::open("/dev/null").ok().map(OwnedFd::from))
    }

    /// Accepts one connection with the reserve. The caller drops it, then calls [`refill`](Self::refill).
    pub fn accept(&mut self, listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        self.0 = None;
        accept(listener)
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

/// Has the runtime watch a descriptor.
pub fn watch(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an OwnedFd is open and the same for as long as it lives.
    unsafe { AsyncFd::register(fd) }.map_err(|e| e.into_parts().1)
}

/// A timer of `CLOCK_MONOTONIC` with the kernel's precision; tokio's own has a millisecond's.
#[derive(Debug)]
pub struct Timer(AsyncFd<OwnedFd>);

impl Timer {
    pub fn new() -> io::Result<Self> {
        // SAFETY: a plain call; the descriptor is new and nobody else's.
        let fd = unsafe {
            let fd = libc::timerfd_create(libc::CLOCK_MONOTONIC, libc::TFD_NONBLOCK | libc::TFD_CLOEXEC);
            OwnedFd::from_raw_fd(check(fd)?)
        };
        watch(fd).map(Self)
    }

    /// Expires at that time, or never; what was set before is forgotten.
    pub fn set(&self, at: Option<Duration>) {
        // All zeros would disarm it, so a time of zero becomes the nanosecond after it.
        let (seconds, nanos) = at.map_or((0, 0), |at| (at.as_secs(), at.subsec_nanos().max(1)));
        let value = libc::timespec {
            tv_sec: libc::time_t::try_from(seconds).unwrap_or(libc::time_t::MAX),
            tv_nsec: nanos.into(),
        };
        let spec = libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
        // SAFETY: the spec lives through the call, and the old one is not asked for.
        let rc =
            unsafe { libc::timerfd_settime(self.0.as_raw_fd(), libc::TFD_TIMER_ABSTIME, &spec, std::ptr::null_mut()) };
        debug_assert_eq!(rc, 0);
    }

    /// Waits until it expires.
    pub async fn expired(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut count = [0u8; 8];
            // SAFETY: the kernel writes at most eight bytes.
            let read = ready.try_io(|fd| match unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), 8) } {
                n if n < 0 => Err(io::Error::last_os_error()),
                _ => Ok(()),
            });
            if let Ok(result) = read {
                return result;
            }
        }
    }
}

/// `CLOCK_MONOTONIC`.
pub fn now() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the kernel fills in the struct; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// As many descriptors as the hard limit allows: each client needs two.
pub fn raise_descriptor_limit() -> io::Result<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct lives through both calls.
    unsafe {
        check(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit))?;
        limit.rlim_cur = limit.rlim_max;
        check(libc::setrlimit(libc::RLIMIT_NOFILE, &limit))?;
    }
    Ok(limit.rlim_cur)
}
