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
    /// Who waits: for each GPU, how long it may be idle.
    graces: Vec<(GpuId, Duration)>,
    /// Since when it has looked how full the GPU is, and how long it had run until then; and what it said of that.
    sample: Option<(Time, Duration)>,
    said: Option<u32>,
    /// How long it has run in this turn, and since when it runs.
    ran: Duration,
    runs_since: Option<Time>,
}

impl Held {
    pub fn new(since: Time) -> Self {
        Self { since, graces: Vec::new(), sample: None, said: None, ran: Duration::ZERO, runs_since: None }
    }

    pub fn is_contended(&self) -> bool {
        !self.graces.is_empty()
    }

    /// How long it may be idle, if anybody waits.
    pub fn grace(&self) -> Option<Duration> {
        self.graces.iter().map(|(_, grace)| *grace).min()
    }

    /// Somebody waits for these GPUs, or nobody does any more.
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

    /// Begins to look how full the GPU is. Whether it did not before.
    pub fn look(&mut self, now: Time) -> bool {
        let is_new = self.sample.is_none();
        let ran = self.ran(now);
        self.sample.get_or_insert((now, ran));
        is_new
    }

    /// What is to be said of the GPU, of which the program keeps so much busy while it runs (in millionths); and whether to go
    /// on looking: until it pauses, there is nothing more to be seen of one that ran all the time.
    pub fn seen(&mut self, now: Time, fullness: u32) -> (Option<u32>, bool) {
        let Some((since, before)) = self.sample.take().filter(|_| self.is_contended()) else { return (None, false) };
        let (window, ran) = (now.saturating_sub(since), self.ran(now).saturating_sub(before));
        let busy = ran.as_nanos() * u128::from(fullness) / u128::from(FULL / 1000);
        let permille = u32::try_from(busy / window.as_nanos().max(1)).unwrap_or(u32::MAX);
        let is_news = self.said.is_none_or(|said| said.abs_diff(permille) >= NEWS);
        if is_news {
            self.said = Some(permille);
        }
        (is_news.then_some(permille), ran < window)
    }
}
