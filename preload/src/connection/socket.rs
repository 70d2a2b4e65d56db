//! The client's end of the scheduler's `SOCK_SEQPACKET` socket: waiting, sending, receiving.

use crate::sys::{
    file::Descriptor,
    time::{Instant, timespec},
};
use alloc::{
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::{mem::MaybeUninit, time::Duration};
use nvshare_wire::{MAX_DESCRIPTORS, MAX_LEN, SchedulerMessage};
use rustix::{
    event::{PollFd, PollFlags, poll},
    fd::{BorrowedFd, OwnedFd},
    io::{Errno, IoSlice, IoSliceMut},
    net::{
        AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags, SocketFlags, SocketType, recv, recvmsg, sendmsg,
    },
};

/// The longest wait for an answer. A stopped scheduler must not stop programs.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// A socket of this library.
#[derive(Debug)]
pub struct Socket(pub(super) Descriptor);

impl Socket {
    /// Sends one packet without waiting.
    pub fn send(&self, packet: &[u8]) -> bool {
        self.send_with(packet, &[])
    }

    /// Waits until the socket has room for many packets. Returns `false` if that takes longer than
    /// `ANSWER_TIMEOUT`.
    pub fn wait_for_room(&self) -> bool {
        let begin = Instant::now();
        loop {
            let left = ANSWER_TIMEOUT.saturating_sub(begin.elapsed());
            let Some(socket) = self.0.get() else { return false };
            let mut entry = [PollFd::from_borrowed_fd(socket, PollFlags::OUT)];
            // A signal handler of the program may end the wait early, so the loop repeats it.
            let _ = poll(&mut entry, Some(&timespec(left)));
            if !entry[0].revents().is_empty() {
                return entry[0].revents().contains(PollFlags::OUT);
            }
            if left.is_zero() {
                return false;
            }
        }
    }

    /// Sends one packet with descriptors, without waiting.
    pub fn send_with(&self, packet: &[u8], descriptors: &[BorrowedFd<'_>]) -> bool {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut room);
        let fits = descriptors.is_empty() || control.push(SendAncillaryMessage::ScmRights(descriptors));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        fits && self.0.get().is_some_and(|to| sendmsg(to, &[IoSlice::new(packet)], &mut control, flags).is_ok())
    }

    /// Returns the next message, if one has arrived, and the descriptors that came with it. After an error
    /// the connection is unusable.
    pub fn receive(&self, version: u16) -> Result<Option<(SchedulerMessage, Vec<OwnedFd>)>, String> {
        let mut buffer = [0u8; MAX_LEN];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let socket = self.0.get().ok_or("the program closed the connection")?;
        let flags = RecvFlags::DONTWAIT | RecvFlags::TRUNC | RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(socket, &mut [IoSliceMut::new(&mut buffer)], &mut control, flags);
        let mut descriptors = || {
            let rights = control.drain().filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            });
            rights.flatten().collect()
        };
        match received.map(|received| received.bytes) {
            Ok(0) => Err("it closed the connection".into()),
            Ok(len) => {
                let packet = buffer.get(..len).ok_or("it sent a packet that is too long")?;
                let message = SchedulerMessage::decode(packet, version).map_err(|e| e.to_string())?;
                Ok(Some((message, descriptors())))
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(error) => Err(words(error)),
        }
    }

    /// Discards all data that has arrived.
    pub fn drain(&self) {
        let mut buffer = [0u8; 8];
        while self
            .0
            .get()
            .is_some_and(|socket| recv(socket, &mut buffer, RecvFlags::DONTWAIT).is_ok_and(|(_, n)| n > 0))
        {}
    }
}

/// A socket that is not connected yet.
pub(super) fn new_socket() -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
}

/// A pair of connected sockets.
pub fn pair() -> Option<(Socket, Socket)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (a, b) = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).ok()?;
    Some((Socket(Descriptor::new(a)?), Socket(Descriptor::new(b)?)))
}

/// Sleeps until one of the sockets is readable, for at most `timeout`. Returns which sockets are
/// readable.
pub fn wait(sockets: [Option<&Socket>; 2], timeout: Duration) -> [bool; 2] {
    let timeout = timespec(timeout.min(Duration::from_secs(86_400)));
    let open = sockets.map(|socket| socket.and_then(|socket| socket.0.get()));
    let gone = [0, 1].map(|at| sockets[at].is_some() && open[at].is_none());
    if gone.contains(&true) {
        return gone;
    }
    let open_sockets = open.iter().flatten();
    let mut entries: Vec<_> = open_sockets.map(|socket| PollFd::from_borrowed_fd(*socket, PollFlags::IN)).collect();
    let _ = poll(&mut entries, Some(&timeout));
    let mut ready = entries.iter().map(|entry| !entry.revents().is_empty());
    open.map(|socket| socket.is_some() && ready.next() == Some(true))
}

/// Describes the error of a system call in words for the user.
pub(super) fn words(error: Errno) -> String {
    match error {
        Errno::NOENT => "there is no such socket".into(),
        Errno::CONNREFUSED => "no process listens there".into(),
        Errno::ACCESS | Errno::PERM => "permission denied".into(),
        Errno::MFILE | Errno::NFILE => "no file descriptors are left".into(),
        Errno::CONNRESET | Errno::PIPE => "it closed the connection".into(),
        error => format!("error {}", error.raw_os_error()),
    }
}
