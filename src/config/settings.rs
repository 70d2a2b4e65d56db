//! The syntax of the scheduler's settings: the valid values and the parser of each key.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use super::names::{parse_anti_thrash, parse_policy};
use super::scalar::Scalar;
use super::units;
use crate::scheduler::{AntiThrash, Placement, PolicyName, Settings};

/// Valid time quanta in whole seconds. The original nvshare also defaults to 30 s.
pub const TIME_QUANTUM_SECONDS: RangeInclusive<u64> = 1..=3600;

/// Valid values of the longest wait in whole seconds. 0 means no bound.
pub const MAX_WAIT_SECONDS: RangeInclusive<u64> = 0..=3600;

/// Valid periods, in whole seconds, over which shares of GPU time are counted.
pub const TIME_PERIOD_SECONDS: RangeInclusive<u64> = 1..=3600;

/// Valid idle times, in whole seconds, after which programs are put to sleep.
pub const SLEEP_AFTER_SECONDS: RangeInclusive<u64> = 1..=86_400;

/// Valid retention times of usage records, in whole seconds: from a day to ten years.
pub const KEEP_SECONDS: RangeInclusive<u64> = 86_400..=3_660 * 86_400;

/// Valid durations, in whole seconds, of a release of the driver.
pub const RELEASE_SECONDS: RangeInclusive<u64> = 1..=3600;

/// Valid durations, in whole seconds, of a room before it must be renewed, and the default
/// duration.
pub const ROOM_SECONDS: RangeInclusive<u64> = 1..=86_400;
pub const DEFAULT_ROOM: Duration = Duration::from_secs(3600);

/// The scheduler's default settings.
pub fn defaults() -> Settings {
    Settings {
        time_quantum: Duration::from_secs(30),
        // A program that waits for two other programs waits for two turns. The bound of 60 s leaves
        // each of these turns the default quantum of 30 s. With more programs, turns are shorter.
        max_wait: Duration::from_secs(60),
        anti_thrash: AntiThrash::Auto,
        policy: PolicyName::Fcfs,
        reserve: 512 << 20,
        // A bare context uses about 527 MiB on an H200, and loaded libraries use more.
        context: 600 << 20,
        time_period: Duration::from_secs(10),
        placement: Placement::None,
        sleep_after: Some(Duration::from_secs(300)),
    }
}

/// Checks the time quantum, or returns a sentence with its valid values.
pub fn time_quantum(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "time quantum", TIME_QUANTUM_SECONDS)
}

/// Checks the longest wait, or returns a sentence with its valid values.
pub fn max_wait(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "longest wait", MAX_WAIT_SECONDS)
}

/// Checks the duration of a release of the driver, or returns a sentence with its valid values.
pub fn release(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "duration of a release", RELEASE_SECONDS)
}

/// Checks the duration of a room, or returns a sentence with its valid values.
pub fn room(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "duration of a room", ROOM_SECONDS)
}

fn time_period(value: Duration) -> Result<Duration, String> {
    whole_seconds(value, "time period", TIME_PERIOD_SECONDS)
}

fn whole_seconds(value: Duration, what: &str, allowed: RangeInclusive<u64>) -> Result<Duration, String> {
    let seconds = value.as_secs();
    if value.subsec_nanos() == 0 && allowed.contains(&seconds) {
        return Ok(value);
    }
    let (min, max) = (allowed.start(), allowed.end());
    let given = if value.subsec_nanos() == 0 { seconds.to_string() } else { value.as_secs_f64().to_string() };
    Err(format!("the {what} cannot be {given} seconds: whole seconds from {min} to {max} are allowed"))
}

/// The keys of `[memory]` that belong to the scheduler.
#[derive(Debug, Clone, Copy, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct MemorySection {
    #[serde(default, deserialize_with = "read_reserve")]
    pub reserve: Option<u64>,
    #[serde(default, deserialize_with = "read_context")]
    pub context: Option<u64>,
}

/// `[accounting]`: records of the programs' GPU usage.
#[derive(Debug, Clone, Copy, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct AccountingSection {
    #[serde(default, deserialize_with = "read_keep_usage")]
    pub keep: Option<Duration>,
}

fn read_keep_usage<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "accounting.keep", |value| {
        whole_seconds(value, "time for which records are kept", KEEP_SECONDS)
    })
}

pub fn read_time_quantum<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "time-quantum", time_quantum)
}

pub fn read_max_wait<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "max-wait", max_wait)
}

pub fn read_time_period<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    read_duration(from, "time-period", time_period)
}

