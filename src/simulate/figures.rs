//! Functions for figures: percentiles of durations, exact or from histograms, and fairness.

use std::time::Duration;

/// Mean, percentiles and maximum of durations.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Spread {
    pub mean: Duration,
    pub median: Duration,
    pub most: Duration,
    pub worst: Duration,
}

impl Spread {
    /// Computes the figures of `all`, or returns `None` if `all` is empty. `most` is the 95th
    /// percentile.
    pub fn of(mut all: Vec<Duration>) -> Option<Self> {
        all.sort_unstable();
        let count = u32::try_from(all.len()).ok().filter(|count| *count > 0)?;
        let rank = |percent: usize| all.get((all.len() * percent).div_ceil(100).saturating_sub(1)).copied();
        Some(Self {
            mean: all.iter().sum::<Duration>() / count,
            median: rank(50)?,
            most: rank(95)?,
            worst: *all.last()?,
        })
    }
}

/// A histogram of durations, with 64 buckets between successive powers of two.
#[derive(Debug, Clone, Default)]
pub struct Counted {
    buckets: Vec<u64>,
    count: u64,
    sum: Duration,
    worst: Duration,
}

const PARTS: u32 = 6;

impl Counted {
    pub fn add(&mut self, value: Duration) {
        let at = bucket(value);
        if self.buckets.len() <= at {
            self.buckets.resize(at + 1, 0);
        }
        if let Some(count) = self.buckets.get_mut(at) {
            *count += 1;
        }
        self.count += 1;
        self.sum += value;
        self.worst = self.worst.max(value);
    }

    pub fn add_all(&mut self, other: &Self) {
        if self.buckets.len() < other.buckets.len() {
            self.buckets.resize(other.buckets.len(), 0);
        }
        self.buckets.iter_mut().zip(&other.buckets).for_each(|(count, more)| *count += more);
        self.count += other.count;
        self.sum += other.sum;
        self.worst = self.worst.max(other.worst);
    }

    pub fn mean(&self) -> Duration {
        Duration::from_secs_f64(self.sum.as_secs_f64() / self.count.max(1) as f64)
    }

    pub fn worst(&self) -> Duration {
        self.worst
    }

    /// Returns a percentile. The result is at most 2 percent too large.
    pub fn percentile(&self, percent: u64) -> Duration {
        let rank = (u128::from(self.count) * u128::from(percent)).div_ceil(100);
        let mut seen = 0u128;
        let found = self.buckets.iter().position(|count| {
            seen += u128::from(*count);
            seen >= rank
        });
        found.map_or(Duration::ZERO, |at| end(at).min(self.worst))
    }
}

fn bucket(value: Duration) -> usize {
    let nanos = u64::try_from(value.as_nanos()).unwrap_or(u64::MAX);
    let shift = (u64::BITS - nanos.leading_zeros()).saturating_sub(PARTS + 1);
    ((shift << PARTS) as u64 + (nanos >> shift)) as usize
}

/// Returns the longest duration in a bucket.
fn end(bucket: usize) -> Duration {
    let bucket = bucket as u64;
    let shift = (bucket >> PARTS).saturating_sub(1);
    let first = bucket - (shift << PARTS);
    Duration::from_nanos(first.saturating_add(1).saturating_mul(1 << shift) - 1)
}

/// Computes Jain's fairness index. The index is 1 if all values are equal, and 1/n if only one of n
/// values is above zero.
pub fn jain(all: &[f64]) -> Option<f64> {
    let (sum, squares) = all.iter().fold((0.0, 0.0), |(sum, squares), value| (sum + value, squares + value * value));
    (squares > 0.0).then(|| sum * sum / (all.len() as f64 * squares))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn percentiles_are_actual_values() {
        let spread = Spread::of((1..=40).rev().map(s).collect()).expect("a spread");
        assert_eq!((spread.mean, spread.median), (Duration::from_millis(20_500), s(20)));
        assert_eq!((spread.most, spread.worst), (s(38), s(40)));
        assert_eq!(Spread::of(vec![s(7)]), Some(Spread { mean: s(7), median: s(7), most: s(7), worst: s(7) }));
        assert_eq!(Spread::of(Vec::new()), None);
    }

    #[test]
    fn histogram_percentiles_are_within_two_percent() {
        let mut counted = Counted::default();
        (1..=10_000).for_each(|us| counted.add(Duration::from_micros(us)));
        assert_eq!((counted.mean(), counted.worst()), (Duration::from_nanos(5_000_500), Duration::from_millis(10)));
        for (percent, expected) in [(1, 100.0), (50, 5000.0), (99, 9900.0), (100, 10_000.0)] {
            let found = counted.percentile(percent).as_secs_f64() * 1e6;
            assert!((expected..=expected * 1.02).contains(&found), "{percent}: {found} of {expected}");
        }
        assert_eq!(Counted::default().percentile(99), Duration::ZERO);
        for nanos in [0, 1, 63, 64, 65, 127, 128, 1 << 20, u64::MAX / 2] {
            let value = Duration::from_nanos(nanos);
            assert!(end(bucket(value)) >= value && (nanos == 0 || end(bucket(value) - 1) < value), "{nanos}");
        }
    }

    #[test]
    fn jains_index_of_equal_values_is_one() {
        assert_eq!(jain(&[0.3, 0.3]), Some(1.0));
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), Some(0.25));
        assert_eq!(jain(&[]), None);
    }
}
