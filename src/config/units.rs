//! Sizes and durations in text. The configuration file, the command line and the output of
//! `nvsharectl` all use these parsers and formatters.

use std::fmt::Write;
use std::time::Duration;

const SIZES: [(&str, u64); 5] = [("", 1), ("K", 1 << 10), ("M", 1 << 20), ("G", 1 << 30), ("T", 1 << 40)];

const MICROSECOND: u64 = 1;
const MILLISECOND: u64 = 1000 * MICROSECOND;
const SECOND: u64 = 1000 * MILLISECOND;
const DURATIONS: [(&str, u64); 10] = [
    ("", SECOND),
    ("us", MICROSECOND),
    ("ms", MILLISECOND),
    ("s", SECOND),
    ("sec", SECOND),
    ("m", 60 * SECOND),
    ("min", 60 * SECOND),
    ("h", 3600 * SECOND),
    ("hour", 3600 * SECOND),
    ("d", 24 * 3600 * SECOND),
];

/// Parses `512M`, `1.5G`, `2 GiB` or a plain number of bytes. Every unit is a power of 1024, as in
/// systemd's files.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("\"{text}\" is not a size: write a number and K, M, G or T, like \"512M\"");
    let (number, unit) = split(text.trim()).ok_or_else(wrong)?;
    let unit = unit.strip_suffix("iB").or_else(|| unit.strip_suffix('B')).unwrap_or(unit);
    let (_, factor) = SIZES.iter().find(|(name, _)| name.eq_ignore_ascii_case(unit)).ok_or_else(wrong)?;
    scale(number, *factor).ok_or_else(wrong)
}

/// Parses `30s`, `2min`, `1min 30s`, `500ms`, `20us`, `1h` or a plain number of seconds.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("\"{text}\" is not a duration: write a number and ms, s, min, h or d, like \"30s\"");
    let mut rest = text.trim();
    let mut total: u64 = 0;
    loop {
        let (number, after) = split(rest).ok_or_else(wrong)?;
        let end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, next) = after.split_at(end);
        let (_, factor) = DURATIONS.iter().find(|(name, _)| *name == unit).ok_or_else(wrong)?;
        let part = scale(number, *factor).ok_or_else(wrong)?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = next.trim_start();
        if rest.is_empty() {
            return Ok(Duration::from_micros(total));
        }
    }
}

/// Splits `text` into a number and the text after it. Drops the blanks between the two.
fn split(text: &str) -> Option<(&str, &str)> {
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, rest) = text.split_at(end);
    (!number.is_empty()).then(|| (number, rest.trim_start()))
}

/// Multiplies `number`, which may have a fraction, by `factor`. Returns `None` if `number` is not a
/// number or the product overflows.
fn scale(number: &str, factor: u64) -> Option<u64> {
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor);
    }
    let product = number.parse::<f64>().ok()? * factor as f64;
    (product.is_finite() && product < u64::MAX as f64).then_some(product.round() as u64)
}

/// Formats a size as `14.5 GiB`, with at most three significant digits.
pub fn size(bytes: u64) -> String {
    let names = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit + 1 < names.len() {
        value /= 1024.0;
        unit += 1;
    }
    let name = names.get(unit).unwrap_or(&"B");
    let number = if value >= 99.95 { format!("{value:.0}") } else { format!("{value:.1}") };
    format!("{} {name}", number.strip_suffix(".0").unwrap_or(&number))
}

/// Formats a duration as `1h 05min`, `2min 03s` or `4.2s`, short enough for a table.
pub fn duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    let mut text = String::new();
    let _ = match seconds {
        0..10 => write!(text, "{:.1}s", duration.as_secs_f64()),
        10..60 => write!(text, "{seconds}s"),
        60..3600 => write!(text, "{}min {:02}s", seconds / 60, seconds % 60),
        3600..86400 => write!(text, "{}h {:02}min", seconds / 3600, seconds % 3600 / 60),
        _ => write!(text, "{}d {:02}h", seconds / 86400, seconds % 86400 / 3600),
    };
    text
}

/// Formats a duration like [`duration`], but in milliseconds if it is shorter than a second:
/// `23ms`, `0.4ms`.
pub fn fine_duration(value: Duration) -> String {
    match value.as_micros() {
        0..10_000 => format!("{:.1}ms", value.as_secs_f64() * 1e3),
        10_000..1_000_000 => format!("{}ms", value.as_millis()),
        _ => duration(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_in_powers_of_1024() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("4k", 4096),
            ("512M", 512 << 20),
            ("512 MiB", 512 << 20),
            ("1.5G", 3 << 29),
            ("2TB", 2 << 40),
            ("7B", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "M", "-1", "1X", "1MM", "1.2.3", "99999999T", "1 M 2"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_read_as_in_systemd() {
        for (text, ms) in [
            ("30", 30_000),
            ("30s", 30_000),
            ("500ms", 500),
            ("2min", 120_000),
            ("1min 30s", 90_000),
            ("1h30m", 5_400_000),
            ("0.5 s", 500),
            ("250us 0.75ms", 1),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "-3s", "3 parsecs", "3s x", "999999999999999999h"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_and_durations_are_short() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1 KiB"),
            (1 << 20, "1 MiB"),
            ((1 << 20) - 1, "1 MiB"),
            (15_571_353_600, "14.5 GiB"),
            (150 << 30, "150 GiB"),
        ] {
            assert_eq!(size(bytes), text);
        }
        for (ms, text) in [
            (0, "0.0s"),
            (4200, "4.2s"),
            (59_000, "59s"),
            (123_000, "2min 03s"),
            (3_900_000, "1h 05min"),
            (90_000_000, "1d 01h"),
        ] {
            assert_eq!(duration(Duration::from_millis(ms)), text);
        }
        for (us, text) in [(400, "0.4ms"), (23_900, "23ms"), (1_000_000, "1.0s"), (123_000_000, "2min 03s")] {
            assert_eq!(fine_duration(Duration::from_micros(us)), text);
        }
    }
}
