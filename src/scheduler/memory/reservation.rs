//! Reservations for what the driver allocates itself inside a call of a client: code, stacks, streams, graphs. The driver found no
//! room, so clients that do not hold the lock evict as much, and it is kept free for a moment in which the client tries again.

use crate::api::*;

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Reservation {
    pub client: ClientId,
    pub bytes: u64,
    pub since: Time,
    /// Free, and kept from everybody.
    pub secured: u64,
    pub answered: Option<Time>,
}

impl Reservation {
    pub fn is_of(&self, client: ClientId) -> bool {
        self.client == client
    }
}
