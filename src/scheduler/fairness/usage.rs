//! The time for which an owner held a GPU within a sliding window of one period.

use crate::api::Time;
use std::collections::VecDeque;
use std::time::Duration;

/// The precision of predicted times.
const EXACT: Duration = Duration::from_micros(10);

/// The times when an owner held a GPU in the last period, as ordered spans that do not overlap.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Usage {
    spans: VecDeque<Span>,
}

/// A span of time in which the GPU was held for `used`, either continuously or in several short
/// holds.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Span {
    from: Time,
    to: Time,
    used: Duration,
}

/// Successive holds are merged into one span if that span is at most 1/200 of a period long.
const FINEST: u32 = 200;

impl Span {
    /// The usage between two times, assuming that it is spread evenly over the span.
    fn between(&self, from: Time, to: Time) -> Duration {
        let part = to.min(self.to).saturating_sub(from.max(self.from));
        let whole = self.to - self.from;
        if part >= whole { self.used } else { self.used.mul_f64(part.as_secs_f64() / whole.as_secs_f64()) }
    }
}

/// An owner's usage in the last period, including the current hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Window<'a> {
    pub usage: Option<&'a Usage>,
    /// The start of the owner's current hold. `None`: the owner does not hold the GPU.
    pub since: Option<Time>,
    pub period: Duration,
}

impl Usage {
    /// Records a hold that ended. Holds are recorded in the order in which they end.
    pub fn record(&mut self, from: Time, to: Time, period: Duration) {
        let mut span = Span { from, to, used: to.saturating_sub(from) };
        while let Some(before) = self.spans.back().copied() {
            let is_fine = to.saturating_sub(before.from) <= period / FINEST;
            if before.to < span.from && !is_fine {
                break;
            }
            // Overlapping time counts once.
            let (overlap, within) = (before.between(span.from, to), span.from.min(before.from));
            span = Span { from: within, to, used: (before.used + span.used).saturating_sub(overlap).min(to - within) };
            self.spans.pop_back();
        }
        if span.to > span.from {
            self.spans.push_back(span);
        }
        while self.spans.front().is_some_and(|span| span.to + period <= to) {
            self.spans.pop_front();
        }
    }

    /// Whether all usage is older than a period.
    pub fn is_past(&self, now: Time, period: Duration) -> bool {
        self.spans.back().is_none_or(|span| span.to + period <= now)
    }
}

impl Window<'_> {
    /// The usage in the period before `at`, if the owner neither begins nor stops holding the GPU
    /// before then.
    pub fn used(&self, at: Time) -> Duration {
        let begin = at.saturating_sub(self.period);
        let before = self.since.unwrap_or(at);
        let spans = self.usage.into_iter().flat_map(|usage| &usage.spans);
        let ended: Duration = spans.map(|span| span.between(begin, before)).sum();
        ended + self.since.map_or(Duration::ZERO, |since| at.saturating_sub(since.max(begin)))
    }

    /// When the usage reaches `bound`. `None`: not within a period.
    pub fn reaches(&self, bound: Duration, now: Time) -> Option<Time> {
        self.first(now, |at| self.used(at) >= bound)
    }

    /// When the usage falls below `bound`. `None`: not within a period.
    pub fn falls_below(&self, bound: Duration, now: Time) -> Option<Time> {
        self.first(now, |at| self.used(at) < bound)
    }

    /// The first time at which `holds` is true. `holds` must stay true after that for the rest of a
    /// period. Bounds on usage satisfy this, because usage only grows while the GPU is held and
    /// only falls otherwise.
    fn first(&self, now: Time, holds: impl Fn(Time) -> bool) -> Option<Time> {
        let end = now.saturating_add(self.period);
        if !holds(end) {
            return None;
        }
        let (mut low, mut high) = (now, end);
        while high - low > EXACT {
            let middle = low + (high - low) / 2;
            if holds(middle) { high = middle } else { low = middle }
        }
        Some(high)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn usage_expires_gradually_from_the_window() {
        let mut usage = Usage::default();
        usage.record(s(100), s(102), s(10));
        usage.record(s(105), s(106), s(10));
        let window = Window { usage: Some(&usage), since: None, period: s(10) };
        assert_eq!(window.used(s(106)), s(3));
        assert_eq!(window.used(s(111)), s(2));
        assert_eq!(window.used(s(114)), s(1));
        assert_eq!(window.used(s(116)), s(0));
        let at = window.falls_below(s(2), s(106)).expect("a time");
        assert!(at > s(111) && at <= s(111) + EXACT, "{at:?}");
        let at = window.falls_below(s(1), s(112)).expect("a time");
        assert!(at > s(115) && at <= s(115) + EXACT, "{at:?}: until then it stays at a second");
        assert!(!usage.is_past(s(115), s(10)) && usage.is_past(s(116), s(10)));
        let window = Window { since: Some(s(107)), ..window };
        assert_eq!((window.used(s(107)), window.used(s(110))), (s(3), s(6)));
        let at = window.reaches(s(7), s(107)).expect("a time");
        assert!(at >= s(113) && at <= s(113) + EXACT, "{at:?}: between 110 and 112 s as much expires as is added");
        assert_eq!(window.reaches(s(11), s(107)), None);
    }

    #[test]
    fn overlapping_holds_count_once() {
        let mut usage = Usage::default();
        usage.record(s(3), s(4), s(10));
        usage.record(s(2), s(5), s(10));
        usage.record(s(5), s(6), s(10));
        let window = Window { usage: Some(&usage), since: Some(s(5)), period: s(10) };
        assert_eq!(window.used(s(6)), s(4));
        usage.record(s(20), s(21), s(10));
        assert_eq!(usage.spans.len(), 1, "old spans are forgotten");
    }

    #[test]
    fn many_short_holds_are_stored_compactly() {
        let mut usage = Usage::default();
        let ms = Duration::from_millis;
        (0..100_000u64).for_each(|n| usage.record(ms(2 * n), ms(2 * n + 1), s(10)));
        assert!(usage.spans.len() <= 2 * FINEST as usize + 1, "{}", usage.spans.len());
        let used = Window { usage: Some(&usage), since: None, period: s(10) }.used(s(200));
        assert!(used.abs_diff(s(5)) <= ms(30), "{used:?}");
    }
}
