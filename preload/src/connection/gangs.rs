//! The gangs that this process has joined, in addition to the gang that its environment names. Every
//! scheduler learns them: they are announced on each connection.
//!
//! Nothing here takes a lock of its own, so that the child of a fork can call all functions.

use crate::connection;
use core::sync::atomic::{AtomicU64, Ordering};
use nvshare_wire::ClientMessage;

/// The most gangs that are recorded. The first ones suffice: a job creates the communicator of all its
/// processes first, and the scheduler joins gangs with a common member.
const MOST: usize = 64;

/// The keys of the gangs, from the first on; then 0.
static GANGS: [AtomicU64; MOST] = [const { AtomicU64::new(0) }; MOST];
/// The gangs that this connection's scheduler has been told, as bits.
static TOLD: AtomicU64 = AtomicU64::new(0);

/// Joins a gang, and tells the scheduler if one is connected. `key` is not 0.
pub fn join(key: u64) {
    let place = GANGS.iter().find(|place| {
        let before = place.compare_exchange(0, key, Ordering::SeqCst, Ordering::SeqCst);
        before.is_ok() || before == Err(key)
    });
    if place.is_some() && !tell() {
        connection::wake(); // the client's thread tells a scheduler that does not read its messages now
    }
}

/// Whether this process has joined any gang.
pub fn any() -> bool {
    messages().next().is_some()
}

/// Tells the connected scheduler the gangs that it does not know yet. Returns `false` if some could not be
/// sent. In that case, the client's thread calls this function again.
pub fn tell() -> bool {
    tell_unless(TOLD.load(Ordering::SeqCst), connection::send)
}

/// Tells the scheduler all gangs except those in `told`.
fn tell_unless(told: u64, send: impl Fn(&ClientMessage) -> bool) -> bool {
    messages().filter(|(bit, _)| told & bit == 0).all(|(bit, message)| {
        let sent = send(&message);
        TOLD.fetch_or(if sent { bit } else { 0 }, Ordering::SeqCst);
        sent
    })
}

/// Announces all gangs on a new connection with `send`, which returns whether it has sent the message.
/// Returns `false` if one could not be sent.
pub fn announce(send: impl Fn(&ClientMessage) -> bool) -> bool {
    // A thread may still mark a gang that it has told the previous scheduler. That gang is joined already, so
    // it is announced here.
    TOLD.store(0, Ordering::SeqCst);
    tell_unless(0, send)
}

/// The bit and the message of each gang.
fn messages() -> impl Iterator<Item = (u64, ClientMessage)> {
    let keys = GANGS.iter().map(|place| place.load(Ordering::SeqCst)).take_while(|key| *key != 0);
    keys.enumerate().map(|(at, gang)| (1u64 << at, ClientMessage::JoinGang { gang }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::fake::Scheduler;
    use std::vec::Vec;

    fn keys(messages: &[ClientMessage]) -> Vec<u64> {
        let gang = |message: &ClientMessage| match message {
            ClientMessage::JoinGang { gang } => Some(*gang),
            _ => None,
        };
        messages.iter().filter_map(gang).collect()
    }

    #[test]
    fn every_scheduler_is_told_every_gang_once() {
        join(5);
        assert!(any() && !tell(), "no scheduler is connected");
        let first = Scheduler::connect();
        assert!(tell() && tell());
        join(5);
        join(7);
        assert_eq!(keys(&first.sent()), [5, 7]);
        let next = Scheduler::connect();
        assert!(announce(connection::send) && tell());
        assert_eq!(keys(&next.sent()), [5, 7]);
        assert!(!announce(|_| false));
        assert!(tell());
        assert_eq!(keys(&next.sent()), [5, 7], "the announcement failed, so the gangs are told later");
        (0..100).for_each(|n| join(100 + n));
        assert_eq!(messages().count(), MOST);
        assert_eq!(keys(&next.sent()).len(), MOST - 2);
    }
}
