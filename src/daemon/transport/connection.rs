//! One connection to a client: packets in and out. Sending never waits for the client.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::{MAX_LEN, SchedulerMessage, WireError};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::Notify;

use super::outbox::Outbox;
use super::session::Violation;
use crate::daemon::tenants::Budget;
use crate::sys::foreign::{self, Foreign};
use crate::sys::{descriptors, socket};

/// Time between two checks whether a tenant's descriptors still wait to be closed.
const BEHIND_PAUSE: Duration = Duration::from_millis(10);

/// A client's socket, and the queue of messages that do not fit into it.
#[derive(Debug)]
pub struct Connection {
    socket: AsyncFd<Foreign>,
    outbox: RefCell<Outbox>,
    /// Notified when the outbox is no longer empty.
    wake: Notify,
    /// Notified when the outbox is full and the connection must be closed.
    overflow: Notify,
    version: Cell<u16>,
    budget: Arc<Budget>,
}

impl Connection {
    /// Creates a connection. `version`: the protocol version, 0 before the handshake. `budget`: the budget
    /// of the client's tenant.
    pub fn new(socket: Foreign, version: u16, budget: Arc<Budget>) -> io::Result<Self> {
        Ok(Self {
            socket: descriptors::watch(socket)?,
            outbox: RefCell::default(),
            wake: Notify::new(),
            overflow: Notify::new(),
            version: Cell::new(version),
            budget,
        })
    }

    /// The budget of the client's tenant.
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    /// Sets the protocol version after the handshake.
    pub fn set_version(&self, version: u16) {
        self.version.set(version);
    }

    /// Sends a message immediately. If the socket is full, queues the message until the client reads.
    pub fn send(&self, message: SchedulerMessage) {
        let mut outbox = self.outbox.borrow_mut();
        if outbox.is_empty() {
            match socket::send(self.socket(), message.encode(self.version.get()).as_bytes()) {
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                // Any other error means that the client has disconnected. The reading side notices the end of the
                // connection.
                _ => return,
            }
        }
        if outbox.push(message, &self.budget).is_err() {
            self.overflow.notify_one();
        }
        self.wake.notify_one();
    }

    /// Sends a message with file descriptors. Messages with file descriptors are never queued.
    ///
    /// # Errors
    /// `WouldBlock` if the client must read other messages first.
    pub fn send_with(&self, message: SchedulerMessage, descriptors: &[impl AsFd]) -> io::Result<()> {
        if !self.outbox.borrow().is_empty() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        socket::send_with(self.socket(), message.encode(self.version.get()).as_bytes(), descriptors)
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.get_ref().as_fd()
    }

    /// Shuts the connection down. Both sides then read end-of-file.
    pub fn close(&self) {
        socket::shut_down(self.socket());
    }

    /// Sends queued messages whenever the client has read some. Returns when sending fails. The reading
    /// side notices the end of the connection.
    pub async fn flush(&self) {
        loop {
            if self.outbox.borrow().is_empty() {
                self.wake.notified().await;
                continue;
            }
            let Ok(mut ready) = self.socket.writable().await else { return };
            let mut outbox = self.outbox.borrow_mut();
            let Some(packet) = outbox.front().map(|message| message.encode(self.version.get())) else { continue };
            match ready.try_io(|fd| socket::send(fd.as_fd(), packet.as_bytes())) {
                Ok(Ok(())) => outbox.pop(),
                Ok(Err(_)) => return,
                Err(_would_block) => {}
            }
        }
    }

    /// Waits until the queue of unread messages exceeds its limit.
    pub async fn overflowed(&self) {
        self.overflow.notified().await;
    }

    /// Waits for the next packet, and receives it with its file descriptors. `None` at the end of the
    /// connection.
    ///
    /// # Errors
    /// The packet is longer than any valid message.
    pub async fn receive<'a>(
        &self,
        buffer: &'a mut [u8; MAX_LEN],
        descriptors: &mut Vec<Foreign>,
    ) -> Result<Option<&'a [u8]>, Violation> {
        loop {
            self.readable().await;
            match self.try_receive(buffer, descriptors)? {
                Received::Packet(length) => return Ok(buffer.get(..length)),
                Received::End => return Ok(None),
                Received::Nothing => {}
            }
        }
    }

    /// Waits until a packet arrives or the connection ends. While too many descriptors of the tenant wait to be
    /// closed, waits for that too.
    pub async fn readable(&self) {
        while foreign::is_behind(self.budget.tenant().number()) {
            tokio::time::sleep(BEHIND_PAUSE).await;
        }
        // If waiting fails, receiving fails too.
        let _ = self.socket.readable().await;
    }

    /// Receives the next packet with its file descriptors, if a packet has arrived. Receives nothing while too
    /// many descriptors of the tenant wait to be closed.
    ///
    /// # Errors
    /// The packet is longer than any valid message.
    pub fn try_receive(
        &self,
        buffer: &mut [u8; MAX_LEN],
        descriptors: &mut Vec<Foreign>,
    ) -> Result<Received, Violation> {
        let owner = self.budget.tenant().number();
        if foreign::is_behind(owner) {
            return Ok(Received::Nothing);
        }
        let received =
            self.socket.try_io(Interest::READABLE, |fd| socket::receive(fd.as_fd(), buffer, owner, descriptors));
        let length = match received {
            Ok(length) => length,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                return Ok(Received::Nothing);
            }
            Err(_) => return Ok(Received::End),
        };
        if length == 0 {
            return Ok(Received::End);
        }
        // For a truncated packet, the kernel reports the full length.
        if length > buffer.len() {
            return Err(Violation::Wire(WireError::Oversized { have: length }));
        }
        Ok(Received::Packet(length))
    }
}

/// The result of [`Connection::try_receive`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// A packet of this many bytes.
    Packet(usize),
    Nothing,
    /// The end of the connection.
    End,
}
