//! A scheduler for unit tests: the other end of this process's connection.

use super::{
    Connection,
    handshake::Attempt,
    socket::{Socket, pair},
    wakeup,
};
use crate::sys::time::Instant;
use alloc::{sync::Arc, vec::Vec};
use core::{mem::MaybeUninit, ops::Deref, time::Duration};
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, version};
use rustix::{
    fd::BorrowedFd,
    io::IoSliceMut,
    net::{RecvAncillaryBuffer, RecvFlags, recvmsg},
};

/// The scheduler's end of a connection.
#[derive(Debug)]
pub struct Peer(Socket);

/// A connected scheduler. Dropping it ends the connection.
#[derive(Debug)]
pub struct Scheduler {
    peer: Peer,
    /// This process's end.
    pub socket: Arc<Socket>,
}

impl Deref for Scheduler {
    type Target = Peer;

    fn deref(&self) -> &Peer {
        &self.peer
    }
}

impl Scheduler {
    /// Connects this process to a new scheduler.
    pub fn connect() -> Self {
        wakeup::init();
        let (own, peer) = pair().expect("a pair of sockets");
        let socket = Arc::new(own);
        super::set_connection(Some(Connection { socket: socket.clone(), version: version::MAX }));
        Self { peer: Peer(peer), socket }
    }

    /// Fills the connection, so that nothing can be sent until [`sent`](Peer::sent) has read it.
    pub fn stop_reading(&self) {
        while self.socket.send(ClientMessage::Wake {}.encode(version::MAX).as_bytes()) {}
    }
}

/// Begins a handshake that is `age` old.
pub fn begin(age: Duration) -> (Attempt, Peer) {
    let (own, peer) = pair().expect("a pair of sockets");
    (Attempt::after_hello(own, Instant::ago(age)), Peer(peer))
}

impl Peer {
    fn descriptor(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket is open while `self` exists.
        unsafe { BorrowedFd::borrow_raw(self.0.0.name().expect("an open socket").0) }
    }

    /// Returns the next message that this process has sent, if there is one.
    pub fn next(&self) -> Option<ClientMessage> {
        let mut packet = [0; MAX_LEN];
        let mut room = [MaybeUninit::uninit(); 512];
        // Dropping the buffer closes descriptors that have arrived.
        let mut control = RecvAncillaryBuffer::new(&mut room);
        let mut parts = [IoSliceMut::new(&mut packet)];
        let len = recvmsg(self.descriptor(), &mut parts, &mut control, RecvFlags::DONTWAIT).ok()?.bytes;
        let packet = &packet[..len];
        // `Hello` has version 0.
        let message = ClientMessage::decode(packet, version::MAX).or_else(|_| ClientMessage::decode(packet, 0));
        (len > 0).then(|| message.expect("a message"))
    }

    /// Returns all messages that this process has sent since the last call.
    pub fn sent(&self) -> Vec<ClientMessage> {
        core::iter::from_fn(|| self.next()).collect()
    }

    /// Sends a message to this process.
    pub fn send(&self, message: &SchedulerMessage) {
        assert!(self.0.send(message.encode(version::MAX).as_bytes()), "the socket is full");
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        super::set_connection(None);
    }
}

/// Whether the client's thread has been woken since the last call.
pub fn was_woken() -> bool {
    wait_for_wake(Duration::ZERO)
}

/// Sleeps until the client's thread is woken, for at most `timeout`. Returns whether it was woken since the
/// last call.
pub fn wait_for_wake(timeout: Duration) -> bool {
    let Some(receiver) = wakeup::receiver() else { return false };
    let [woken, _] = super::socket::wait([Some(receiver), None], timeout);
    // A message that arrives from here on belongs to the next call.
    if woken {
        receiver.drain();
    }
    woken
}
