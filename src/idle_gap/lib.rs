//! When a holder of the GPU lock that has run out of work should release the lock: a ski-rental problem.
//!
//! Each moment that the holder waits with the lock costs that moment, since the GPU is idle.
//! Releasing the lock costs a hand-over, which is wasted if work arrives soon afterwards. How long
//! the gap will be is not known, but programs repeat themselves: [`IdleGapPredictor::timeout`] is
//! the wait that would have cost the least over the most recent gaps. The wait is close to zero if
//! all gaps were long, slightly longer than the program's pauses between bursts of work, or the
//! cost of a hand-over. Waiting longer than a hand-over costs never pays.
//!
//! Before the first observed gap, the prior is uniform on a logarithmic scale: as many gaps between
//! one and two milliseconds as between one and two seconds. A gap that has lasted for a while is
//! then likely to last equally long again.
//!
//! `libnvshare.so` uses the crate, and so does the simulated client, which must behave like the
//! library. It has no dependencies and does not allocate: the library runs inside other people's
//! processes.

#![cfg_attr(not(test), no_std)]

use core::time::Duration;

/// The number of gaps that are remembered.
const REMEMBERED: usize = 16;
/// The number of gaps assumed of every program: one for each power of two of milliseconds, up to 16 s.
const ASSUMED: u32 = 15;
/// The weight of one observed gap, in assumed gaps.
const OBSERVED_WEIGHT: u32 = 2 * ASSUMED;
/// Shorter gaps are ignored: they end before a lock would be released.
const SHORTEST: Duration = Duration::from_millis(1);

/// The recent idle gaps of one program on one GPU.
#[derive(Debug, Default)]
pub struct IdleGapPredictor {
    /// A ring buffer; valid up to `observed`.
    recent: [Duration; REMEMBERED],
    /// The number of gaps observed so far.
    observed: usize,
}

impl IdleGapPredictor {
    /// Records an idle gap of this length, which has just ended.
    pub fn record(&mut self, gap: Duration) {
        if gap >= SHORTEST {
            if let Some(slot) = self.recent.get_mut(self.observed % REMEMBERED) {
                *slot = gap;
            }
            self.observed += 1;
        }
    }

    /// The idle time after which a holder releases the lock, if a hand-over costs `cost`. Never
    /// more than `cost`.
    pub fn timeout(&self, cost: Duration) -> Duration {
        let assumed = (0..ASSUMED).map(|power| (SHORTEST * (1 << power), 1));
        let observed = self.recent.iter().take(self.observed).map(|gap| (*gap, OBSERVED_WEIGHT));
        let known = || assumed.clone().chain(observed.clone());
        let price = |wait: Duration| -> Duration {
            known()
                .map(|(gap, weight)| (if gap < wait { gap } else { wait.saturating_add(cost) }).saturating_mul(weight))
                .fold(Duration::ZERO, Duration::saturating_add)
        };
        // Only waits that outlast some gap are candidates: a wait that ends just before the gap
        // gains nothing.
        let ends = known().map(|(gap, _)| gap.saturating_add(gap / 4).saturating_add(SHORTEST));
        let waits = ends.chain([SHORTEST]).map(|wait| wait.min(cost));
        // The cost of a hand-over is the wait of the competitive algorithm. It is the default
        // unless another wait is cheaper.
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
