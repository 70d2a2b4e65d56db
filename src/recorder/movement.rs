//! Infers when a client's memory was evicted from a GPU and when it was restored. The client's
//! reports contain amounts of memory rather than moves.

use std::time::Duration;

use crate::scheduler::{MemoryReport, Time};

/// Reports that follow each other within this time belong to the same move.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    ToHost,
    ToGpu,
}

/// A move, as inferred from the reports so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Move {
    pub direction: Direction,
    pub since: Time,
    pub until: Time,
    pub bytes: u64,
}

/// A client's memory on one GPU, as the recording shows it.
#[derive(Debug, Default)]
pub struct Movement {
    allowance: u64,
    mapped: u64,
    swapped: u64,
    reported: Option<Time>,
    /// When the client began to exceed its allowance. `None`: the client does not exceed it.
    evicts: Option<Time>,
    /// When the client was last granted the lock or a higher allowance after its last eviction. A
    /// restore begins then.
    admitted: Option<Time>,
    newest: Option<Move>,
}

impl Movement {
    pub fn new(allowance: u64, mapped: u64, swapped: u64) -> Self {
        Self { allowance, mapped, swapped, ..Self::default() }
    }

    /// Records whether an eviction is in progress at the beginning of the recording.
    pub fn begin(&mut self, at: Time) {
        self.check(at);
    }

    /// Sets a new allowance. Returns the number of bytes that must be evicted because of the new
    /// allowance.
    pub fn allow(&mut self, at: Time, bytes: u64) -> u64 {
        let before = std::mem::replace(&mut self.allowance, bytes);
        if bytes > before {
            self.admitted = Some(at);
        }
        self.check(at);
        self.mapped.min(before).saturating_sub(bytes)
    }

    pub fn grant(&mut self, at: Time) {
        self.admitted = Some(at);
    }

    /// Infers the move that a report shows, and whether it continues the newest move. The change of
    /// host memory distinguishes evicted memory from freed memory even if no eviction was
    /// requested, and restored memory from new memory.
    pub fn report(&mut self, at: Time, report: &MemoryReport) -> Option<(Move, bool)> {
        let (mapped, swapped) = (self.mapped, self.swapped);
        let dropped = mapped.saturating_sub(report.mapped);
        let left = if self.evicts.is_some() { dropped } else { dropped.min(report.swapped.saturating_sub(swapped)) };
        let returned = report.mapped.saturating_sub(mapped).min(swapped.saturating_sub(report.swapped));
        (self.mapped, self.swapped) = (report.mapped, report.swapped);
        let is_recent = |time: &Time| at.saturating_sub(*time) <= PAUSE;
        let recent = self.reported.replace(at).filter(is_recent);
        let (direction, bytes) = if left > 0 { (Direction::ToHost, left) } else { (Direction::ToGpu, returned) };
        let newest = self.newest.filter(|newest| newest.direction == direction);
        // One eviction is one move, even if long pauses separate its reports.
        let continues =
            |newest: &Move| is_recent(&newest.until) || self.evicts.is_some_and(|since| since < newest.until);
        let shown = (bytes > 0).then(|| match newest.filter(continues) {
            Some(newest) => (Move { until: at, bytes: newest.bytes + bytes, ..newest }, true),
            None => {
                let since = match direction {
                    Direction::ToHost => self.evicts.or(recent),
                    Direction::ToGpu => self.admitted.max(newest.map(|newest| newest.until)).max(recent),
                };
                (Move { direction, since: since.unwrap_or(at), until: at, bytes }, false)
            }
        });
        if left > 0 {
            self.admitted = None;
        }
        self.newest = shown.map_or(self.newest, |(newest, _)| Some(newest));
        self.check(at);
        shown
    }

    fn check(&mut self, at: Time) {
        let evicts = self.mapped > self.allowance;
        self.evicts = evicts.then(|| self.evicts.unwrap_or(at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Time {
        Time::from_millis(ms)
    }

    /// Reports `mapped` and `swapped` at a time. Returns the direction, bytes, beginning and end of
    /// the move, and whether the move continues the previous one.
    fn report(movement: &mut Movement, at: u64, mapped: u64, swapped: u64) -> Option<(Direction, u64, u128, bool)> {
        let report = MemoryReport { mapped, swapped, ..MemoryReport::default() };
        let (Move { direction, since, until, bytes }, continues) = movement.report(ms(at), &report)?;
        assert_eq!(until, ms(at));
        Some((direction, bytes, since.as_millis(), continues))
    }

    const fn left(bytes: u64, since: u128, continues: bool) -> Option<(Direction, u64, u128, bool)> {
        Some((Direction::ToHost, bytes, since, continues))
    }

    const fn returned(bytes: u64, since: u128, continues: bool) -> Option<(Direction, u64, u128, bool)> {
        Some((Direction::ToGpu, bytes, since, continues))
    }

    #[test]
    fn an_eviction_is_one_move_from_the_first_lowered_allowance() {
        let mut movement = Movement::new(100, 100, 0);
        assert_eq!(movement.allow(ms(1000), 60), 40);
        assert_eq!(movement.allow(ms(1010), 30), 30);
        assert_eq!(report(&mut movement, 1300, 80, 0), left(20, 1000, false));
        assert_eq!(report(&mut movement, 1900, 30, 10), left(70, 1000, true));
        assert_eq!(report(&mut movement, 2500, 20, 10), None);
        assert_eq!(movement.allow(ms(3000), 10), 10);
        assert_eq!(report(&mut movement, 3100, 10, 10), left(10, 3000, false));
    }

    #[test]
    fn freed_memory_without_an_eviction_has_not_moved() {
        let mut movement = Movement::new(100, 100, 0);
        assert_eq!(report(&mut movement, 1000, 70, 10), left(10, 1000, false));
        assert_eq!(report(&mut movement, 1040, 60, 20), left(20, 1000, true));
        assert_eq!(report(&mut movement, 1200, 60, 20), None);
        assert_eq!(report(&mut movement, 1230, 50, 30), left(10, 1200, false));
        assert_eq!(report(&mut movement, 1300, 0, 30), None);
    }

    #[test]
    fn swapped_memory_returns_after_a_grant_and_new_memory_does_not() {
        let mut movement = Movement::new(20, 20, 80);
        assert_eq!(movement.allow(ms(1000), 150), 0);
        movement.grant(ms(1100));
        assert_eq!(report(&mut movement, 1400, 60, 60), returned(20, 1100, false));
        assert_eq!(report(&mut movement, 1440, 100, 20), returned(60, 1100, true));
        assert_eq!(report(&mut movement, 1600, 150, 0), returned(20, 1440, false));
        assert_eq!(report(&mut movement, 1700, 160, 0), None);
    }

    #[test]
    fn a_return_without_a_grant_has_no_known_beginning() {
        let mut movement = Movement::new(100, 100, 0);
        movement.grant(ms(0));
        assert_eq!(report(&mut movement, 1000, 0, 100), left(100, 1000, false));
        assert_eq!(report(&mut movement, 90_000, 100, 0), returned(100, 90_000, false));
    }

    #[test]
    fn an_ongoing_eviction_is_recognised_by_mapped_excess_bytes() {
        let mut movement = Movement::new(50, 100, 0);
        movement.begin(ms(10));
        assert_eq!(report(&mut movement, 400, 50, 0), left(50, 10, false));
        assert_eq!(report(&mut movement, 500, 70, 0), None);
        assert_eq!(report(&mut movement, 700, 50, 0), left(20, 500, false));
    }
}
