//! Reservations: room for allocations that the driver makes inside a client's call, such as code,
//! stacks, streams and graphs. A client requests a reservation when the driver found no room.
//! Clients that do not hold the lock then evict that many bytes. The room is kept free for a moment
//! while the client repeats the call.

use crate::api::*;

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Reservation {
    pub client: ClientId,
    pub bytes: u64,
    pub since: Time,
    /// Bytes that are free and kept for the client.
    pub secured: u64,
    /// When the client was notified. `None`: the client is still waiting.
    pub answered: Option<Time>,
}

impl Reservation {
    pub fn is_of(&self, client: ClientId) -> bool {
        self.client == client
    }
}
