//! Reservations: room for the driver's own allocations inside a client's call, such as code, stacks, streams and
//! graphs. The driver found no room for them. So clients that do not hold the lock evict that amount, and the room is
//! kept free for a moment, in which the client tries again.

use crate::api::*;

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Reservation {
    pub client: ClientId,
    pub bytes: u64,
    pub since: Time,
    /// Bytes that are free and kept for this client.
    pub secured: u64,
    /// When the client was notified. `None`: it is still waiting.
    pub answered: Option<Time>,
}

impl Reservation {
    pub fn is_of(&self, client: ClientId) -> bool {
        self.client == client
    }
}
