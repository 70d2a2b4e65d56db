//! How long a client takes to finish submitted work and release the lock after a revoke: its usual time, and the time that a
//! gang needs when its members wait for each other.

use std::time::Duration;

/// Before it was seen.
const FIRST: Duration = Duration::from_millis(10);
/// Whoever takes so many times longer than usual may be waiting for somebody.
const LONGER: u32 = 2;
/// That is never said of one sooner, since a drain depends on the moment, nor later.
const LAGS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct DrainTime {
    /// Of those that did not last longer than that, smoothed.
    usual: Option<Duration>,
    /// Of all, smoothed.
    all: Option<Duration>,
}

impl DrainTime {
    pub fn drained(&mut self, took: Duration, lagged: bool) {
        let smooth = |before: Option<Duration>| Some(before.map_or(took, |before| before / 4 * 3 + took / 4));
        self.all = smooth(self.all);
        if !lagged {
            self.usual = smooth(self.usual);
        }
    }

    /// After how long a holder lags.
    pub fn lags_after(&self) -> Duration {
        (self.usual.unwrap_or(FIRST) * LONGER).clamp(LAGS.0, LAGS.1)
    }

    pub fn expected(&self) -> Duration {
        self.all.unwrap_or(FIRST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_waits_for_others_does_not_change_what_is_usual() {
        let mut drains = DrainTime::default();
        let ms = Duration::from_millis;
        assert_eq!(drains.lags_after(), ms(20));
        (0..40).for_each(|_| drains.drained(ms(60), false));
        let usual = drains.lags_after();
        assert!(usual > ms(115) && usual <= ms(120), "{usual:?}");
        (0..40).for_each(|_| drains.drained(ms(900), true));
        assert_eq!(drains.lags_after(), usual);
        assert!(drains.expected() > ms(890), "{drains:?}");
    }
}
