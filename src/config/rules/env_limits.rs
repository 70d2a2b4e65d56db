//! Limits that a program sets for itself in its environment, with the syntax of a rule's values. A
//! value is ignored if it is invalid, or if the limit of the program's rule is at least as tight. A
//! remark then gives the reason.

use std::collections::BTreeMap;
use std::fmt;

use nvshare_wire::env_limits::LimitName;
use serde::Deserialize;
use serde::de::value::{Error, I64Deserializer, StrDeserializer};

use super::gpu_names::{self, GpuName};
use super::rule::Rule;
use super::values::{MemoryMax, Weight};
use crate::config::units;
use crate::scheduler::{self, Amount, RuleLimits};

/// Returns the name of the environment variable in which a program sets a limit.
pub fn variable(limit: LimitName) -> &'static str {
    limit.variable().to_str().unwrap_or_default()
}

/// Maximum number of characters of a value that a remark quotes.
const SHOWN: usize = 48;

/// A parsed value.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Value {
    MemoryMax(Amount),
    Weight(u16),
    AllowedGpus(Vec<GpuName>),
}

/// The limits from one program's environment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EnvLimits(BTreeMap<LimitName, EnvValue>);

#[derive(Debug, Clone, PartialEq, Eq)]
struct EnvValue {
    text: String,
    /// The parsed value, or a sentence that describes the mistake in it.
    value: Result<Value, String>,
}

impl EnvLimits {
    /// Sets or replaces a limit.
    pub fn set(&mut self, limit: LimitName, text: &str) {
        self.0.insert(limit, EnvValue { text: shortened(text), value: Value::read(limit, text) });
    }

    fn values(&self) -> impl Iterator<Item = &Value> {
        self.0.values().filter_map(|limit| limit.value.as_ref().ok())
    }

    /// Converts the limits to the state machine's types.
    pub fn limits(&self) -> scheduler::EnvLimits {
        let mut limits = scheduler::EnvLimits::default();
        for value in self.values() {
            match value {
                Value::MemoryMax(max) => limits.memory_max = *max,
                Value::Weight(weight) => limits.weight = Some(*weight),
                Value::AllowedGpus(_) => {}
            }
        }
        limits
    }

    /// Returns the GPUs that the program may use. `None` means all GPUs.
    pub fn allowed(&self) -> Option<&[GpuName]> {
        self.values().find_map(|value| match value {
            Value::AllowedGpus(names) => Some(names.as_slice()),
            _ => None,
        })
    }

    /// Returns the reason why a limit has no effect. Returns `None` if the limit is in effect or
    /// not set.
    pub fn remark(&self, limit: LimitName, rule: Option<&Rule>) -> Option<String> {
        let env = self.0.get(&limit)?;
        let name = variable(limit);
        let value = match &env.value {
            Ok(value) => value,
            Err(why) => return Some(format!("{name}: {why}")),
        };
        let without = value.no_tighter_than(rule.map_or_else(RuleLimits::default, |rule| rule.limits))?;
        let by = rule.map_or_else(|| "without a rule".into(), |rule| format!("by rule {rule}"));
        Some(format!(
            "{name}={} has no effect: the program already has {without} {by}, and this variable can only lower the \
             limit",
            env.text
        ))
    }

    /// Returns the remarks about all limits.
    pub fn remarks(&self, rule: Option<&Rule>) -> Vec<String> {
        self.0.keys().filter_map(|limit| self.remark(*limit, rule)).collect()
    }

    /// Returns the first mistake in a limit, with the variable's name.
    pub fn mistake(&self) -> Option<String> {
        let mut wrong = self.0.iter().filter_map(|(limit, env)| Some((limit, env.value.as_ref().err()?)));
        wrong.next().map(|(limit, why)| format!("{}: {why}", variable(*limit)))
    }

