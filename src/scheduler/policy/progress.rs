//! The GPU time that a client has attained, as `adaptive` counts it: time that it ran, less time that it left to others while it had
//! no work. A client that runs briefly and then pauses stays on the lowest level; one that computes rises level by level. A level is
//! a power of four.

use crate::api::Time;
use std::time::Duration;

/// Who has had less is of the first level.
const FIRST_LEVEL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
pub(crate) struct Progress {
    had: Duration,
    /// Since when it is of its level: it stands among those of that level as who came then.
    entered: Time,
    /// Since when it has had no work.
    rests_since: Option<Time>,
}

impl Progress {
    pub fn new(now: Time) -> Self {
        Self { had: Duration::ZERO, entered: now, rests_since: Some(now) }
    }

    /// It wants the GPU again.
    pub fn asks(&mut self, now: Time) {
        let Some(since) = self.rests_since.take() else { return };
        let had = self.had.saturating_sub(now.saturating_sub(since));
        if had.is_zero() || level(had) != level(self.had) {
            self.entered = now;
        }
        self.had = had;
    }

    /// It ran for so long. `idle`: until it had no more work.
    pub fn ran(&mut self, now: Time, time: Duration, idle: bool) {
        (self.had, self.entered) = self.after(now, time);
        self.rests_since = idle.then_some(now);
    }

    /// What it will have had when it has run for so much longer, and since when it will be of the level of that.
    pub fn after(&self, now: Time, time: Duration) -> (Duration, Time) {
        let had = self.had.saturating_add(time);
        (had, if level(had) == level(self.had) { self.entered } else { now })
    }
}

/// Of somebody who has had so much.
pub(super) fn level(had: Duration) -> u32 {
    let quarters = had.as_secs() / FIRST_LEVEL.as_secs();
    quarters.checked_ilog(4).map_or(0, |level| level + 1)
}

/// For how much longer somebody runs who has had so much until it is of the next level.
pub(super) fn rest_of_level(had: Duration) -> Duration {
    let ends = 4u32.saturating_pow(level(had));
    FIRST_LEVEL.saturating_mul(ends).saturating_sub(had)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_level_is_a_power_of_four() {
        let levels = [0, 1, 3, 4, 15, 16, 63, 64, 1 << 30].map(|had| level(s(had)));
        assert_eq!(levels, [0, 1, 1, 2, 2, 3, 3, 4, 16]);
        assert_eq!([s(0), s(1), s(5), s(60)].map(rest_of_level), [s(1), s(3), s(11), s(4)]);
    }

    #[test]
    fn who_leaves_the_gpu_to_others_sinks_as_it_rose() {
        let mut progress = Progress::new(s(0));
        progress.asks(s(10));
        progress.ran(s(20), s(10), true);
        assert_eq!(progress.after(s(20), s(3)), (s(13), s(20)), "of its level since its turn ended");
        assert_eq!(progress.after(s(26), s(6)), (s(16), s(26)), "and of the next since then");
        progress.asks(s(23));
        assert_eq!(
            progress.after(s(23), s(0)),
            (s(7), s(20)),
            "a pause in which it stays of its level costs it no place"
        );
        progress.ran(s(24), s(0), false);
        progress.asks(s(30));
        assert_eq!(progress.after(s(30), s(0)).0, s(7), "who is cut short does not rest");
        progress.ran(s(31), s(0), true);
        progress.asks(s(60));
        assert_eq!(progress.after(s(60), s(0)), (s(0), s(60)), "and after a longer one it is as new");
    }
}
