//! Frees that clients reported and no measurement has confirmed. Freed bytes are available to other
//! clients of the same tenant immediately. Clients of other tenants get these bytes only after a
//! measurement that began later than the report.
//!
//! An account's charge is the most that its client can have mapped if its reports are true. If the
//! reports are false, the client can have up to its highest charge since the last measurement. The
//! difference is *unverified* and expires after [`VERIFY_TIMEOUT`]. Bytes that no measurement has
//! contradicted by then count as freed. Bytes that measurements still show are *present* and count
//! as pinned. A client with present bytes is asked to evict all of its memory in one step.
//! Otherwise the client could report false frees again and again.

use crate::api::*;
use std::collections::VecDeque;
use std::time::Duration;

/// How long bytes stay unverified.
const VERIFY_TIMEOUT: Duration = Duration::from_secs(3);
/// If this many past charges are stored, the next one is merged into the newest.
const MANY_HIGHS: usize = 64;

#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct UnverifiedFrees {
    /// Past charges since the last measurement that were higher than all later charges, each with
    /// the time at which the charge fell. The highest is first.
    highs: VecDeque<(Time, u64)>,
    /// Bytes beyond the charge in the newest measurement, and the start of the first of the
    /// consecutive measurements that showed at least that many.
    found: Option<(Time, u64)>,
    /// The part of `found` that certainly exists.
    present: u64,
}

impl UnverifiedFrees {
    /// Records that the charge fell from `from` bytes.
    pub fn record_drop(&mut self, now: Time, from: u64) {
        while self.highs.back().is_some_and(|(_, bytes)| *bytes <= from) {
            self.highs.pop_back();
        }
        let many = self.highs.len() >= MANY_HIGHS;
        match self.highs.back_mut().filter(|_| many) {
            Some((until, _)) => *until = now,
            None => self.highs.push_back((now, from)),
        }
    }

    /// The highest charge since the last measurement. `charge` is the present charge.
    pub fn high(&self, charge: u64) -> u64 {
        self.highs.front().map_or(charge, |(_, high)| charge.max(*high))
    }

    /// Bytes beyond the charge that certainly exist.
    pub fn present(&self) -> u64 {
        self.present
    }

    /// Bytes that may exist beyond the charge and the present bytes.
    pub fn unverified(&self, charge: u64) -> u64 {
        let found = self.found.map_or(0, |(_, bytes)| bytes.saturating_sub(self.present));
        (self.high(charge) - charge).saturating_add(found)
    }

    /// Whether another measurement could reveal more than the newest one.
    pub fn is_unmeasured(&self) -> bool {
        !self.highs.is_empty()
    }

    /// Handles a measurement of the client's bytes that began no earlier than `begun`. `bytes` is
    /// `None` if the measurement says nothing about the client. Its reports are then believed.
    /// `most`: the bytes that the client may have mapped, whether charged or not.
    pub fn measured(&mut self, begun: Time, bytes: Option<u64>, charge: u64, most: u64) {
        let most = most.saturating_add(self.present).saturating_add(self.unverified(charge));
        while self.highs.front().is_some_and(|(until, _)| *until <= begun) {
            self.highs.pop_front();
        }
        let beyond = bytes.map_or(0, |bytes| bytes.min(most).saturating_sub(self.high(charge)));
        let since = self.found.filter(|(_, found)| *found >= beyond).map_or(begun, |(since, _)| since);
        self.found = (beyond > 0).then_some((since, beyond));
        self.present = self.present.min(beyond);
    }

    /// Expires unverified bytes older than [`VERIFY_TIMEOUT`]. Returns whether the number of
    /// present bytes has risen.
    pub fn expire(&mut self, now: Time) -> bool {
        while self.highs.front().is_some_and(|(until, _)| *until + VERIFY_TIMEOUT <= now) {
            self.highs.pop_front();
        }
        let before = self.present;
        if let Some((since, found)) = self.found
            && since + VERIFY_TIMEOUT <= now
        {
            self.present = found;
        }
        self.present > before
    }

