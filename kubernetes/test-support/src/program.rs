//! A client of the scheduler that does nothing.

use std::os::fd::OwnedFd;
use std::path::Path;

use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use crate::until;

/// The client stays connected until it is dropped.
#[derive(Debug)]
pub struct Program(OwnedFd);

impl Program {
    /// Connects to the socket and waits for the scheduler's welcome. Returns `None` if no scheduler
    /// serves the socket.
    pub fn connect(socket: &Path) -> Option<Self> {
        let flags = SocketFlags::CLOEXEC;
        let fd = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).expect("a socket");
        rustix::net::connect(&fd, &SocketAddrUnix::new(socket).expect("an address")).ok()?;
        let library = Text::new("test");
        let hello = ClientMessage::Hello { min_version: 1, max_version: 1, flags: 0, resume: 0, gang: 0, library };
        rustix::net::send(&fd, hello.encode(1).as_bytes(), SendFlags::NOSIGNAL).expect("it is sent");
        let program = Self(fd);
        let answer = program.receive().expect("an answer");
        assert!(matches!(answer, SchedulerMessage::Welcome { .. }), "{answer:?}");
        Some(program)
    }

    /// Connects as soon as a scheduler serves the socket.
    #[track_caller]
    pub fn connect_soon(socket: &Path) -> Self {
        until(&format!("a scheduler at {}", socket.display()), || Self::connect(socket))
    }

    /// Reads until the scheduler closes the connection.
    pub fn stay(&self) {
        while self.receive().is_some() {}
    }

    fn receive(&self) -> Option<SchedulerMessage> {
        let mut buffer = [0u8; MAX_LEN];
        let (length, _) = rustix::net::recv(&self.0, &mut buffer[..], RecvFlags::empty()).ok()?;
        let message = buffer[..length].first().map(|_| SchedulerMessage::decode(&buffer[..length], 1));
        message.map(|message| message.expect("the scheduler speaks the protocol"))
    }
}
