//! How long a client usually takes to finish submitted work and release the lock after a revoke.

use std::time::Duration;

/// The expected drain time until a drain has been measured.
const FIRST: Duration = Duration::from_millis(10);
/// A drain lags if it takes this many times as long as usual. The client may then be waiting for
/// another member of its gang.
const LONGER: u32 = 2;
/// The minimum and the maximum of the time after which a drain lags.
const LAGS: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));

/// The smoothed duration of drains that did not lag.
#[derive(Debug, Clone, Copy, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct DrainTime {
    usual: Option<Duration>,
}

impl DrainTime {
    pub fn drained(&mut self, took: Duration, lagged: bool) {
        if !lagged {
            self.usual = Some(self.usual.map_or(took, |before| before / 4 * 3 + took / 4));
        }
    }

    /// How long a drain usually takes.
    pub fn expected(&self) -> Duration {
        self.usual.unwrap_or(FIRST)
    }

    /// How long a drain takes before it lags.
    pub fn lags_after(&self) -> Duration {
        (self.expected() * LONGER).clamp(LAGS.0, LAGS.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_drains_do_not_change_the_usual_drain_time() {
        let mut drains = DrainTime::default();
        let ms = Duration::from_millis;
        assert_eq!(drains.lags_after(), ms(20));
        (0..40).for_each(|_| drains.drained(ms(60), false));
        let usual = drains.lags_after();
        assert!(usual > ms(115) && usual <= ms(120), "{usual:?}");
        (0..40).for_each(|_| drains.drained(ms(900), true));
        assert_eq!(drains.lags_after(), usual);
    }
}