/// `Some(None)` means `never`.
pub fn read_sleep_after<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Option<Duration>>, D::Error> {
    sleep_after(from).map(Some)
}

/// `None` means `never`.
pub fn sleep_after<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Duration>, D::Error> {
    let scalar = Scalar::read(from, "sleep-after", "a duration in whole seconds, like \"5min\", or \"never\"")?;
    let parsed = match scalar {
        Scalar::Text(text) if text == "never" => return Ok(None),
        Scalar::Number(seconds) => Ok(Duration::from_secs(seconds)),
        Scalar::Text(text) => units::parse_duration(&text),
    };
    let checked = parsed.and_then(|value| whole_seconds(value, "time until programs sleep", SLEEP_AFTER_SECONDS));
    checked.map(Some).map_err(|e| de::Error::custom(format!("sleep-after: {e}")))
}

fn read_duration<'de, D: Deserializer<'de>>(
    from: D,
    key: &'static str,
    check: impl FnOnce(Duration) -> Result<Duration, String>,
) -> Result<Option<Duration>, D::Error> {
    let scalar = Scalar::read(from, key, "a duration in whole seconds, like \"30s\"")?;
    let parsed = match scalar {
        Scalar::Number(seconds) => Ok(Duration::from_secs(seconds)),
        Scalar::Text(text) => units::parse_duration(&text),
    };
    parsed.and_then(check).map(Some).map_err(|e| de::Error::custom(format!("{key}: {e}")))
}

pub fn read_anti_thrash<'de, D: Deserializer<'de>>(from: D) -> Result<Option<AntiThrash>, D::Error> {
    match Scalar::read(from, "anti-thrash", "\"auto\", \"on\" or \"off\"")? {
        Scalar::Text(text) => parse_anti_thrash(&text).map(Some),
        Scalar::Number(number) => {
            Err(format!("anti-thrash cannot be {number}: \"auto\", \"on\" or \"off\" are allowed"))
        }
    }
    .map_err(de::Error::custom)
}

pub fn read_policy<'de, D: Deserializer<'de>>(from: D) -> Result<Option<PolicyName>, D::Error> {
    match Scalar::read(from, "policy", "\"fcfs\" or \"adaptive\"")? {
        Scalar::Text(text) => parse_policy(&text).map(Some),
        Scalar::Number(number) => Err(format!("the policy cannot be {number}: \"fcfs\" or \"adaptive\" is allowed")),
    }
    .map_err(de::Error::custom)
}

pub fn read_placement<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Placement>, D::Error> {
    let allowed = "\"none\", \"pack\" or \"spread\"";
    let given = match Scalar::read(from, "placement", allowed)? {
        Scalar::Text(text) => match &*text {
            "none" => return Ok(Some(Placement::None)),
            "pack" => return Ok(Some(Placement::Pack)),
            "spread" => return Ok(Some(Placement::Spread)),
            _ => format!("{text:?}"),
        },
        Scalar::Number(number) => number.to_string(),
    };
    Err(de::Error::custom(format!("placement cannot be {given}: {allowed} are allowed")))
}

pub(super) fn read_max_clients<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u32>, D::Error> {
    match Scalar::read(from, "max-clients-per-tenant", "a number from 1 to 65535")? {
        Scalar::Number(number @ 1..=65535) => Ok(Some(number as u32)),
        Scalar::Number(other) => Err(other.to_string()),
        Scalar::Text(text) => Err(format!("{text:?}")),
    }
    .map_err(|given| de::Error::custom(format!("max-clients-per-tenant cannot be {given}: 1 to 65535 are allowed")))
}

pub(super) fn read_reserve<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    read_size(from, "memory.reserve")
}

pub(super) fn read_context<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    read_size(from, "memory.context")
}

/// The largest valid size in bytes. No GPU has that much memory, so a larger number has the wrong
/// unit.
pub const MAX_MEMORY: u64 = 1 << 40;

fn read_size<'de, D: Deserializer<'de>>(from: D, key: &'static str) -> Result<Option<u64>, D::Error> {
    let bytes = match Scalar::read(from, key, "a size, like \"512M\"")? {
        Scalar::Number(bytes) => Ok(bytes),
        Scalar::Text(text) => units::parse_size(&text),
    };
    match bytes {
        Ok(bytes) if bytes <= MAX_MEMORY => Ok(Some(bytes)),
        Ok(_) => Err(de::Error::custom(format!("{key} is too large: at most 1T is allowed"))),
        Err(e) => Err(de::Error::custom(format!("{key}: {e}"))),
    }
}
