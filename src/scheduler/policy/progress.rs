//! A client's attained GPU time, as `adaptive` counts it: the time that the client ran, minus the
//! time for which it had no work and left the GPU to other clients. A client that runs briefly and
//! then pauses stays on the lowest level. A client that keeps computing rises level by level. Each
//! level ends at four times the GPU time of the level before.

use crate::api::Time;
use std::time::Duration;

/// Clients that have attained less than this are on level 0.
const FIRST_LEVEL: Duration = Duration::from_secs(1);

/// The attained GPU time of one client on one GPU.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Progress {
    attained: Duration,
    /// When the client entered its level. The clients of a level are ordered by this time.
    level_since: Time,
    /// When the client ran out of work. `None`: the client has work.
    idle_since: Option<Time>,
}

impl Progress {
    pub fn new(now: Time) -> Self {
        Self { attained: Duration::ZERO, level_since: now, idle_since: Some(now) }
    }

    /// Records that the client requests the GPU again.
    pub fn asks(&mut self, now: Time) {
        let Some(since) = self.idle_since.take() else { return };
        let attained = self.attained.saturating_sub(now.saturating_sub(since));
        if attained.is_zero() || level(attained) != level(self.attained) {
            self.level_since = now;
        }
        self.attained = attained;
    }

    /// Records a turn of length `time`. `idle`: the turn ended because the client had no more work.
    pub fn ran(&mut self, now: Time, time: Duration, idle: bool) {
        (self.attained, self.level_since) = self.after(now, time);
        self.idle_since = idle.then_some(now);
    }

    /// The attained GPU time after a run of length `time` that ends at `now`, and when the client
    /// entered the level of that GPU time.
    pub fn after(&self, now: Time, time: Duration) -> (Duration, Time) {
        let attained = self.attained.saturating_add(time);
        (attained, if level(attained) == level(self.attained) { self.level_since } else { now })
    }
}

/// The level of a client that has attained `attained`.
pub(super) fn level(attained: Duration) -> u32 {
    let quarters = attained.as_secs() / FIRST_LEVEL.as_secs();
    quarters.checked_ilog(4).map_or(0, |level| level + 1)
}

/// How much longer a client can run until it enters the next level.
pub(super) fn rest_of_level(attained: Duration) -> Duration {
    let ends = 4u32.saturating_pow(level(attained));
    FIRST_LEVEL.saturating_mul(ends).saturating_sub(attained)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_level_is_a_power_of_four() {
        let levels = [0, 1, 3, 4, 15, 16, 63, 64, 1 << 30].map(|attained| level(s(attained)));
        assert_eq!(levels, [0, 1, 1, 2, 2, 3, 3, 4, 16]);
        assert_eq!([s(0), s(1), s(5), s(60)].map(rest_of_level), [s(1), s(3), s(11), s(4)]);
    }

    #[test]
    fn releasing_the_gpu_lowers_the_attained_time() {
        let mut progress = Progress::new(s(0));
        progress.asks(s(10));
        progress.ran(s(20), s(10), true);
        assert_eq!(progress.after(s(20), s(3)), (s(13), s(20)), "on its level since its turn ended");
        assert_eq!(progress.after(s(26), s(6)), (s(16), s(26)), "and on the next since then");
        progress.asks(s(23));
        assert_eq!(progress.after(s(23), s(0)), (s(7), s(20)), "a pause within one level costs it no position");
        progress.ran(s(24), s(0), false);
        progress.asks(s(30));
        assert_eq!(progress.after(s(30), s(0)).0, s(7), "a client that is cut short is not idle");
        progress.ran(s(31), s(0), true);
        progress.asks(s(60));
        assert_eq!(progress.after(s(60), s(0)), (s(0), s(60)), "after a long pause it starts anew");
    }
}
