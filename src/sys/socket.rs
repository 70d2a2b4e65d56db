//! Connections over Unix sockets: packets, and the file descriptors that packets carry.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nvshare_wire::MAX_DESCRIPTORS;
use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::descriptors;
use super::foreign::Foreign;

/// Sockets never block, and child programs never inherit them.
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// The kernel's limit on the number of descriptors in one packet.
const SCM_MAX_FD: usize = 253;
/// The size of the path in `struct sockaddr_un`, without the final NUL.
const MAX_PATH: usize = 107;

/// What a socket is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The clients' socket, which carries packets.
    Packets,
    /// The control socket for D-Bus, which is a stream.
    Stream,
    /// The metrics socket, which is a stream over a Unix socket or TCP.
    Metrics,
}

impl Kind {
    fn socket_type(self) -> SocketType {
        match self {
            Self::Packets => SocketType::SEQPACKET,
            Self::Stream | Self::Metrics => SocketType::STREAM,
        }
    }
}

/// Connects to a Unix socket without blocking.
pub fn connect(path: &Path, kind: Kind) -> io::Result<OwnedFd> {
    let socket = create(kind)?;
    rustix::net::connect(&socket, &address(path)?)?;
    Ok(socket)
}

/// Creates an unconnected Unix socket.
pub(super) fn create(kind: Kind) -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::UNIX, kind.socket_type(), FLAGS, None)?)
}

pub(super) fn address(path: &Path) -> io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|e| match e {
        Errno::NAMETOOLONG => io::Error::other(format!(
            "the path of a socket may have at most {MAX_PATH} bytes, but this path has {}",
            path.as_os_str().len()
        )),
        e => e.into(),
    })
}

/// Returns the two ends of a packet connection.
pub fn packet_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?)
}

/// Accepts the next connection. Fails with `WouldBlock` if no connection is pending.
pub fn accept(listener: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::net::accept_with(listener, FLAGS)?)
}

/// Shuts down a connection for every process that shares it. Both ends then read end of file.
pub fn shut_down(socket: BorrowedFd<'_>) {
    // The peer may have closed the connection already.
    let _ = rustix::net::shutdown(socket, Shutdown::Both);
}

/// Makes the peer's sends fail. Packets that were already sent can still be received.
pub fn stop_receiving(socket: BorrowedFd<'_>) {
    let _ = rustix::net::shutdown(socket, Shutdown::Read);
}

/// True if no more packets can arrive. Unread packets may be left.
pub fn has_ended(socket: BorrowedFd<'_>) -> bool {
    let mut polled = [PollFd::from_borrowed_fd(socket, PollFlags::RDHUP)];
    let ended = PollFlags::RDHUP | PollFlags::HUP;
    rustix::event::poll(&mut polled, Some(&Timespec::default())).is_ok() && polled[0].revents().intersects(ended)
}

/// The number of descriptors in a Unix socket's unread packets. `None` if the kernel does not tell
/// (proc_pid_fdinfo(5), Linux 5.12).
pub fn unread_descriptors(socket: BorrowedFd<'_>) -> Option<u64> {
    let info = descriptors::read(&format!("/proc/self/fdinfo/{}", socket.as_raw_fd())).ok()?;
    info.lines().find_map(|line| line.strip_prefix("scm_fds:")?.trim().parse().ok())
}

/// True if a socket that another process created is listening and of this kind.
pub fn is_listening(socket: BorrowedFd<'_>, kind: Kind) -> bool {
    sockopt::socket_acceptconn(socket) == Ok(true)
        && sockopt::socket_type(socket) == Ok(kind.socket_type())
        && (is_local(socket) || (kind == Kind::Metrics && is_tcp(socket)))
}

/// True for a Unix socket.
pub fn is_local(socket: BorrowedFd<'_>) -> bool {
    sockopt::socket_domain(socket) == Ok(AddressFamily::UNIX)
}

fn is_tcp(socket: BorrowedFd<'_>) -> bool {
    matches!(sockopt::socket_domain(socket), Ok(AddressFamily::INET | AddressFamily::INET6))
}

/// Receives one packet of a tenant, and appends its descriptors. Returns the packet's length. The length
/// exceeds the buffer's length if the packet was truncated, and is 0 at the end of the connection.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    owner: u64,
    descriptors: &mut Vec<Foreign>,
) -> io::Result<usize> {
    // Has room for all descriptors of a packet, because the kernel closes descriptors without room
    // in this call.
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(SCM_MAX_FD))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, flags)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received) = message {
            descriptors.extend(received.map(|descriptor| Foreign::new(descriptor, owner)));
        }
    }
    Ok(received.bytes)
}

/// Sends one packet, or fails with `WouldBlock`.
pub fn send(socket: BorrowedFd<'_>, packet: &[u8]) -> io::Result<()> {
    Ok(rustix::net::send(socket, packet, SendFlags::NOSIGNAL | SendFlags::DONTWAIT).map(drop)?)
}

/// Sends one packet with up to `MAX_DESCRIPTORS` descriptors, or fails with `WouldBlock`.
pub fn send_with(socket: BorrowedFd<'_>, packet: &[u8], descriptors: &[impl AsFd]) -> io::Result<()> {
    let descriptors: Vec<BorrowedFd<'_>> = descriptors.iter().take(MAX_DESCRIPTORS).map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    Ok(rustix::net::sendmsg(socket, &[IoSlice::new(packet)], &mut control, flags).map(drop)?)
}
