//! The connection to the scheduler, and sending on it. Any thread may send. Only the client's thread
//! ([`crate::client`]) makes the connection and receives from it.
//!
//! - [`socket`]: packets. [`handshake`]: making a connection.
//! - [`outbox`]: messages that must be sent before the next memory report.
//! - [`gangs`]: the gangs that this process has joined.
//! - [`wakeup`]: waking the client's thread. [`presence`]: whether the process is on its GPUs.

#[cfg(test)]
pub mod fake;
pub mod gangs;
pub mod handshake;
pub mod outbox;
pub mod presence;
pub mod socket;
pub mod wakeup;

pub use wakeup::wake;

use crate::{
    connection::socket::Socket,
    env::trace::trace,
    sys::sync::{Mutex, Rank},
};
use alloc::sync::Arc;
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use nvshare_wire::ClientMessage;
use rustix::fd::BorrowedFd;

static CONNECTION: Mutex<Option<Connection>> = Mutex::new(Rank::Connection, None);
static CONNECTED: AtomicBool = AtomicBool::new(false);
/// Whether a scheduler is connected, or the client still waits for the next one.
static EXPECTED: AtomicBool = AtomicBool::new(false);
static GENERATION: AtomicU32 = AtomicU32::new(0);

/// An established connection.
#[derive(Debug)]
pub struct Connection {
    pub socket: Arc<Socket>,
    /// The protocol version that both sides speak.
    pub version: u16,
}

/// Sends one message without waiting. Returns `false` if the message was not sent. The scheduler
/// may not be reading its socket, so the caller must retry later. If the connection is lost, the
/// client's thread detects the loss.
pub fn send(message: &ClientMessage) -> bool {
    use ClientMessage::{Open, Request, RequestLimit, Reserve};
    if matches!(message, Open { .. } | Request { .. } | RequestLimit { .. } | Reserve { .. }) {
        presence::want(); // a thread is about to wait for the answer
    }
    send_with(message, &[])
}

/// Does the same as [`send`], with descriptors.
pub fn send_with(message: &ClientMessage, descriptors: &[BorrowedFd<'_>]) -> bool {
    if !is_connected() {
        return false;
    }
    let guard = CONNECTION.lock();
    let Some(connection) = &*guard else { return false };
    let sent = connection.socket.send_with(message.encode(connection.version).as_bytes(), descriptors);
    trace!("→ {message:?} with {} descriptors{}", descriptors.len(), if sent { "" } else { " (not sent)" });
    sent
}

pub fn is_connected() -> bool {
    CONNECTED.load(Ordering::SeqCst)
}

/// Whether a scheduler decides for this process: one is connected, or was lost a short time ago.
pub fn is_expected() -> bool {
    EXPECTED.load(Ordering::SeqCst)
}

/// Called when the client begins to run without a scheduler.
pub fn stop_expecting() {
    EXPECTED.store(false, Ordering::SeqCst);
}

/// Returns the number of times that this process has introduced itself to a scheduler. A request that
/// was made in an earlier generation is never answered.
pub fn generation() -> u32 {
    GENERATION.load(Ordering::SeqCst)
}

/// Begins a new generation. Called when a new scheduler has received the whole state of this process.
pub fn begin_generation() {
    GENERATION.fetch_add(1, Ordering::SeqCst);
}

/// Sets the connection. Called when the client's thread has made or lost it.
pub fn set_connection(connection: Option<Connection>) {
    let mut guard = CONNECTION.lock();
    CONNECTED.store(connection.is_some(), Ordering::SeqCst);
    EXPECTED.fetch_or(connection.is_some(), Ordering::SeqCst);
    *guard = connection;
}

/// Stops using the parent's connection in the child of a fork. From then on, nothing is sent, and no lock is
/// taken: another thread of the parent may have held the lock at the fork.
pub fn stop_in_child() {
    CONNECTED.store(false, Ordering::SeqCst);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::fake::Scheduler;

    #[test]
    fn the_child_of_a_fork_sends_nothing_and_takes_no_lock() {
        let scheduler = Scheduler::connect();
        let held = CONNECTION.lock(); // by another thread of the parent
        stop_in_child();
        assert!(!send(&ClientMessage::Wake {}) && !send_with(&ClientMessage::Wake {}, &[]));
        gangs::join(5);
        drop(held);
        assert_eq!(scheduler.sent(), []);
    }
}
