//! Mappings that fail: the driver had no room for bytes that a client was allowed.
//!
//! The same plan would fail again. So the client releases the GPU, and a measurement is made that begins after the
//! failure. If it shows less free memory than was assumed, that explains the failure: the ledger is overdrawn, and
//! memory of other clients is evicted. If it still shows enough free memory, that memory is unusable: it is fragmented,
//! or in use in a way that is not measured. It then becomes the client's *shortfall*: the client needs that much more
//! than it reports, and is granted the GPU again only after that amount of other clients' memory has been evicted. Each
//! further failure in a row doubles the amount, up to all evictable memory of others. If mapping keeps failing although
//! no other client has memory on the GPU, the demand cannot be met, and the client is notified.
//!
//! A failure is known only from the client's report. So a shortfall changes only the bytes that this client needs in
//! order to run: capacity, limits and the needs of other clients stay the same.
//!
//! A shortfall ends when a measurement contradicts it: less memory is free than the shortfall declares unusable, so
//! some of that memory was used; or no client has memory on the GPU any more. Otherwise only mapping can test it, so
//! the shortfall expires after a while, and after twice that time if mapping then fails again.
//!
//! A measurement can also underestimate the free memory. So a client whose demand exceeds the usable memory gets all of
//! the GPU and may try to map the rest ([`Trial`]). If that fails, it waits before it tries again, while others run.

use crate::api::*;
use std::time::Duration;

/// How long a shortfall lasts: the first time, and at most.
const COUNTS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// One client's failed mappings on one GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Failures {
    /// Consecutive grants that ended because the driver had no room for bytes that the client was allowed.
    pub in_a_row: u32,
    /// The same, counting only failures with no other client's memory on the GPU.
    pub alone: u32,
    /// The failure that no measurement has explained yet.
    pub unexplained: Option<MappingFailure>,
    /// The shortfall, in two parts: bytes that measurements show as free and that could not be mapped, and bytes that
    /// are to be evicted in addition.
    unavailable: u64,
    extra: u64,
    /// When the shortfall expires, and its last duration.
    until: Time,
    interval: Duration,
    /// The client is not granted the GPU before `not_before`. `backoff` is its last delay.
    pub not_before: Time,
    pub backoff: Duration,
}

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct MappingFailure {
    pub at: Time,
    /// Other clients that had evictable memory on the GPU.
    pub others: Vec<ClientId>,
}

/// A client that may map more than the capacity while it holds the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Trial {
    pub client: ClientId,
    /// The client's demand, and the part of it that exceeds the usable bytes.
    pub demand: u64,
    pub beyond: u64,
}

impl Failures {
    /// Ends a row of failures: the client has mapped all that it needs.
    pub fn succeeded(&mut self) {
        (self.in_a_row, self.alone) = (0, 0);
    }

    /// Records that the client released the GPU for another reason.
    pub fn has_run(&mut self) {
        self.backoff = Duration::ZERO;
    }

    /// The shortfall in bytes; 0 once it has expired.
    pub fn shortfall(&self, now: Time) -> u64 {
        if now < self.until { self.unavailable.saturating_add(self.extra) } else { 0 }
    }

    /// Sets the shortfall after a failure: `uncharged` bytes beyond the present shortfall are unusable, and `extra`
    /// bytes are to be evicted.
    pub fn learn(&mut self, now: Time, uncharged: u64, extra: u64) {
        (self.unavailable, self.extra) = (self.shortfall(now).saturating_add(uncharged), extra);
        self.interval = match self.until {
            until if now >= until.saturating_add(self.interval) => COUNTS.0,
            until if now >= until => (self.interval * 2).min(COUNTS.1),
            _ => self.interval,
        };
        self.until = now + self.interval;
    }

    /// Handles a measurement: `free` is the number of free bytes (`None`: unknown), `in_use` the number that clients
    /// have.
    pub fn measured(&mut self, free: Option<u64>, in_use: u64) {
        self.unavailable = self.unavailable.min(free.unwrap_or(u64::MAX));
        if in_use == 0 {
            (self.unavailable, self.extra) = (0, 0);
        }
    }
}