    /// Formats the limits in effect in the syntax of a rule: `memory-max 8 GiB, weight 10`.
    pub fn in_words(&self, rule: Option<&Rule>) -> String {
        let limits = self.0.keys().filter(|limit| self.remark(**limit, rule).is_none());
        let words = limits.filter_map(|limit| Some(self.0.get(limit)?.value.as_ref().ok()?.to_string()));
        words.collect::<Vec<_>>().join(", ")
    }
}

impl Value {
    fn read(limit: LimitName, text: &str) -> Result<Self, String> {
        let text = text.trim();
        Ok(match limit {
            LimitName::MemoryMax => Self::MemoryMax(parse::<MemoryMax>(text)?.0),
            LimitName::Weight => Self::Weight(parse::<Weight>(text)?.0),
            LimitName::AllowedGpus => {
                let names = text.split(',').map(str::trim);
                let read = |name| gpu_names::read(name).or_else(|_| gpu_names::read(&shortened(name)));
                Self::AllowedGpus(names.map(read).collect::<Result<_, _>>()?)
            }
        })
    }

    /// Returns the corresponding limit in `limits` if this value is no tighter than that limit.
    fn no_tighter_than(&self, limits: RuleLimits) -> Option<String> {
        let share = limits.share.unwrap_or_default();
        let (is_no_tighter, has) = match self {
            Self::MemoryMax(value) => {
                (is_as_much(*value, limits.memory_max), Self::MemoryMax(limits.memory_max).to_string())
            }
            Self::Weight(value) => (*value >= share.weight, Self::Weight(share.weight).to_string()),
            // The GPUs that a name denotes depend on the program, so two lists of GPUs are not
            // compared.
            Self::AllowedGpus(_) => (false, String::new()),
        };
        is_no_tighter.then_some(has)
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let amount = |amount: &Amount| match amount {
            Amount::Infinity => "infinity".to_owned(),
            Amount::Bytes(bytes) => units::size(*bytes),
            Amount::Percent(percent) => format!("{percent}%"),
        };
        match self {
            Self::MemoryMax(max) => write!(f, "memory-max {}", amount(max)),
            Self::Weight(0) => f.write_str("weight idle"),
            Self::Weight(weight) => write!(f, "weight {weight}"),
            Self::AllowedGpus(names) => {
                let names: Vec<String> = names.iter().map(GpuName::to_string).collect();
                write!(f, "allowed-gpus {}", names.join(" "))
            }
        }
    }
}

/// Returns true if `one` is at least as large as `other` on every GPU.
fn is_as_much(one: Amount, other: Amount) -> bool {
    match (one, other) {
        (Amount::Infinity, _) | (Amount::Percent(100), Amount::Percent(_)) => true,
        (Amount::Bytes(one), Amount::Bytes(other)) => one >= other,
        (Amount::Percent(one), Amount::Percent(other)) => one >= other,
        _ => false,
    }
}

/// Parses a value by the syntax of rules. Numbers may be written with or without quotes.
fn parse<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, String> {
    let read = |text: &str| match text.parse() {
        Ok(number) => T::deserialize(I64Deserializer::<Error>::new(number)),
        Err(_) => T::deserialize(StrDeserializer::<Error>::new(text)),
    };
    read(text).or_else(|_| read(&shortened(text))).map_err(|e| e.to_string())
}

