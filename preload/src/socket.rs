//! The client's end of the scheduler's `SOCK_SEQPACKET` socket: connecting, waiting, receiving.

use core::{ffi::c_int, mem};
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage};
use std::{
    os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
    os::unix::ffi::OsStrExt,
    path::Path,
    time::Duration,
};

/// How long a scheduler may take to answer a `Hello`. One that is stopped must not stop a program.
const ANSWER: Duration = Duration::from_secs(2);

/// Connects and shakes hands: the socket, the agreed version and this client's id.
pub fn connect(path: &Path, hello: &ClientMessage) -> Result<(OwnedFd, u16, u64), String> {
    let flags = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: takes no pointers; a descriptor that is not negative is ours.
    let socket = unsafe {
        match libc::socket(libc::AF_UNIX, flags, 0) {
            fd if fd >= 0 => OwnedFd::from_raw_fd(fd),
            _ => return Err(last_error()),
        }
    };
    // SAFETY: all zeros is a valid address.
    let mut address: libc::sockaddr_un = unsafe { mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() {
        return Err("the path is too long for a socket".into());
    }
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = *from as _;
    }
    let len = mem::size_of_val(&address) as libc::socklen_t;
    // SAFETY: a valid address.
    if unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
        return Err(last_error());
    }
    let packet = hello.encode(0);
    let packet = packet.as_bytes();
    // SAFETY: a valid buffer.
    if unsafe { libc::send(socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), libc::MSG_NOSIGNAL) } < 0 {
        return Err(last_error());
    }
    wait(&[socket.as_raw_fd(), -1], ANSWER);
    match receive(socket.as_raw_fd(), 0)? {
        Some(SchedulerMessage::Welcome { version, client }) => Ok((socket, version, client)),
        Some(SchedulerMessage::Refused { text, .. }) => Err(format!("it refuses: {}", text.as_str())),
        Some(_) => Err("it answers with something else".into()),
        None => Err("it does not answer".into()),
    }
}

/// Sleeps until there is something to receive on one of them, at most so long; says on which. Descriptors may be -1.
pub fn wait(descriptors: &[RawFd; 2], timeout: Duration) -> [bool; 2] {
    let mut poll = descriptors.map(|fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 });
    let timeout = libc::timespec {
        tv_sec: timeout.as_secs().min(86_400) as libc::time_t,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    // SAFETY: valid entries and a valid time.
    unsafe { libc::ppoll(poll.as_mut_ptr(), poll.len() as libc::nfds_t, &timeout, core::ptr::null()) };
    poll.map(|p| p.revents != 0)
}

/// The next message, if one is there. An error means that the connection is of no more use.
pub fn receive(descriptor: RawFd, version: u16) -> Result<Option<SchedulerMessage>, String> {
    let mut buffer = [0u8; MAX_LEN];
    let flags: c_int = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    // SAFETY: a valid buffer.
    match unsafe { libc::recv(descriptor, buffer.as_mut_ptr().cast(), buffer.len(), flags) } {
        0 => Err("it closed the connection".into()),
        len if len > 0 => {
            let packet = buffer.get(..len as usize).ok_or("it sent a packet that is too long")?;
            SchedulerMessage::decode(packet, version).map(Some).map_err(|e| e.to_string())
        }
        // SAFETY: the location is valid for this thread.
        _ => match unsafe { *libc::__errno_location() } {
            libc::EAGAIN | libc::EINTR => Ok(None),
            _ => Err(last_error()),
        },
    }
}

fn last_error() -> String {
    std::io::Error::last_os_error().to_string()
}
