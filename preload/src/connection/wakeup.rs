//! Waking the client's thread when another thread has left work to it.

use crate::{
    connection::socket::{self, Socket},
    sys::once::OnceBox,
};
use alloc::boxed::Box;
use rustix::fd::{AsRawFd, RawFd};

/// The sending and the receiving socket. If the program closes one of them, the client's thread checks
/// for work periodically.
static PAIR: OnceBox<(Socket, Socket)> = OnceBox::new();

/// Creates the sockets. Called once, before the client's thread starts.
pub fn init() {
    if let Some(pair) = socket::pair() {
        let _ = PAIR.set(Box::new(pair));
    }
}

/// Wakes the client's thread, for example because a report could not be sent or memory was freed.
pub fn wake() {
    if let Some((sender, _)) = PAIR.get() {
        sender.send(&[1]);
    }
}

/// Returns the descriptor that [`wake`] writes to, for threads with their own descriptor table.
pub fn sender() -> Option<RawFd> {
    PAIR.get().and_then(|(sender, _)| sender.0.get()).map(|sender| sender.as_raw_fd())
}

/// Returns the socket that [`wake`] makes readable, or `None` if it does not exist or the program has
/// closed it.
pub fn receiver() -> Option<&'static Socket> {
    PAIR.get().filter(|(sender, receiver)| sender.0.is_open() && receiver.0.is_open()).map(|(_, receiver)| receiver)
}
