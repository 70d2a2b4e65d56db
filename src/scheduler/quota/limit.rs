//! The limit on one client's demand on one GPU, and earlier limits that the client has not
//! acknowledged yet.
//!
//! *Committed* is the highest demand that the client can have at this moment, whatever messages are
//! in flight. The earlier limit counts until the client has acknowledged a lower one.

use super::LIMIT_STEP;
use crate::api::{Denial, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// A client with this many unacknowledged limits counts as unresponsive and is sent no lower
/// limits.
const MANY_STEPS: usize = 64;
/// How long memory that a client requested and was granted stays reserved while the client does not
/// use it.
const GRANT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Limit {
    /// The newest limit, in bytes.
    pub limit: u64,
    pub seq: u32,
    /// The limit that the solver computed. `limit` is raised to the target as room becomes
    /// available.
    pub target: u64,
    /// The higher limit that the client has requested.
    pub wanted: Option<Wanted>,
    /// Bytes granted to the client on request, and when their reservation ends.
    granted: Option<(u64, Time)>,
    /// Start of the current wait for an acknowledgement. Set when the limit is lowered, restarted
    /// by each acknowledgement, and cleared once the newest limit is acknowledged. So a client that
    /// acknowledges each of many limits late still counts as responsive.
    pub lowered: Option<Time>,
    /// The bytes that the client contributes to the GPU's sum of committed bytes.
    pub counted: u64,
    acked: u32,
    demand: u64,
    /// Limits that the client may still be applying, each smaller than the one before.
    steps: VecDeque<(u32, u64)>,
}

/// A requested limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Wanted {
    pub bytes: u64,
    pub since: Time,
    /// Determines the order of limit requests.
    pub number: u64,
    /// The bytes beyond the GPU's offer and the client's demand, for managed memory.
    pub beyond: u64,
    /// Why the request waits until other clients free memory. Set when the client is notified.
    /// `None`: the request does not wait for memory.
    pub held: Option<Denial>,
}

impl Limit {
    /// The highest demand, in bytes, that the client can have under its unacknowledged limits.
    pub fn committed(&self) -> u64 {
        self.steps.front().map_or(0, |(_, bytes)| *bytes).max(self.limit).max(self.demand)
    }

    pub fn demand(&self) -> u64 {
        self.demand
    }

    /// Reserves requested memory for the client until its reported demand includes the memory.
    /// Without this reservation, two waiting clients could take the same memory from each other
    /// again and again.
    pub fn keep(&mut self, now: Time, bytes: u64) {
        self.granted = Some((bytes, now + GRANT_TIMEOUT));
    }

    /// The client's demand or the memory reserved for it, whichever is more, in bytes.
    pub fn needed(&self, now: Time) -> u64 {
        self.granted.filter(|(_, until)| now < *until).map_or(self.demand, |(bytes, _)| bytes.max(self.demand))
    }

    /// Whether the limit is so far below its target that a higher one is worth a message.
    pub fn is_below_target(&self) -> bool {
        self.limit.saturating_add(LIMIT_STEP) < self.target
    }

    /// Whether the client acknowledges limits, so that it can be sent a lower one.
    pub fn is_responsive(&self) -> bool {
        self.steps.len() < MANY_STEPS
    }

    /// Sets a new limit. `told`: the client was sent earlier limits.
    pub fn set(&mut self, now: Time, bytes: u64, told: bool) {
        if !told {
            self.steps.clear();
            self.limit = bytes;
        }
        self.seq = self.seq.wrapping_add(1);
        if bytes < self.limit {
            self.lowered.get_or_insert(now);
        }
        while self.steps.back().is_some_and(|(_, b)| *b <= bytes) {
            self.steps.pop_back();
        }
        self.steps.push_back((self.seq, bytes));
        self.limit = bytes;
    }

    /// Handles a client's report. Returns whether the committed bytes fell.
    pub fn reported(&mut self, now: Time, ack: u32, demand: u64) -> bool {
        let before = self.committed();
        self.demand = demand;
        self.granted = self.granted.filter(|(bytes, _)| demand < *bytes);
        let acked = ack.min(self.seq).max(self.acked);
        if std::mem::replace(&mut self.acked, acked) != acked {
            self.lowered = self.lowered.map(|_| now);
        }
        // The client may be applying any limit from the acknowledged one on.
        while self.steps.front().is_some_and(|(seq, _)| *seq < self.acked) {
            self.steps.pop_front();
        }
        if self.acked == self.seq {
            self.lowered = None;
        }
        self.committed() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Duration::from_secs(7);

    #[test]
    fn a_lower_limit_counts_once_it_is_acknowledged() {
        let mut limit = Limit::default();
        limit.set(NOW, 10, true);
        assert!(!limit.reported(NOW, 1, 4));
        limit.set(NOW, 6, true);
        assert_eq!((limit.limit, limit.committed(), limit.lowered), (6, 10, Some(NOW)));
        assert!(!limit.reported(NOW, 1, 8), "it grew before the lower limit arrived");
        assert!(limit.reported(NOW, 2, 8));
        assert_eq!((limit.committed(), limit.lowered), (8, None), "a limit does not reclaim memory");
        assert!(limit.reported(NOW, 2, 3));
        assert_eq!(limit.committed(), 6);
    }

    #[test]
    fn an_acknowledgement_restarts_the_wait_for_the_next_limit() {
        let (mut limit, later) = (Limit::default(), NOW + Duration::from_secs(3));
        for bytes in [10, 6, 4] {
            limit.set(NOW, bytes, true);
        }
        limit.reported(later, 1, 0);
        assert_eq!(limit.lowered, Some(later));
        limit.reported(later + later, 1, 0);
        assert_eq!(limit.lowered, Some(later), "it acknowledged nothing new");
        limit.reported(later + later, 3, 0);
        assert_eq!(limit.lowered, None);
    }

    #[test]
    fn acknowledging_a_limit_that_was_never_sent_has_no_effect() {
        let mut limit = Limit::default();
        limit.set(NOW, 10, true);
        limit.reported(NOW, u32::MAX, 0);
        limit.set(NOW, 2, true);
        assert_eq!(limit.committed(), 10);
    }

    #[test]
    fn unacknowledged_limits_count_as_the_highest_of_them() {
        let mut limit = Limit::default();
        for (bytes, committed) in [(10, 10), (2, 10), (5, 10), (4, 10)] {
            limit.set(NOW, bytes, true);
            assert_eq!(limit.committed(), committed);
        }
        limit.reported(NOW, 2, 0);
        assert_eq!(limit.committed(), 5, "5 may be in effect before 4 is");
        limit.reported(NOW, 4, 0);
        assert_eq!(limit.committed(), 4);
    }

    #[test]
    fn a_client_with_many_unacknowledged_limits_is_unresponsive() {
        let mut limit = Limit::default();
        for n in 0..MANY_STEPS {
            assert!(limit.is_responsive(), "after {n}");
            limit.set(NOW, (MANY_STEPS - n) as u64, true);
        }
        assert!(!limit.is_responsive());
        limit.reported(NOW, 2, 0);
        assert!(limit.is_responsive());
    }
}
