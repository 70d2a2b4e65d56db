//! What the values of a rule can be, and what is said of others.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::scheduler::MemoryMax;
use crate::units;

/// The least that a limit can be: the GPU's own granularity; and the most, as everywhere in the file.
const LEAST: u64 = 2 << 20;
const MOST: u64 = 1 << 40;

/// A size, a part of a GPU, or all there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Amount(pub MemoryMax);

/// What counts for how much when something is divided; 0: what nobody else wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weight(pub u16);

/// A part of the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Percent(pub u8);

/// Who goes before whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Priority(pub i8);

impl Amount {
    const ALLOWED: &'static str = "a size from 2M to 1T like \"8G\", a part of a GPU from 1% to 100%, or \"infinity\"";

    fn bytes(bytes: u64) -> Option<Self> {
        (LEAST..=MOST).contains(&bytes).then_some(Self(MemoryMax::Bytes(bytes)))
    }

    fn parse(text: &str) -> Option<Self> {
        if text == "infinity" {
            return Some(Self(MemoryMax::Infinity));
        }
        match text.strip_suffix('%') {
            Some(number) => {
                let percent = number.trim().parse().ok().filter(|percent| (1..=100).contains(percent));
                percent.map(|percent| Self(MemoryMax::Percent(percent)))
            }
            None => units::parse_size(text).ok().and_then(Self::bytes),
        }
    }
}

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(AmountVisitor)
    }
}

struct AmountVisitor;

impl Visitor<'_> for AmountVisitor {
    type Value = Amount;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} for memory-max", Amount::ALLOWED)
    }

    fn visit_i64<E: de::Error>(self, value: i64) -> Result<Amount, E> {
        let amount = u64::try_from(value).ok().and_then(Amount::bytes);
        amount.ok_or_else(|| E::custom(format!("memory-max cannot be {value}: {} is allowed", Amount::ALLOWED)))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<Amount, E> {
        let amount = Amount::parse(value);
        amount.ok_or_else(|| E::custom(format!("memory-max cannot be {value:?}: {} is allowed", Amount::ALLOWED)))
    }
}

/// A number within bounds, or a text.
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
        let allowed = "a part of the time from \"1%\" to \"100%\"";
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
