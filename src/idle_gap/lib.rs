//! Decides when a holder of the GPU lock that has run out of work should release the lock. This is
//! a ski-rental problem.
//!
//! While an idle holder keeps the lock, the GPU is idle. Releasing the lock costs a hand-over,
//! which is wasted if work arrives soon afterwards. The length of the gap is unknown, but programs
//! repeat themselves. [`IdleGapPredictor::timeout`] is the wait that would have cost the least over
//! the most recent gaps. If all gaps were long, the wait is close to zero. Otherwise the wait is
//! slightly longer than the program's pauses between bursts of work, or equal to the cost of a
//! hand-over. Waiting longer than the cost of a hand-over never pays.
//!
//! Before the first observed gap, the assumed distribution of gaps is uniform on a logarithmic
//! scale. Gaps between one and two milliseconds are as likely as gaps between one and two seconds.
//! A gap that has lasted for a while is then likely to last equally long again.
//!
//! `libnvshare.so` uses this crate. The simulated client uses it too, because it must behave like
//! the library. The crate has no dependencies and does not allocate, because the library runs
//! inside unmodified programs.

#![cfg_attr(not(test), no_std)]

use core::time::Duration;

/// The number of remembered gaps.
const REMEMBERED: usize = 16;
/// The number of assumed gaps for every program: one for each power of two of milliseconds, up to
/// 16 s.
const ASSUMED: u32 = 15;
/// The weight of one observed gap, in units of assumed gaps.
const OBSERVED_WEIGHT: u32 = 2 * ASSUMED;
/// Shorter gaps are ignored, because they end before any client would release the lock.
const SHORTEST: Duration = Duration::from_millis(1);

/// The recent idle gaps of one program on one GPU.
#[derive(Debug, Default)]
pub struct IdleGapPredictor {
    /// A ring buffer. Before it wraps around, only the first `observed` entries are valid.
    recent: [Duration; REMEMBERED],
    /// The number of gaps observed so far.
    observed: usize,
}

impl IdleGapPredictor {
    /// Records an idle gap of length `gap` that has just ended.
    pub fn record(&mut self, gap: Duration) {
        if gap >= SHORTEST {
            if let Some(slot) = self.recent.get_mut(self.observed % REMEMBERED) {
                *slot = gap;
            }
            self.observed += 1;
        }
    }

    /// The idle time after which a holder releases the lock if a hand-over costs `cost`. The result
    /// never exceeds `cost`.
    pub fn timeout(&self, cost: Duration) -> Duration {
        let assumed = (0..ASSUMED).map(|power| (SHORTEST * (1 << power), 1));
        let observed = self.recent.iter().take(self.observed).map(|gap| (*gap, OBSERVED_WEIGHT));
        let known = || assumed.clone().chain(observed.clone());
        let price = |wait: Duration| -> Duration {
            known()
                .map(|(gap, weight)| (if gap < wait { gap } else { wait.saturating_add(cost) }).saturating_mul(weight))
                .fold(Duration::ZERO, Duration::saturating_add)
        };
        // Only waits slightly longer than some gap are candidates. A wait that ends just before the
        // gap ends costs time and saves no hand-over.
        let ends = known().map(|(gap, _)| gap.saturating_add(gap / 4).saturating_add(SHORTEST));
        let waits = ends.chain([SHORTEST]).map(|wait| wait.min(cost));
        // By default, the wait equals the cost of a hand-over, as in the competitive algorithm. A
        // cheaper wait replaces this default.
        waits.fold(cost, |best, wait| if price(wait) < price(best) { wait } else { best })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Duration = Duration::from_millis(500);

    /// The timeout after gaps of these lengths, in milliseconds.
    fn after(gaps: impl IntoIterator<Item = u64>) -> Duration {
        let mut predictor = IdleGapPredictor::default();
        gaps.into_iter().for_each(|gap| predictor.record(Duration::from_millis(gap)));
        predictor.timeout(COST)
    }

    #[test]
    fn without_observations_the_timeout_is_a_fraction_of_the_cost() {
        let timeout = after([]);
        assert!(timeout > COST / 8 && timeout < COST / 2, "{timeout:?}");
        assert_eq!(after([0, 0, 0]), timeout);
        assert_eq!(IdleGapPredictor::default().timeout(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn after_long_gaps_the_lock_is_released_immediately() {
        assert!(after([5000]) < COST / 16);
        assert!(after([600, 700, 5000, 800]) < COST / 64);
    }

    #[test]
    fn the_timeout_outlasts_short_pauses() {
        let timeout = after([20, 30, 20, 5000, 25, 30]);
        assert!(timeout > Duration::from_millis(30) && timeout < Duration::from_millis(60), "{timeout:?}");
        assert!(after([100; 16]) > Duration::from_millis(100));
    }

    #[test]
    fn one_short_gap_is_enough_to_wait_for_the_next() {
        let timeout = after([5000, 5]);
        assert!(timeout > Duration::from_millis(5) && timeout < COST / 8, "{timeout:?}");
    }

    #[test]
    fn old_gaps_are_forgotten() {
        assert!(after((0..20).map(|_| 20).chain((0..16).map(|_| 3000))) < COST / 64);
    }

    #[test]
    fn the_timeout_never_exceeds_the_cost() {
        for gaps in [&[1u64][..], &[400, 450, 499], &[u64::MAX / 1_000_000], &[300, 900, 300, 900]] {
            let mut predictor = IdleGapPredictor::default();
            gaps.iter().for_each(|gap| predictor.record(Duration::from_millis(*gap)));
            for cost in [0, 1, 50, 500, 5000] {
                assert!(predictor.timeout(Duration::from_millis(cost)) <= Duration::from_millis(cost));
            }
        }
    }
}
