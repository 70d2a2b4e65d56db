//! A client's past on a GPU. Policies predict the client's future from it.

use super::{progress::Progress, utilization::Utilization};
use crate::api::*;
use std::time::Duration;

/// The expected length of a client's first burst.
const FIRST_BURST: Duration = Duration::from_millis(50);

/// The history of one client on one GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct History {
    pub bursts: Bursts,
    pub progress: Progress,
    pub utilization: Utilization,
}

impl History {
    pub fn new(now: Time) -> Self {
        Self { bursts: Bursts::default(), progress: Progress::new(now), utilization: Utilization::default() }
    }
}

/// The lengths of a client's bursts on a GPU. A burst lasts from one idle time to the next.
#[derive(Debug, Clone, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Bursts {
    /// The smoothed burst length. `None`: no burst has ended yet.
    estimate: Option<Duration>,
    /// GPU time since the client last had no work, summed over interrupted turns. `busy` is the
    /// part of it in which the GPU was busy with the client's work.
    attained: Duration,
    busy: Duration,
}

impl Bursts {
    /// The expected length of the current burst, or of the next burst if the client is idle.
    pub fn expected(&self) -> Duration {
        self.expected_after(Duration::ZERO)
    }

    /// The expected length if a turn with `contended` contended time were interrupted now.
    pub fn expected_after(&self, contended: Duration) -> Duration {
        self.attained.saturating_add(contended).max(self.estimate.unwrap_or(FIRST_BURST))
    }

    /// Whether the client has not ended a burst yet.
    pub fn is_first(&self) -> bool {
        self.estimate.is_none()
    }

    /// Records the end of a turn. An uncontended holder keeps the lock while it is idle, so its
    /// uncontended time counts for at most one burst.
    pub fn ran(&mut self, contended: Duration, uncontended: Duration, busy: Duration, idle: bool) {
        let usual = self.estimate.unwrap_or(FIRST_BURST);
        self.attained = self.attained.saturating_add(contended).saturating_add(uncontended.min(usual));
        self.busy = self.busy.saturating_add(busy);
        if idle {
            let sample = if self.busy.is_zero() { self.attained } else { self.attained.min(self.busy) };
            self.estimate = Some(self.estimate.map_or(sample, |e| e / 2 + sample / 2));
            self.attained = Duration::ZERO;
            self.busy = Duration::ZERO;
        }
    }
}
