//! Failed mappings: the driver had no room for bytes that a client was allowed.
//!
//! Mapping the same bytes again would fail again. So the client releases the GPU, and the scheduler
//! requests a measurement that begins after the failure. If the measurement shows less free memory
//! than was assumed, the ledger is overdrawn. This explains the failure, and memory of other
//! clients is evicted.
//!
//! If the measurement still shows enough free memory, that memory is unusable: it is fragmented, or
//! its use is not measured. The unusable bytes become the client's *shortfall*. The client then
//! needs these bytes in addition to its reported demand. The client is granted the GPU again only
//! after that amount of other clients' memory has been evicted. Each further failure in a row
//! doubles the amount, up to all evictable memory of other clients. If mapping keeps failing
//! although no other client has memory on the GPU, the demand cannot be met, and the client is
//! notified.
//!
//! A failure is known only from the client's report. So a shortfall changes only the bytes that
//! this client needs in order to run. The capacity, the limits and the needs of other clients stay
//! the same.
//!
//! A shortfall ends when no client has memory on the GPU any more. A shortfall shrinks when a
//! measurement shows less free memory than the shortfall declares unusable, because some of that
//! memory must have been used. Otherwise only another mapping can test the shortfall. So the
//! shortfall expires after a while. If mapping then fails again, the next shortfall lasts twice as
//! long.
//!
//! A measurement can also underestimate the free memory. So a client whose demand exceeds the
//! usable memory gets the whole GPU and may try to map the rest ([`Trial`]). If the trial fails,
//! the client waits before it tries again, while other clients run.

use super::{Attachment, Context, Gpu};
use crate::api::*;
use std::time::Duration;

/// The first and the longest duration of a shortfall.
const COUNTS: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(600));

/// One client's failed mappings on one GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Failures {
    /// Consecutive grants that ended because the driver had no room for bytes that the client was
    /// allowed.
    pub in_a_row: u32,
    /// Like `in_a_row`, but counts only failures without other clients' memory on the GPU.
    pub alone: u32,
    /// The newest failure, if no measurement has explained it yet.
    pub unexplained: Option<MappingFailure>,
    /// The part of the shortfall that measurements show as free but could not be mapped, in bytes.
    unavailable: u64,
    /// The part of the shortfall that is to be evicted in addition, in bytes.
    extra: u64,
    /// When the shortfall expires.
    until: Time,
    /// The last duration of the shortfall.
    interval: Duration,
    /// The client is not granted the GPU before this time.
    pub not_before: Time,
    /// The client's last delay after a failure.
    pub backoff: Duration,
}

#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct MappingFailure {
    pub at: Time,
    /// Other clients that had evictable memory on the GPU.
    pub others: Vec<ClientId>,
}

/// A client that may map more than the usable memory while it holds the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Trial {
    pub client: ClientId,
    /// The client's demand in bytes.
    pub demand: u64,
    /// The part of the demand that exceeds the usable bytes.
    pub beyond: u64,
}

impl Failures {
    /// Ends a series of failures: the client has mapped all the memory that it needs.
    pub fn succeeded(&mut self) {
        (self.in_a_row, self.alone) = (0, 0);
    }

    /// Records that the client released the GPU for a reason other than a failed mapping.
    pub fn has_run(&mut self) {
        self.backoff = Duration::ZERO;
    }

    /// The shortfall in bytes. 0 after the shortfall has expired.
    pub fn shortfall(&self, now: Time) -> u64 {
        if now < self.until { self.unavailable.saturating_add(self.extra) } else { 0 }
    }

    /// Sets the shortfall after a failure: `uncharged` bytes beyond the present shortfall are
    /// unusable, and `extra` bytes are to be evicted.
    pub fn learn(&mut self, now: Time, uncharged: u64, extra: u64) {
        (self.unavailable, self.extra) = (self.shortfall(now).saturating_add(uncharged), extra);
        self.interval = match self.until {
            until if now >= until.saturating_add(self.interval) => COUNTS.0,
            until if now >= until => (self.interval * 2).min(COUNTS.1),
            _ => self.interval,
        };
        self.until = now + self.interval;
    }

    /// Handles a measurement. `free`: bytes of the GPU that plain allocations can get (`None`:
    /// unknown). `in_use`: the bytes that clients have.
    pub fn measured(&mut self, free: Option<u64>, in_use: u64) {
        self.unavailable = self.unavailable.min(free.unwrap_or(u64::MAX));
        if in_use == 0 {
            (self.unavailable, self.extra) = (0, 0);
        }
    }
}

impl Gpu {
    /// Bytes that a client needs beyond its demand because it could not map memory that seemed
    /// free. The result is at most the memory that all other clients can give up.
    pub fn shortfall(&self, cx: Context, client: ClientId, attachment: &Attachment) -> u64 {
        let bytes = attachment.failures.shortfall(cx.now);
        if bytes == 0 {
            return 0;
        }
        // Clients that run together share the remaining room.
        let entity = cx.queues.entity(client);
        let together = self.attachments.iter().filter(|(other, _)| cx.queues.entity(**other) == entity);
        let (mut demand, mut unevictable, mut count) = (0u64, 0u64, 0u64);
        for (_, member) in together {
            demand = demand.saturating_add(member.account().report.demand);
            unevictable = unevictable.saturating_add(member.entry.unevictable());
            count += 1;
        }
        let others = self.ledger.unevictable().saturating_sub(unevictable);
        let room = self.usable(cx.settings).saturating_sub(others).saturating_sub(demand);
        bytes.min(room / count.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_shortfall_lasts_longer_if_mapping_fails_again_after_it_expired() {
        let mut failures = Failures::default();
        let mut lasts = |now: u64| {
            failures.learn(at(now), 5, 3);
            (1..=1200).find(|seconds| failures.shortfall(at(now + seconds)) == 0)
        };
        assert_eq!([lasts(100), lasts(105), lasts(120)], [Some(10), Some(10), Some(20)]);
        assert_eq!(lasts(160), Some(10), "mapping did not fail for as long as the last shortfall lasted");
        assert_eq!([170, 190, 230, 310, 470, 790, 1430].map(lasts).last(), Some(&Some(600)));
    }

    #[test]
    fn a_shortfall_grows_with_each_failure_and_shrinks_with_measurements() {
        let mut failures = Failures::default();
        failures.learn(at(100), 5, 3);
        failures.learn(at(101), 4, 6);
        assert_eq!(failures.shortfall(at(102)), 8 + 4 + 6);
        failures.measured(Some(7), 1);
        assert_eq!(failures.shortfall(at(102)), 7 + 6);
        failures.measured(None, 1);
        assert_eq!(failures.shortfall(at(102)), 7 + 6);
        failures.measured(None, 0);
        assert_eq!(failures.shortfall(at(102)), 0);
    }
}
