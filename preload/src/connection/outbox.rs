//! Messages that the scheduler must receive before the next memory report. They are about memory that
//! this process exports or imports, or no longer shares ([`crate::registry::shared`]).

use crate::{
    connection,
    sys::sync::{Mutex, Rank},
};
use alloc::collections::VecDeque;
use nvshare_wire::ClientMessage;

static OUTBOX: Mutex<VecDeque<ClientMessage>> = Mutex::new(Rank::Outbox, VecDeque::new());

/// Queues messages if a scheduler is connected. Otherwise drops them, because this client sends its
/// whole state to the next scheduler.
pub fn push(messages: impl IntoIterator<Item = ClientMessage>) {
    let mut outbox = OUTBOX.lock();
    if connection::is_connected() {
        outbox.extend(messages);
    }
}

/// Sends the queued messages. Returns `false` if some could not be sent.
pub fn flush() -> bool {
    let mut outbox = OUTBOX.lock();
    while let Some(message) = outbox.front() {
        if !connection::send(message) {
            return false;
        }
        outbox.pop_front();
    }
    true
}

/// Begins a new connection. Discards the messages of the previous connection, and queues the first
/// message of the new one.
pub fn restart(first: impl FnOnce() -> Option<ClientMessage>) {
    let mut outbox = OUTBOX.lock();
    outbox.clear();
    outbox.extend(first());
}
