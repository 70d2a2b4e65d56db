//! The lock, as a simulated client has it; and how full it sees the GPU to be meanwhile, as the library does
//! (`preload/src/client/utilization.rs`).

use std::time::Duration;

use super::scenario::FULL;
use crate::scheduler::{GpuId, GpuSet, Time};

/// A change of what was seen that is worth a word, in thousandths.
const NEWS: u32 = 100;

/// Of all of its GPUs, or of none.
#[derive(Debug)]
pub enum Turn {
    Over,
    Held(Held),
    /// Asked for, and what was submitted is finishing. Since when it was held.
    Draining(Time),
}

#[derive(Debug)]
pub struct Held {
    pub since: Time,
    /// Idle time allowed on each GPU for which another program waits.
    graces: Vec<(GpuId, Duration)>,
    /// The beginning of utilization sampling and the running time until then; and the last report.
    sample: Option<(Time, Duration)>,
    reported: Option<u32>,
    /// Running time in this turn, and since when it runs.
    ran: Duration,
    runs_since: Option<Time>,
}

impl Held {
    pub fn new(since: Time) -> Self {
        Self { since, graces: Vec::new(), sample: None, reported: None, ran: Duration::ZERO, runs_since: None }
    }

    pub fn is_contended(&self) -> bool {
        !self.graces.is_empty()
    }

    /// The idle time allowed, if another program waits.
    pub fn grace(&self) -> Option<Duration> {
        self.graces.iter().map(|(_, grace)| *grace).min()
    }

    /// Another program waits for these GPUs, or none does any more.
    pub fn contend(&mut self, gpus: &GpuSet, grace: Option<Duration>) {
        self.graces.retain(|(gpu, _)| !gpus.contains(gpu));
        if let Some(grace) = grace {
            self.graces.extend(gpus.iter().map(|gpu| (*gpu, grace)));
        }
    }

    pub fn runs(&self) -> bool {
        self.runs_since.is_some()
    }

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

    /// Begins to sample utilization. True if it did not before.
    pub fn look(&mut self, now: Time) -> bool {
        let is_new = self.sample.is_none();
        let ran = self.ran(now);
        self.sample.get_or_insert((now, ran));
        is_new
    }

    /// The utilization to report, for a program that keeps `fullness` millionths of the GPU busy while it runs; and
    /// whether to go on sampling: a program that ran all the time has no more to show until it pauses.
    pub fn seen(&mut self, now: Time, fullness: u32) -> (Option<u32>, bool) {
        let Some((since, before)) = self.sample.take().filter(|_| self.is_contended()) else { return (None, false) };
        let (window, ran) = (now.saturating_sub(since), self.ran(now).saturating_sub(before));
        let busy = ran.as_nanos() * u128::from(fullness) / u128::from(FULL / 1000);
        let permille = u32::try_from(busy / window.as_nanos().max(1)).unwrap_or(u32::MAX);
        let is_news = self.reported.is_none_or(|reported| reported.abs_diff(permille) >= NEWS);
        if is_news {
            self.reported = Some(permille);
        }
        (is_news.then_some(permille), ran < window)
    }
}
