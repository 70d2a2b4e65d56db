//! How long this client leaves a GPU idle before it has work for it again, and what follows from that for when to give the
//! lock back early.
//!
//! To be idle with the lock costs the time; to give it back costs what a hand-over takes, which was for nothing if there is
//! work again soon. Programs repeat themselves: of all times to wait, the one is taken that would have cost the least over
//! the last gaps. That is next to none where each was long, a little more than the pauses that a program makes in between, or
//! as long as a hand-over takes. Of a program that was not seen yet it is known that gaps are of any length, as many between
//! one and two milliseconds as between one and two seconds: what has lasted for a while is likely to last for as long again.

use core::time::Duration;

/// Gaps that are remembered.
const REMEMBERED: usize = 16;
/// Of programs in general, one gap for each power of two of milliseconds up to 16 s; and how many of them count as much as one
/// that was seen.
const USUAL: u32 = 15;
const SEEN_WEIGHT: u32 = 2 * USUAL;
/// Shorter ones say nothing: they are over before anybody would give the lock back.
const SHORTEST: Duration = Duration::from_millis(1);

#[derive(Debug, Default)]
pub struct Gaps {
    last: [Duration; REMEMBERED],
    seen: usize,
}

impl Gaps {
    /// There is work again, after so long without.
    pub fn ended(&mut self, after: Duration) {
        if after >= SHORTEST {
            if let Some(place) = self.last.get_mut(self.seen % REMEMBERED) {
                *place = after;
            }
            self.seen += 1;
        }
    }

    /// How long to be idle before the lock is given back, which costs so much.
    pub fn patience(&self, cost: Duration) -> Duration {
        let usual = (0..USUAL).map(|power| (SHORTEST * (1 << power), 1));
        let seen = self.last.iter().take(self.seen).map(|gap| (*gap, SEEN_WEIGHT));
        let known = || usual.clone().chain(seen.clone());
        let price = |wait: Duration| -> Duration {
            known()
                .map(|(gap, weight)| (if gap < wait { gap } else { wait.saturating_add(cost) }).saturating_mul(weight))
                .fold(Duration::ZERO, Duration::saturating_add)
        };
        // Nothing is gained by waiting to just before the end of a gap.
        let ends = known().map(|(gap, _)| gap.saturating_add(gap / 4).saturating_add(SHORTEST));
        let waits = ends.chain([SHORTEST]).map(|wait| wait.min(cost));
        // As long as it costs, where nothing is better.
        waits.fold(cost, |best, wait| if price(wait) < price(best) { wait } else { best })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COST: Duration = Duration::from_millis(500);

    fn after(gaps: impl IntoIterator<Item = u64>) -> Duration {
        let mut known = Gaps::default();
        gaps.into_iter().for_each(|gap| known.ended(Duration::from_millis(gap)));
        known.patience(COST)
    }

    #[test]
    fn who_knows_nothing_waits_for_a_part_of_what_it_costs() {
        let patience = after([]);
        assert!(patience > COST / 8 && patience < COST / 2, "{patience:?}");
        assert_eq!(after([0, 0, 0]), patience);
        assert_eq!(Gaps::default().patience(Duration::ZERO), Duration::ZERO);
    }

    #[test]
    fn after_long_gaps_the_lock_goes_at_once() {
        assert!(after([5000]) < COST / 16);
        assert!(after([600, 700, 5000, 800]) < COST / 64);
    }

    #[test]
    fn short_pauses_are_waited_for() {
        let patience = after([20, 30, 20, 5000, 25, 30]);
        assert!(patience > Duration::from_millis(30) && patience < Duration::from_millis(60), "{patience:?}");
        assert!(after([100; 16]) > Duration::from_millis(100));
    }

    #[test]
    fn one_mistake_is_learned_from() {
        let patience = after([5000, 5]);
        assert!(patience > Duration::from_millis(5) && patience < COST / 8, "{patience:?}");
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        assert!(after((0..20).map(|_| 20).chain((0..16).map(|_| 3000))) < COST / 64);
    }

    #[test]
    fn it_never_waits_longer_than_it_costs() {
        for gaps in [&[1u64][..], &[400, 450, 499], &[u64::MAX / 1_000_000], &[300, 900, 300, 900]] {
            let mut known = Gaps::default();
            gaps.iter().for_each(|gap| known.ended(Duration::from_millis(*gap)));
            for cost in [0, 1, 50, 500, 5000] {
                assert!(known.patience(Duration::from_millis(cost)) <= Duration::from_millis(cost));
            }
        }
    }
}
