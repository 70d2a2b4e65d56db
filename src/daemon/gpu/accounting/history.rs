//! Bounds on a client's mapped memory in the recent past.

use std::collections::VecDeque;
use std::time::Duration;

use crate::scheduler::Time;

/// Maximum delay until a report arrives.
const REPORT_DELAY: Duration = Duration::from_millis(50);
/// Maximum age of a sample when it is handled, counted from the beginning of sampling.
const MAX_SAMPLE_AGE: Duration = Duration::from_secs(2);
/// Maximum number of changes kept. Older changes are merged.
const MAX_CHANGES: usize = 32;

/// Bounds on a client's mapped memory over the last seconds.
#[derive(Debug, Default)]
pub struct History(VecDeque<(Time, (u64, u64))>);

impl History {
    /// The history of a client that has just attached. Until its first report, the client may have
    /// mapped any part of the GPU's `total` bytes: a client of an earlier daemon may already have
    /// memory.
    pub fn unknown(now: Time, total: u64) -> Self {
        Self(VecDeque::from([(now, (0, total))]))
    }

    /// Records that the mapped bytes are within the bounds `extent` from now on.
    pub fn record(&mut self, now: Time, extent: (u64, u64)) {
        if self.0.back().is_some_and(|(_, last)| *last == extent) {
            return;
        }
        self.0.push_back((now, extent));
        while self.0.get(1).is_some_and(|(at, _)| *at + MAX_SAMPLE_AGE < now) {
            self.0.pop_front();
        }
        if self.0.len() > MAX_CHANGES
            && let Some((at, first)) = self.0.pop_front()
            && let Some(second) = self.0.front_mut()
        {
            *second = (at, union(first, second.1));
        }
    }

    /// Bounds on the bytes that were mapped at any moment between `begun` and now. Allows for the delay of
    /// reports.
    pub fn at(&self, begun: Time) -> (u64, u64) {
        let from = begun.saturating_sub(REPORT_DELAY);
        let later = self.0.iter().skip(1).map(|(at, _)| Some(*at)).chain([None]);
        let counts = self.0.iter().zip(later).filter(|(_, until)| until.is_none_or(|until| until > from));
        counts.map(|((_, extent), _)| *extent).reduce(union).unwrap_or_default()
    }
}

fn union(a: (u64, u64), b: (u64, u64)) -> (u64, u64) {
    (a.0.min(b.0), a.1.max(b.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_before_the_first_report_are_unknown() {
        let ms = Duration::from_millis;
        let mut history = History::unknown(ms(100), 64);
        history.record(ms(200), (48, 48));
        assert_eq!(history.at(ms(90)), (0, 64));
        assert_eq!(history.at(ms(240)), (0, 64));
        assert_eq!(history.at(ms(260)), (48, 48));
    }

    #[test]
    fn history_includes_values_still_in_transit() {
        let ms = Duration::from_millis;
        let mut history = History::default();
        assert_eq!(history.at(ms(0)), (0, 0));
        history.record(ms(100), (5, 5));
        history.record(ms(200), (5, 9));
        history.record(ms(240), (7, 7));
        assert_eq!(history.at(ms(300)), (7, 7));
        assert_eq!(history.at(ms(289)), (5, 9), "what counted until 240 ms");
        assert_eq!(history.at(ms(120)), (5, 9));
        for i in 0..1000 {
            history.record(ms(1000 + i), (i, 2 * i));
        }
        assert!(history.0.len() <= MAX_CHANGES);
        assert_eq!(history.at(ms(3000)), (999, 1998));
        assert_eq!(history.at(ms(1049)), (0, 1998));
    }
}
