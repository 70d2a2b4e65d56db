//! A client's utilization of a GPU during a turn, sampled as in the library
//! (`preload/src/client/utilization.rs`).

use nvshare_sched::Time;
use std::time::Duration;

/// The utilization of an always busy GPU, in millionths.
pub const FULL: u32 = 1_000_000;
/// The duration of one sample. The library polls 24 times, once every 2.1 ms.
pub const SAMPLED: Duration = Duration::from_millis(50);
/// The smallest reported change, in thousandths.
const CHANGE: u32 = 100;

/// The utilization in one turn.
#[derive(Debug, Default)]
pub struct Utilization {
    /// The start of the sample, and the running time in this turn until then.
    sample: Option<(Time, Duration)>,
    /// The last report, in thousandths.
    reported: Option<u32>,
    /// Running time in this turn, excluding the current run.
    ran: Duration,
    /// Start of the current run.
    runs_since: Option<Time>,
}

impl Utilization {
    pub fn run(&mut self, now: Time) {
        self.runs_since = Some(now);
    }

    pub fn rest(&mut self, now: Time) {
        self.ran = self.ran(now);
        self.runs_since = None;
    }

    fn ran(&self, now: Time) -> Duration {
        self.ran + self.runs_since.map_or(Duration::ZERO, |since| now.saturating_sub(since))
    }

    /// Starts a sample. Returns false if a sample is already in progress.
    pub fn begin(&mut self, now: Time) -> bool {
        let is_new = self.sample.is_none();
        let ran = self.ran(now);
        self.sample.get_or_insert((now, ran));
        is_new
    }

    /// Ends a sample of a program that keeps `fullness` millionths of the GPU busy while it runs.
    /// Returns the thousandths to report, if they have changed, and whether to sample again. A
    /// program that ran during the whole sample needs no further sample until it pauses.
    pub fn end(&mut self, now: Time, fullness: u32, is_contended: bool) -> (Option<u32>, bool) {
        let Some((since, before)) = self.sample.take().filter(|_| is_contended) else { return (None, false) };
        let (window, ran) = (now.saturating_sub(since), self.ran(now).saturating_sub(before));
        let busy = ran.as_nanos() * u128::from(fullness) / u128::from(FULL / 1000);
        let permille = u32::try_from(busy / window.as_nanos().max(1)).unwrap_or(u32::MAX);
        let has_changed = self.reported.is_none_or(|reported| reported.abs_diff(permille) >= CHANGE);
        if has_changed {
            self.reported = Some(permille);
        }
        (has_changed.then_some(permille), ran < window)
    }
}
