//! The axis of a timeline: round times of the host's clock, or times since the beginning if the
//! clock is unknown.

use std::time::Duration;

use super::Timeline;
use crate::config::units;
use crate::sys::clock::{self, Local};

const MINUTE: f64 = 60.0;
const HOUR: f64 = 60.0 * MINUTE;
const DAY: f64 = 24.0 * HOUR;

/// A time on the axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Tick {
    pub at: Duration,
    pub text: String,
}

/// Returns at most `most` round times within the timeline.
pub fn ticks(timeline: &Timeline, most: f64) -> Vec<Tick> {
    let (begin, end) = timeline.span.unwrap_or_default();
    let length = end.saturating_sub(begin).as_secs_f64().max(1e-6);
    let step = round_step(length / most);
    // Every step divides a day, so that ticks restart at midnight.
    let phase = match timeline.host {
        Some(_) => (begin.as_secs_f64() + f64::from(clock::local(begin.as_secs()).offset)).rem_euclid(step),
        None => 0.0,
    };
    let first = if phase < step * 1e-6 { 0.0 } else { step - phase };
    let after = (0..).map(|tick| first + f64::from(tick) * step).take_while(|seconds| *seconds <= length);
    let tick = |seconds: f64| {
        let at = begin + Duration::from_secs_f64(seconds);
        let text = match timeline.host {
            Some(_) => time_of_day(at, step),
            None if seconds == 0.0 => "0".to_owned(),
            None => units::fine_duration(Duration::from_secs_f64(seconds)),
        };
        Tick { at, text }
    };
    after.map(tick).collect()
}

/// Returns the host, the date and the period: `lab3, 2026-11-27 12:30:01 to 12:31:02 UTC+01:00`.
pub fn period(timeline: &Timeline) -> Option<String> {
    let (begin, end) = timeline.span?;
    let host = timeline.host.as_ref()?;
    let (first, last) = (clock::local(begin.as_secs()), clock::local(end.as_secs()));
    let day = |local: &Local| format!("{:04}-{:02}-{:02}", local.year, local.month, local.day);
    let time = |local: &Local| format!("{:02}:{:02}:{:02}", local.hour, local.minute, local.second);
    let until = if day(&first) == day(&last) { time(&last) } else { format!("{} {}", day(&last), time(&last)) };
    let zone = match last.offset / 60 {
        0 => "UTC".to_owned(),
        minutes => {
            let sign = if minutes < 0 { '-' } else { '+' };
            format!("UTC{sign}{:02}:{:02}", minutes.abs() / 60, minutes.abs() % 60)
        }
    };
    Some(format!("{host}, {} {} to {until} {zone}", day(&first), time(&first)))
}

/// Formats the time with the precision of the step. Midnight is shown as the new date.
fn time_of_day(at: Duration, step: f64) -> String {
    // The time is rounded, because a sum of steps may be just below a whole second.
    let digits: usize = if step < 1.0 { (-step.log10()).ceil().clamp(1.0, 6.0) as usize } else { 0 };
    let unit = 1_000_000_000 / 10u128.pow(digits as u32);
    let units = (at.as_nanos() + unit / 2) / unit;
    let per_second = 10u128.pow(digits as u32);
    let Local { month, day, hour, minute, second, .. } =
        clock::local(u64::try_from(units / per_second).unwrap_or(u64::MAX));
    let fraction = units % per_second;
    if (hour, minute, second, fraction) == (0, 0, 0, 0) || step >= DAY {
        let months = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
        return format!("{day} {}", months.get(month as usize - 1).unwrap_or(&""));
    }
    match (digits, step) {
        (0, MINUTE..) => format!("{hour:02}:{minute:02}"),
        (0, _) => format!("{hour:02}:{minute:02}:{second:02}"),
        _ => format!("{hour:02}:{minute:02}:{second:02}.{fraction:0digits$}"),
    }
}

/// Returns the smallest round number of seconds that is at least `least`. Up to 20 s, the number is
/// one, two or five times a power of ten. From 12 h on, the same applies to the number of days.
/// Between these, the number is a fraction of an hour or of a day.
fn round_step(least: f64) -> f64 {
    let parts = [1.0, 2.0, 5.0, 10.0, 30.0].map(|minutes| minutes * MINUTE).into_iter();
    let mut parts = parts.chain([1.0, 2.0, 6.0, 12.0].map(|hours| hours * HOUR)).filter(|step| *step >= least);
    match parts.next() {
        _ if least <= 20.0 => decimal_step(least),
        Some(step) => step,
        None => decimal_step(least / DAY) * DAY,
    }
}

/// Returns the smallest number that is at least `least` and is one, two or five times a power of
/// ten.
fn decimal_step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(1e-6).log10().floor());
    [1.0, 2.0, 5.0].into_iter().map(|times| times * power).find(|step| *step >= least).unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A timeline whose times start at local midnight, in any time zone.
    fn timeline(from: f64, to: f64) -> Timeline {
        let noon = 1_795_780_800; // 2026-11-27, 12:00 UTC
        let Local { hour, minute, second, .. } = clock::local(noon);
        let midnight = noon - u64::from(hour * 3600 + minute * 60 + second);
        let at = |seconds| Duration::from_secs(midnight) + Duration::from_secs_f64(seconds);
        Timeline { span: Some((at(from), at(to))), host: Some("lab3".into()), ..Timeline::default() }
    }

    #[test]
    fn ticks_are_round_times_of_the_day() {
        let texts = |from, to| ticks(&timeline(from, to), 5.0).into_iter().map(|tick| tick.text).collect::<Vec<_>>();
        assert_eq!(texts(3601.5, 3611.0), ["01:00:02", "01:00:04", "01:00:06", "01:00:08", "01:00:10"]);
        assert_eq!(texts(7200.1, 7200.9), ["02:00:00.2", "02:00:00.4", "02:00:00.6", "02:00:00.8"]);
        assert_eq!(texts(86_400.0 - 3600.0, 86_400.0 + 1800.0), ["23:00", "23:30", "28 Nov", "00:30"]);
        let elapsed = Timeline { span: Some((Duration::ZERO, Duration::from_secs(100))), ..Timeline::default() };
        let elapsed: Vec<String> = ticks(&elapsed, 5.0).into_iter().map(|tick| tick.text).collect();
        assert_eq!(elapsed, ["0", "20s", "40s", "1min 00s", "1min 20s", "1min 40s"]);
    }

    #[test]
    fn the_period_has_host_day_and_zone() {
        let period = |from, to| period(&timeline(from, to)).expect("a period");
        let same = period(3601.0, 3611.0);
        assert!(same.starts_with("lab3, 2026-11-27 01:00:01 to 01:00:11 UTC"), "{same}");
        let next = period(3601.0, 90_000.0);
        assert!(next.starts_with("lab3, 2026-11-27 01:00:01 to 2026-11-28 01:00:00 UTC"), "{next}");
        assert_eq!(super::period(&Timeline::default()), None);
    }

    #[test]
    fn steps_are_round() {
        let steps = [(0.03, 0.05), (1.0, 1.0), (1.1, 2.0), (7.0, 10.0), (20.0, 20.0), (21.0, 60.0), (700.0, 1800.0)];
        let long = [(7000.0, 7200.0), (30_000.0, 43_200.0), (50_000.0, 86_400.0), (300_000.0, 432_000.0)];
        for (least, step) in steps.into_iter().chain(long) {
            assert!((round_step(least) - step).abs() < step * 1e-9, "{least}");
        }
    }
}