    /// When the next unverified bytes expire. `None`: no bytes are unverified.
    pub fn expires(&self) -> Option<Time> {
        let high = self.highs.front().map(|(until, _)| *until);
        let found = self.found.filter(|(_, bytes)| *bytes > self.present).map(|(since, _)| since);
        [high, found].into_iter().flatten().min().map(|since| since + VERIFY_TIMEOUT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Time {
        Duration::from_millis(ms)
    }

    #[test]
    fn bytes_missing_from_a_later_measurement_are_gone() {
        let mut frees = UnverifiedFrees::default();
        frees.record_drop(at(10), 8);
        assert_eq!((frees.unverified(2), frees.unverified(9)), (6, 0), "it may have grown again");
        frees.measured(at(9), Some(8), 2, 2);
        assert_eq!(frees.unverified(2), 6, "it began before the drop");
        frees.measured(at(10), Some(2), 2, 2);
        assert_eq!((frees.unverified(2), frees.expires()), (0, None));
    }

    #[test]
    fn the_highest_charge_since_the_measurement_counts() {
        let mut frees = UnverifiedFrees::default();
        for (ms, from) in [(10, 8), (20, 3), (30, 5)] {
            frees.record_drop(at(ms), from);
        }
        frees.measured(at(10), Some(1), 1, 1);
        assert_eq!(frees.unverified(1), 4, "5 until 30 ms");
        frees.measured(at(30), Some(1), 1, 1);
        assert_eq!(frees.unverified(1), 0);
    }

    #[test]
    fn bytes_found_repeatedly_are_present() {
        let mut frees = UnverifiedFrees::default();
        frees.record_drop(at(10), 8);
        frees.measured(at(20), Some(7), 2, 2);
        assert_eq!((frees.unverified(2), frees.present()), (5, 0));
        assert!(!frees.expire(at(1000)));
        frees.measured(at(2000), Some(6), 2, 2);
        assert!(frees.expire(at(20) + VERIFY_TIMEOUT) && !frees.expire(at(30) + VERIFY_TIMEOUT));
        assert_eq!((frees.unverified(2), frees.present()), (0, 4));
        frees.measured(at(9000), Some(3), 2, 2);
        assert_eq!(frees.present(), 1);
        frees.measured(at(9010), Some(2), 2, 2);
        assert_eq!((frees.present(), frees.unverified(2), frees.expires()), (0, 0, None));
    }

    #[test]
    fn a_measurement_adds_no_more_than_the_unverified_frees() {
        let mut frees = UnverifiedFrees::default();
        frees.measured(at(10), Some(9), 2, 2);
        assert_eq!(
            (frees.unverified(2), frees.expires()),
            (0, None),
            "it reported no free; contexts are not counted here"
        );
        frees.record_drop(at(20), 4);
        frees.measured(at(20), Some(9), 2, 2);
        assert_eq!(frees.unverified(2), 2);
    }

    #[test]
    fn unmeasured_frees_are_believed_after_the_timeout() {
        let mut frees = UnverifiedFrees::default();
        frees.record_drop(at(10), 8);
        assert_eq!(frees.expires(), Some(at(10) + VERIFY_TIMEOUT));
        assert!(!frees.expire(at(10) + VERIFY_TIMEOUT));
        assert_eq!(frees.unverified(2), 0);
    }

    #[test]
    fn many_reports_are_stored_as_few_peaks() {
        let mut frees = UnverifiedFrees::default();
        for i in 0..10_000 {
            frees.record_drop(at(i), 20_000 - i);
        }
        assert!(frees.highs.len() <= MANY_HIGHS);
        frees.measured(at(9_998), Some(1), 1, 1);
        assert!(frees.unverified(1) >= 10_000);
        frees.measured(at(9_999), Some(1), 1, 1);
        assert_eq!(frees.unverified(1), 0);
    }
}
