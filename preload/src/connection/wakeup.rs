//! Waking the client's thread when another thread has left it something to do.

use crate::{
    connection::socket::{self, Socket},
    sys::sync::OnceLock,
};

/// What is sent to the first arrives at the second. Where the program has closed them, the client's thread looks around
/// now and then by itself.
static PAIR: OnceLock<(Socket, Socket)> = OnceLock::new();

/// Once, before the client's thread starts.
pub fn init() {
    if let Some(pair) = socket::pair() {
        let _ = PAIR.set(pair);
    }
}

/// Wakes the client's thread: a report could not be sent, memory is to be taken back, and the like.
pub fn wake() {
    if let Some((sender, _)) = PAIR.get() {
        sender.send(&[1]);
    }
}

/// The socket that becomes readable with [`wake`]; `None` where there is none, or the program has closed it.
pub fn receiver() -> Option<&'static Socket> {
    PAIR.get().filter(|(sender, receiver)| sender.is_ours() && receiver.is_ours()).map(|(_, receiver)| receiver)
}
