//! Mappings that fail: the driver had no room for bytes that a client was allowed.
//!
//! The same plan would fail again. So the client gives the GPU back and waits for a measurement that was begun after the
//! failure. If that shows less room than was thought, it explains the failure: more is charged than there is, and memory of
//! other clients is evicted. If it still shows room, this room cannot be had: it is fragmented, or in use in a way that is
//! not measured. It is the client's *shortfall*: from now on the client needs that much more than it reports, so it is
//! granted the GPU again once so much of other clients' memory has left. Each further failure in a row asks for twice as
//! much, up to all that others can give. What fails again and again although no other client has anything there cannot be
//! done, and the client is told so.
//!
//! A failure is a client's word. A shortfall therefore changes nothing but what this client needs when it runs: capacity,
//! limits and other clients' needs are as before.
//!
//! It ends where a measurement contradicts it: less is free than cannot be had, so some of it was had; or clients have
//! nothing on the GPU any more. Otherwise mapping is the only measurement there is, so it counts for a while, and for twice
//! as long when mapping then fails again.
//!
//! A measurement can also show too little. A client that needs more than there seems to be gets all of the GPU, and may try
//! ([`Trial`]) to map the rest. If that fails, it waits before it tries again, while others run.

use crate::api::*;
use std::time::Duration;

/// How long a shortfall counts: the first time, and at most.
const COUNTS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// Mappings of one client that failed on one GPU.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Failures {
    /// Grants in a row that ended because the driver had no room for what the client was allowed.
    pub in_a_row: u32,
    /// The same with no other client's memory there.
    pub alone: u32,
    /// One that no measurement has explained yet.
    pub unexplained: Option<Failure>,
    /// Its shortfall: bytes that measurements show as free and that it could not map, and those that are to leave besides.
    unavailable: u64,
    extra: u64,
    /// Until when that counts, and for how long it did.
    until: Time,
    interval: Duration,
    /// The client is not granted the GPU before that, and how long it was delayed the last time.
    pub not_before: Time,
    pub backoff: Duration,
}

#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Failure {
    pub at: Time,
    /// Those that reported to have memory there, which could leave.
    pub others: Vec<ClientId>,
}

/// A client that may map more than there seems to be, while it holds the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Trial {
    pub client: ClientId,
    /// What it needs, and by how much that exceeds what there seems to be.
    pub demand: u64,
    pub beyond: u64,
}

impl Failures {
    /// The client has all that it needs.
    pub fn succeeded(&mut self) {
        (self.in_a_row, self.alone) = (0, 0);
    }

    /// The client has given the GPU back for another reason.
    pub fn has_run(&mut self) {
        self.backoff = Duration::ZERO;
    }

    pub fn shortfall(&self, now: Time) -> u64 {
        if now < self.until { self.unavailable.saturating_add(self.extra) } else { 0 }
    }

    /// So many bytes that are not charged cannot be had, nor what was allowed for the shortfall until now; so many are to
    /// leave.
    pub fn learn(&mut self, now: Time, uncharged: u64, extra: u64) {
        (self.unavailable, self.extra) = (self.shortfall(now).saturating_add(uncharged), extra);
        self.interval = match self.until {
            until if now >= until.saturating_add(self.interval) => COUNTS.0,
            until if now >= until => (self.interval * 2).min(COUNTS.1),
            _ => self.interval,
        };
        self.until = now + self.interval;
    }

    /// So many bytes are free in all, and clients have so many.
    pub fn measured(&mut self, free: Option<u64>, in_use: u64) {
        self.unavailable = self.unavailable.min(free.unwrap_or(u64::MAX));
        if in_use == 0 {
            (self.unavailable, self.extra) = (0, 0);
        }
    }
}
