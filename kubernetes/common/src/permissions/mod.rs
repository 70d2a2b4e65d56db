//! The keys that pods of a namespace may set, and the keys' defaults. The scheduler decides which
//! values are valid. If a permission depends on a value, this module parses the value as the
//! scheduler does. [`file`] reads the permissions from the agent's configuration.

pub mod file;

use std::collections::BTreeSet;

use nvshare::config::rules::{Origin, read_one};
use nvshare::scheduler::Share;
use toml::{Table, Value};

/// The keys that a pod can set.
pub use nvshare::config::rules::LIMIT_KEYS as KEYS;

/// The keys that pods may set by default. Each of these keys only restricts the pod itself, or
/// chooses the pods that share the pod's GPUs. Keys that can take resources from other programs are
/// excluded.
const HARMLESS: [&str; 10] = [
    "memory-max",
    "swap-max",
    "on-memory-full",
    "weight",
    "time-max",
    "priority",
    "gang",
    "allowed-gpus",
    "affinity",
    "anti-affinity",
];

/// The highest permitted values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ceilings {
    pub weight: u16,
    pub time_min: u8,
    pub priority: i8,
}

/// The keys that pods may set.
#[derive(Debug, Clone, PartialEq)]
pub struct Permissions {
    pub may_set: BTreeSet<&'static str>,
    pub ceilings: Ceilings,
    /// The default weight of a pod. `None`: a pod without a weight or another key for shares of time
    /// gets no share of its own. Under the policy `fcfs`, it takes turns as one tenant. Under `adaptive`,
    /// its programs count together with all other programs without a share.
    pub weight: Option<Value>,
}

impl Default for Permissions {
    fn default() -> Self {
        let default = Share::default();
        Self {
            may_set: HARMLESS.into(),
            ceilings: Ceilings { weight: default.weight, time_min: default.max, priority: default.priority },
            weight: None,
        }
    }
}

impl Permissions {
    /// Checks that a pod in the namespace may set a key to a value.
    ///
    /// # Errors
    /// Returns a sentence with the allowed values.
    pub fn check(&self, namespace: &str, key: &str, value: &Value) -> Result<(), String> {
        if !self.may_set.contains(key) {
            return Err(format!("pods of namespace {namespace} may not set it"));
        }
        // The scheduler rejects an invalid value and lists the valid values, so this function
        // accepts it.
        let Ok(share) = share(key, value) else { return Ok(()) };
        let Ceilings { weight, time_min, priority } = self.ceilings;
        let most = match key {
            "weight" if share.weight > weight => weight.to_string(),
            "time-min" if share.min > time_min => format!("{time_min}%"),
            "priority" if share.priority > priority => priority.to_string(),
            _ => return Ok(()),
        };
        Err(format!("pods of namespace {namespace} may set at most {most}"))
    }
}

/// Parses a key for a share of time as the scheduler does.
///
/// # Errors
/// Returns a sentence about the mistake.
pub fn share(key: &str, value: &Value) -> Result<Share, String> {
    let table = Table::from_iter([(key.to_owned(), value.clone())]);
    let rule = read_one(&table.to_string(), Origin { file: Default::default(), line: 0 })?;
    Ok(rule.limits.share.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(permissions: &Permissions, key: &str, value: impl Into<Value>) -> String {
        permissions.check("team-a", key, &value.into()).err().unwrap_or_default()
    }

    #[test]
    fn default_permissions_exclude_keys_that_disadvantage_other_pods() {
        let default = Permissions::default();
        for (key, value) in [
            ("memory-max", "100%"),
            ("swap-max", "8G"),
            ("on-memory-full", "wait"),
            ("time-max", "20%"),
            ("weight", "idle"),
            ("affinity", "a"),
            ("anti-affinity", "a"),
        ] {
            assert_eq!(said(&default, key, value), "", "{key}");
        }
        assert_eq!(said(&default, "gang", true), "");
        for key in ["memory-low", "time-min", "interactive", "exclusion"] {
            assert_eq!(said(&default, key, "1%"), "pods of namespace team-a may not set it", "{key}");
        }
        assert_eq!(said(&default, "weight", 100), "");
        assert_eq!(said(&default, "weight", 101), "pods of namespace team-a may set at most 100");
        assert_eq!((said(&default, "priority", -5), said(&default, "priority", 0)), Default::default());
        assert_eq!(said(&default, "priority", 1), "pods of namespace team-a may set at most 0");
    }

    #[test]
    fn a_ceiling_applies_to_every_notation_of_a_value() {
        let mut permissions = Permissions::default();
        permissions.may_set.insert("time-min");
        permissions.ceilings.time_min = 20;
        for least in ["21%", "21 %", "+21%", "100%", "021%"] {
            let refused_here = !said(&permissions, "time-min", least).is_empty();
            assert!(refused_here || share("time-min", &least.into()).is_err(), "{least}");
        }
        assert_eq!(said(&permissions, "time-min", "20%"), "");
        // Values that the scheduler rejects anyway are not checked.
        assert_eq!(
            (said(&permissions, "weight", "heavy"), said(&permissions, "weight", 1_000_000)),
            Default::default()
        );
    }
}
