//! Room for the context of a client that wakes up. A restore that runs out of memory cannot be
//! repeated. So a restore begins only after its room was set aside and a later measurement found
//! the room free.

use crate::api::{ClientId, Time};

/// The client that waits for its restore on a GPU, or is being restored there. A GPU has at most
/// one such client at a time, so memory that is measured as free is available to that client.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Returning {
    pub client: ClientId,
    /// Bytes set aside for the client's context.
    pub bytes: u64,
    /// When these bytes became free of other charges. `None`: other clients still have some of the
    /// bytes.
    pub secured: Option<Time>,
    /// A measurement that began after `secured` found the bytes free.
    pub is_measured: bool,
    /// When the restore of the client began. `None`: the client still waits.
    pub restored: Option<Time>,
    /// When a measurement was last requested.
    pub asked: Option<Time>,
}

impl Returning {
    pub fn new(client: ClientId, bytes: u64) -> Self {
        Self { client, bytes, secured: None, is_measured: false, restored: None, asked: None }
    }

    /// Records whether the bytes are secured. If not, other clients still have some of the bytes.
    pub fn set_secured(&mut self, now: Time, is_secured: bool) {
        if is_secured {
            if self.secured.is_none() {
                (self.secured, self.asked) = (Some(now), None);
            }
        } else {
            (self.secured, self.is_measured) = (None, false);
        }
    }

    /// Handles a measurement that began no earlier than `begun`. `free` is the number of bytes that
    /// no client has or may map. If `free` is `None`, the number is unknown, and the clients'
    /// reports have to suffice.
    pub fn measured(&mut self, begun: Time, free: Option<u64>) {
        if self.secured.is_some_and(|since| since <= begun) {
            self.is_measured = free.is_none_or(|free| free >= self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn at(ms: u64) -> Time {
        Duration::from_millis(ms)
    }

    #[test]
    fn only_a_measurement_that_began_with_the_room_secured_counts() {
        let mut returning = Returning::new(ClientId(1), 100);
        let mut measured = |secured: Option<(u64, bool)>, begun, free| {
            if let Some((now, is_secured)) = secured {
                returning.set_secured(at(now), is_secured);
            }
            returning.measured(at(begun), free);
            returning.is_measured
        };
        assert!(!measured(None, 4, Some(200)), "others may have it");
        assert!(!measured(Some((10, true)), 9, Some(200)), "it began before");
        assert!(!measured(None, 12, Some(99)), "it is not there");
        assert!(measured(None, 14, Some(100)));
        assert!(measured(None, 16, None));
        assert!(!measured(Some((18, false)), 19, Some(200)), "others have some of it again");
    }
}
