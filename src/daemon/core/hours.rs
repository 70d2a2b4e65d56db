//! GPU time of programs whose rules set `gpu-hours`, and the consequences of using it up.
//!
//! Programs that a rule counts together share one sum per hour. The sum is stored under the name of
//! these programs, for example `unit=/system.slice/a.service`, and not under the rule's name. So
//! the name does not change when rules change
//! ([`Instance::programs`](crate::config::rules::Instance::programs)). Time is counted only while a
//! rule limits it. The thread that records usage saves the sums on disk.
//!
//! Programs that have used up their hours get the rule's limits with `weight = "idle"`, without
//! `time-min` and `interactive`. So the scheduler knows nothing of hours.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::config::rules::{GpuHours, Instance, Rule, Window};
use crate::daemon::usage::{HOUR, HoursUsed};
use crate::sys::clock::unix_time;

/// Maximum number of entries. Programs that a rule counts together share an entry. If there are more
/// entries, only the `MAX_PROGRAMS / 2` most recently active ones are kept.
const MAX_PROGRAMS: usize = 4096;
/// Maximum number of hours of one entry: the hours of the longest window, and the same number of
/// hours that were counted while the clock was wrong. Entries are bounded by number alone, so that
/// a wrong clock deletes none.
const MAX_HOURS: usize = 2 * (Window::LONGEST.as_secs() / HOUR as u64) as usize;

#[derive(Debug, Default)]
pub struct Hours {
    used: HoursUsed,
    /// GPU time in seconds that has not been sent to the recording thread.
    pending: BTreeMap<String, f64>,
}

impl Hours {
    /// Adds GPU time, in seconds.
    pub(super) fn add(&mut self, programs: String, seconds: f64) {
        self.add_at(programs, now(), seconds);
    }

    /// `at`: the time in seconds since 1970.
    fn add_at(&mut self, programs: String, at: i64, seconds: f64) {
        *self.pending.entry(programs.clone()).or_default() += seconds;
        *self.used.entry(programs).or_default().entry(at.div_euclid(HOUR) * HOUR).or_default() += seconds;
    }

    /// Adds the GPU time that earlier daemons counted and saved.
    pub(super) fn load(&mut self, saved: HoursUsed) {
        for (programs, hours) in saved {
            let all = self.used.entry(programs).or_default();
            hours.into_iter().for_each(|(hour, seconds)| *all.entry(hour).or_default() += seconds);
        }
    }

    /// GPU time used in the window up to now.
    pub(super) fn used(&self, programs: &str, window: Window) -> Duration {
        self.used_at(programs, window, now())
    }

    /// GPU time used in all hours that overlap the window. Hours after `at` were counted while the clock was
    /// wrong, and do not count.
    fn used_at(&self, programs: &str, window: Window, at: i64) -> Duration {
        let since = at.saturating_sub_unsigned(window.time().as_secs());
        let hours =
            self.used.get(programs).into_iter().flat_map(|hours| hours.range(since.saturating_sub(HOUR - 1)..=at));
        let seconds: f64 = hours.map(|(_, seconds)| seconds).sum();
        Duration::try_from_secs_f64(seconds).unwrap_or_default()
    }

    /// True if these programs have used up the `gpu-hours` that their rule allows.
    pub(super) fn are_used_up(&self, rule: &Rule, programs: &Instance) -> bool {
        let Some(GpuHours { time, window }) = rule.gpu_hours else { return false };
        self.used(&programs.programs(), window) >= time
    }

    /// Drops the oldest hours, and the programs that were inactive longest.
    pub(super) fn forget(&mut self) {
        for hours in self.used.values_mut() {
            while hours.len() > MAX_HOURS {
                hours.pop_first();
            }
        }
        if self.used.len() > MAX_PROGRAMS {
            // Entries are sorted by their last hour, and then by the time used in that hour.
            let rank = |hours: &BTreeMap<i64, f64>| {
                hours.last_key_value().map(|(hour, seconds)| (*hour, (*seconds * 1e3) as u64))
            };
            let mut all: Vec<_> = self.used.iter().map(|(programs, hours)| (rank(hours), programs.clone())).collect();
            all.sort_unstable();
            all.iter().take(all.len() - MAX_PROGRAMS / 2).for_each(|(_, programs)| drop(self.used.remove(programs)));
        }
    }

    /// Returns the GPU time added since the last call.
    pub(super) fn take_pending(&mut self) -> BTreeMap<String, f64> {
        std::mem::take(&mut self.pending)
    }
}

fn now() -> i64 {
    i64::try_from(unix_time()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * HOUR;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn used_time_is_counted_within_a_sliding_window() {
        let mut hours = Hours::default();
        let at = 100 * DAY;
        hours.add_at("unit=a".into(), at - 8 * DAY, 1.0);
        hours.add_at("unit=a".into(), at - 2 * DAY, 2.0);
        hours.add_at("unit=a".into(), at - HOUR, 4.0);
        hours.add_at("unit=a".into(), at, 8.0);
        hours.add_at("unit=b".into(), at, 16.0);
        let used = |hours: &Hours, window, at| hours.used_at("unit=a", window, at).as_secs();
        assert_eq!([Window::Day, Window::Week, Window::Month].map(|window| used(&hours, window, at)), [12, 14, 15]);
        // An hour counts while any part of it is in the window.
        assert_eq!([at + DAY - 1, at + DAY, at + DAY + HOUR].map(|at| used(&hours, Window::Day, at)), [12, 8, 0]);
        assert_eq!(hours.used_at("unit=c", Window::Month, at), Duration::ZERO);
        assert_eq!(hours.take_pending(), [("unit=a".to_owned(), 15.0), ("unit=b".to_owned(), 16.0)].into());
        hours.load([("unit=a".to_owned(), [(at, 32.0)].into())].into());
        assert_eq!(used(&hours, Window::Day, at), 44);
        assert!(hours.take_pending().is_empty(), "what was read is on disk");
        // Hours that were counted while the clock was ahead do not count.
        hours.add_at("unit=a".into(), at + 900 * DAY, 64.0);
        hours.forget();
        assert_eq!(used(&hours, Window::Month, at), 47);
        (0..5000).for_each(|hour| hours.add_at("unit=a".into(), at + hour * HOUR, 1.0));
        hours.forget();
        assert_eq!(hours.used["unit=a"].len(), MAX_HOURS);
    }

    #[test]
    fn the_number_of_recorded_programs_is_bounded() {
        let mut hours = Hours::default();
        for number in 0..=MAX_PROGRAMS as i64 {
            hours.add_at(format!("container={number}"), number * 60, 1.0);
        }
        let at = MAX_PROGRAMS as i64 * 60;
        hours.forget();
        assert!(hours.used.len() <= MAX_PROGRAMS, "{}", hours.used.len());
        assert_eq!(hours.used_at(&format!("container={MAX_PROGRAMS}"), Window::Day, at), seconds(1));
        assert_eq!(hours.used_at("container=0", Window::Month, at), Duration::ZERO);
        for number in 0..=MAX_PROGRAMS {
            hours.add_at(format!("unit={number}"), at, if number == 7 { 9.0 } else { 1.0 });
        }
        hours.forget();
        assert!(hours.used.len() <= MAX_PROGRAMS, "all in one hour: {}", hours.used.len());
        assert_eq!(hours.used_at("unit=7", Window::Day, at), seconds(9), "who used most is kept");
    }
}
