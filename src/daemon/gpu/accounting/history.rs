//! Bounds on a client's mapped and managed memory in the recent past.

use std::collections::VecDeque;
use std::time::Duration;

use crate::scheduler::Time;

/// Maximum delay until a report arrives.
const REPORT_DELAY: Duration = Duration::from_millis(50);
/// Maximum age of a sample when it is handled, counted from the beginning of sampling.
const MAX_SAMPLE_AGE: Duration = Duration::from_secs(2);
/// Maximum number of changes kept. Older changes are merged.
const MAX_CHANGES: usize = 32;

/// Bounds on a client's memory at one moment or over a time, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Extent {
    /// Bounds on the mapped bytes. `least` excludes managed memory.
    pub least: u64,
    pub most: u64,
    /// The most bytes of managed memory, wherever they are.
    pub managed: u64,
    /// The most bytes of managed memory that are mapped, and that are not mapped.
    pub managed_mapped: u64,
    pub unmapped: u64,
}

impl Extent {
    fn union(self, other: Self) -> Self {
        Self {
            least: self.least.min(other.least),
            most: self.most.max(other.most),
            managed: self.managed.max(other.managed),
            managed_mapped: self.managed_mapped.max(other.managed_mapped),
            unmapped: self.unmapped.max(other.unmapped),
        }
    }
}

/// Bounds on a client's memory over the last seconds.
#[derive(Debug, Default)]
pub struct History {
    changes: VecDeque<(Time, Extent)>,
}

impl History {
    /// The history of a client that has just attached. Until its first report, the client may have
    /// mapped any part of the GPU's `total` bytes: a client of an earlier daemon may already have
    /// memory, and `managed` bytes of managed memory.
    pub fn unknown(now: Time, total: u64, managed: u64) -> Self {
        let extent = Extent { least: 0, most: total, managed, managed_mapped: managed, unmapped: managed };
        Self { changes: VecDeque::from([(now, extent)]) }
    }

    /// Records that the client's memory is within the bounds `extent` from now on.
    pub fn record(&mut self, now: Time, extent: Extent) {
        if self.changes.back().is_some_and(|(_, last)| *last == extent) {
            return;
        }
        self.changes.push_back((now, extent));
        while self.changes.get(1).is_some_and(|(at, _)| *at + MAX_SAMPLE_AGE < now) {
            self.changes.pop_front();
        }
        if self.changes.len() > MAX_CHANGES
            && let Some((at, first)) = self.changes.pop_front()
            && let Some(second) = self.changes.front_mut()
        {
            *second = (at, first.union(second.1));
        }
    }

    /// Bounds on the client's memory at any moment between `begun` and now. Allows for the delay of
    /// reports.
    pub fn at(&self, begun: Time) -> Extent {
        let from = begun.saturating_sub(REPORT_DELAY);
        let later = self.changes.iter().skip(1).map(|(at, _)| Some(*at)).chain([None]);
        let counts = self.changes.iter().zip(later).filter(|(_, until)| until.is_none_or(|until| until > from));
        counts.map(|((_, extent), _)| *extent).reduce(Extent::union).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(least: u64, most: u64) -> Extent {
        Extent { least, most, ..Extent::default() }
    }

    #[test]
    fn bounds_before_the_first_report_are_unknown() {
        let ms = Duration::from_millis;
        let mut history = History::unknown(ms(100), 64, 0);
        history.record(ms(200), mapped(48, 48));
        assert_eq!(history.at(ms(90)), mapped(0, 64));
        assert_eq!(history.at(ms(240)), mapped(0, 64));
        assert_eq!(history.at(ms(260)), mapped(48, 48));
    }

    #[test]
    fn history_includes_values_still_in_transit() {
        let ms = Duration::from_millis;
        let mut history = History::default();
        assert_eq!(history.at(ms(0)), mapped(0, 0));
        history.record(ms(100), mapped(5, 5));
        history.record(ms(200), mapped(5, 9));
        history.record(ms(240), mapped(7, 7));
        assert_eq!(history.at(ms(300)), mapped(7, 7));
        assert_eq!(history.at(ms(289)), mapped(5, 9), "what counted until 240 ms");
        assert_eq!(history.at(ms(120)), mapped(5, 9));
        for i in 0..1000 {
            history.record(ms(1000 + i), mapped(i, 2 * i));
        }
        assert!(history.changes.len() <= MAX_CHANGES);
        assert_eq!(history.at(ms(3000)), mapped(999, 1998));
        assert_eq!(history.at(ms(1049)), mapped(0, 1998));
    }
}
