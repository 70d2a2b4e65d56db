//! Utilization: the part of the time in which a client keeps a GPU busy, as the client reports it.
//! A client can measure its utilization only while no client outside its gang holds the lock. The
//! scheduler relies on a report for a limited time.

use std::time::Duration;

/// The highest total utilization, in thousandths of a GPU, of clients that run together. The excess
/// over 1000 allows one client to fill the GPU beside clients that hardly use it.
pub(crate) const FULL: u32 = 1100;
/// Assumed utilization of a client that reports nothing.
const UNKNOWN: u32 = 1000;
/// How long clients run together before they are measured again, at first and at most. The time
/// doubles whenever the clients report the same value again.
const TOGETHER: (Duration, Duration) = (Duration::from_secs(10), Duration::from_secs(80));
/// Reports that differ by no more than this number of thousandths count as the same.
const SAME: u32 = 150;
/// A turn of this length is long enough for a client to report its utilization.
pub(crate) const MEASURED: Duration = Duration::from_millis(150);

/// The utilization of a GPU by one client, in thousandths.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Utilization {
    /// The newest report, while the scheduler relies on it.
    report: Option<u32>,
    /// The previous report, and how long the scheduler relied on it.
    before: Option<(u32, Duration)>,
    /// The client was the only holder, and contended, for long enough to measure, but reported
    /// nothing.
    silent: bool,
    /// The client ran out of work before it could report its utilization.
    brief: bool,
}

impl Utilization {
    /// The utilization in thousandths. `None`: unknown.
    pub fn permille(self) -> Option<u32> {
        self.report.or(self.silent.then_some(UNKNOWN))
    }

    /// Whether the client wants the GPU alone because its work cannot be measured. The client
    /// reports this as a utilization above `FULL`.
    pub fn is_for_itself(self) -> bool {
        self.report.is_some_and(|report| report > FULL)
    }

    /// How long the scheduler relies on the report.
    pub fn believed(self) -> Duration {
        let same =
            self.before.filter(|(before, _)| self.permille().is_some_and(|report| report.abs_diff(*before) <= SAME));
        same.map_or(TOGETHER.0, |(_, believed)| (believed * 2).min(TOGETHER.1))
    }

    /// Discards the report.
    pub fn forget(&mut self) {
        let before = self.report.map(|report| (report, self.believed())).or(self.before);
        *self = Self { before, ..Self::default() };
    }

    /// Whether a sufficiently long turn would yield a utilization measurement.
    pub fn is_open(self) -> bool {
        self.permille().is_none() && !self.brief
    }

    /// Records the end of a turn. `waited` is its contended part. `idle`: the turn ended because
    /// the client had no more work.
    pub fn turn_ended(&mut self, waited: Duration, idle: bool) {
        self.silent |= waited >= MEASURED;
        self.brief = idle;
    }

    /// Handles a client's report.
    pub fn reported(&mut self, permille: u32) {
        *self = Self { report: Some(permille), before: self.before, ..Self::default() };
    }
}