/// Shortens a value for remarks. A cut is marked with `…`, which occurs in no valid value.
fn shortened(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use crate::config::Config;

    fn env_limits(values: &[(LimitName, &str)]) -> EnvLimits {
        let mut limits = EnvLimits::default();
        values.iter().for_each(|(limit, text)| limits.set(*limit, text));
        limits
    }

    fn rule(lines: &str) -> Rule {
        let text = format!("[[rule]]\nname = \"r\"\n{lines}");
        let rules = Config::parse(&text, Path::new("f")).unwrap_or_else(|e| panic!("{text}: {e}")).rules;
        rules.get(0).expect("a rule").clone()
    }

    #[test]
    fn values_use_the_syntax_of_rules() {
        let limits = env_limits(&[
            (LimitName::MemoryMax, "8G"),
            (LimitName::Weight, " 10 "),
            (LimitName::AllowedGpus, "GPU-8a6c, 1"),
        ]);
        let expected = scheduler::EnvLimits { memory_max: Amount::Bytes(8 << 30), weight: Some(10) };
        assert_eq!(limits.limits(), expected);
        let names = ["GPU-8a6c", "1"].map(|name| GpuName::parse(name).expect("a name"));
        assert_eq!(limits.allowed(), Some(names.as_slice()));
        assert_eq!(limits.in_words(None), "memory-max 8 GiB, weight 10, allowed-gpus GPU-8a6c 1");
        assert_eq!(limits.remarks(None), Vec::<String>::new());
        assert_eq!(env_limits(&[(LimitName::Weight, "idle")]).limits().weight, Some(0));
    }

    #[test]
    fn invalid_values_are_ignored_and_reported() {
        let amounts = "a size from 2M to 1T like \"8G\", a percentage from 1% to 100%, or \"infinity\" is allowed";
        let gpus =
            "the UUID of a GPU or MIG slice as nvidia-smi -L prints it, the start of a UUID, or the number of a GPU";
        let long = "1".repeat(300);
        for (limit, text, expected) in [
            (LimitName::MemoryMax, "lots", format!("NVSHARE_MEMORY_MAX: memory-max cannot be \"lots\": {amounts}")),
            (
                LimitName::Weight,
                "0",
                "NVSHARE_WEIGHT: weight cannot be 0: a number from 1 to 10000, or \"idle\" is allowed".into(),
            ),
            (
                LimitName::Weight,
                &long,
                format!(
                    "NVSHARE_WEIGHT: weight cannot be \"{}…\": a number from 1 to 10000, or \"idle\" is allowed",
                    "1".repeat(SHOWN)
                ),
            ),
            (
                LimitName::AllowedGpus,
                "0,first",
                format!("NVSHARE_ALLOWED_GPUS: allowed-gpus cannot have \"first\": {gpus} is allowed"),
            ),
        ] {
            let limits = env_limits(&[(limit, text)]);
            assert_eq!(limits.remark(limit, None), Some(expected.clone()), "{text}");
            assert_eq!((limits.limits(), limits.allowed()), (scheduler::EnvLimits::default(), None), "{text}");
            assert_eq!((limits.in_words(None), limits.remarks(None)), (String::new(), vec![expected]));
        }
    }

    #[test]
    fn values_no_tighter_than_the_rule_have_no_effect() {
        let rule = rule("memory-max = \"8G\"\nweight = 50");
        for (limit, text, has) in [
            (LimitName::MemoryMax, "8G", "memory-max 8 GiB"),
            (LimitName::MemoryMax, "infinity", "memory-max 8 GiB"),
            (LimitName::Weight, "50", "weight 50"),
        ] {
            let (limits, name) = (env_limits(&[(limit, text)]), variable(limit));
            let expected = format!(
                "{name}={text} has no effect: the program already has {has} by rule \"r\" (f:1), and this variable can only lower the limit"
            );
            assert_eq!(limits.remark(limit, Some(&rule)), Some(expected), "{text}");
            assert_eq!(limits.in_words(Some(&rule)), "");
        }
        // A percentage and a size can be compared only for a known GPU, so the percentage stays in
        // effect.
        for (limit, text) in [(LimitName::MemoryMax, "7G"), (LimitName::MemoryMax, "99%"), (LimitName::Weight, "idle")]
        {
            assert_eq!(env_limits(&[(limit, text)]).remark(limit, Some(&rule)), None, "{text}");
        }
        let none = env_limits(&[(LimitName::Weight, "101")]).remark(LimitName::Weight, None);
        let expected = "NVSHARE_WEIGHT=101 has no effect: the program already has weight 100 without a rule, and this variable \
             can only lower the limit";
        assert_eq!(none.as_deref(), Some(expected));
    }
}
