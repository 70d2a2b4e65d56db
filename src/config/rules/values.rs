//! The types of a rule's values, with messages about invalid values.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::config::{settings, units};
use crate::scheduler::{Amount, SleepAfter};

/// The smallest and the largest limit, in bytes. `LEAST` is the granularity of GPU memory. `MOST`
/// applies to all sizes in the file.
const LEAST: u64 = 2 << 20;
const MOST: u64 = 1 << 40;

/// The maximum memory of a group on each GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryMax(pub Amount);

/// Memory of a group on each GPU that is evicted only after other memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryLow(pub Amount);

/// The maximum memory that a group may allocate, summed over all GPUs. `None` means no limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SwapMax(pub Option<u64>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnFull {
    Fail,
    Wait,
}

/// The idle time after which programs are put to sleep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleTime(pub SleepAfter);

impl<'de> Deserialize<'de> for IdleTime {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        settings::sleep_after(from).map(|after| Self(after.map_or(SleepAfter::Never, SleepAfter::Idle)))
    }
}

/// Formats the idle time in the syntax of the configuration.
pub fn idle_time(after: SleepAfter) -> String {
    after.time().map_or_else(|| "never".into(), |time| format!("{}s", time.as_secs()))
}

/// Weight of a share. A program of weight 0 gets only time that no other program wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight(pub u16);

/// A fraction of GPU time, in percent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Percent(pub u8);

/// The priority. Programs with a higher priority run first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Priority(pub i8);

impl MemoryMax {
    const KEY: &'static str = "memory-max";
}

impl MemoryLow {
    const KEY: &'static str = "memory-low";
}

impl SwapMax {
    const KEY: &'static str = "swap-max";
}

/// Parses an amount of memory, which is a size, `infinity` or, if allowed, a percentage of a GPU.
struct Memory {
    key: &'static str,
    of_a_gpu: bool,
}

impl Memory {
    fn allowed(&self) -> &'static str {
        if self.of_a_gpu {
            "a size from 2M to 1T like \"8G\", a percentage from 1% to 100%, or \"infinity\""
        } else {
            "a size from 2M to 1T like \"8G\", or \"infinity\""
        }
    }

    fn bytes(bytes: u64) -> Option<Amount> {
        (LEAST..=MOST).contains(&bytes).then_some(Amount::Bytes(bytes))
    }

    fn parse(&self, text: &str) -> Option<Amount> {
        if text == "infinity" {
            return Some(Amount::Infinity);
        }
        match text.strip_suffix('%') {
            Some(number) => {
                let percent = number.trim().parse().ok().filter(|percent| (1..=100).contains(percent));
                percent.filter(|_| self.of_a_gpu).map(Amount::Percent)
            }
            None => units::parse_size(text).ok().and_then(Self::bytes),
        }
    }
}

impl<'de> Deserialize<'de> for MemoryMax {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Memory { key: Self::KEY, of_a_gpu: true }).map(Self)
    }
}

impl<'de> Deserialize<'de> for MemoryLow {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Memory { key: Self::KEY, of_a_gpu: true }).map(Self)
    }
}

impl<'de> Deserialize<'de> for SwapMax {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let amount = from.deserialize_any(Memory { key: Self::KEY, of_a_gpu: false })?;
        Ok(Self(match amount {
            Amount::Bytes(bytes) => Some(bytes),
            Amount::Infinity | Amount::Percent(_) => None,
        }))
    }
}

impl Visitor<'_> for Memory {
    type Value = Amount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.allowed(), self.key)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Amount, E> {
        let amount = u64::try_from(value).ok().and_then(Self::bytes);
        amount.ok_or_else(|| E::custom(format!("{} cannot be {value}: {} is allowed", self.key, self.allowed())))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Amount, E> {
        let amount = self.parse(value);
        amount.ok_or_else(|| E::custom(format!("{} cannot be {value:?}: {} is allowed", self.key, self.allowed())))
    }
}

/// Parses a number within bounds, or a text that stands for a number.
struct Small {
    key: &'static str,
    allowed: &'static str,
    number: fn(i64) -> Option<i64>,
    text: fn(&str) -> Option<i64>,
}

impl Visitor<'_> for Small {
    type Value = i64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for {}", self.allowed, self.key)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<i64, E> {
        let wrong = || E::custom(format!("{} cannot be {value}: {} is allowed", self.key, self.allowed));
        (self.number)(value).ok_or_else(wrong)
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<i64, E> {
        let wrong = || E::custom(format!("{} cannot be {value:?}: {} is allowed", self.key, self.allowed));
        (self.text)(value).ok_or_else(wrong)
    }
}

impl<'de> Deserialize<'de> for Weight {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = |value| Some(value).filter(|value| (1..=10_000).contains(value));
        let text = |text: &str| (text == "idle").then_some(0);
        let allowed = "a number from 1 to 10000, or \"idle\"";
        from.deserialize_any(Small { key: "weight", allowed, number, text }).map(|value| Self(value as u16))
    }
}

impl<'de> Deserialize<'de> for Percent {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = |text: &str| {
            let number = text.strip_suffix('%')?.trim().parse().ok();
            number.filter(|percent| (1..=100).contains(percent))
        };
        let allowed = "a percentage from \"1%\" to \"100%\"";
        from.deserialize_any(Small { key: "time-min and time-max", allowed, number: |_| None, text })
            .map(|value| Self(value as u8))
    }
}

impl<'de> Deserialize<'de> for Priority {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let number = |value| Some(value).filter(|value| (-100..=100).contains(value));
        let allowed = "a number from -100 to 100";
        from.deserialize_any(Small { key: "priority", allowed, number, text: |_| None }).map(|value| Self(value as i8))
    }
}
