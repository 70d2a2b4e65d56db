//! The names of settings' values. The configuration file, the command line and D-Bus use the same
//! names.

use crate::scheduler::{AntiThrash, PolicyName};

pub fn anti_thrash_name(mode: AntiThrash) -> &'static str {
    match mode {
        AntiThrash::On => "on",
        AntiThrash::Auto => "auto",
        AntiThrash::Off => "off",
    }
}

pub const ANTI_THRASH: [AntiThrash; 3] = [AntiThrash::Auto, AntiThrash::On, AntiThrash::Off];

/// Parses a name that [`anti_thrash_name`] returned.
pub fn parse_anti_thrash(text: &str) -> Result<AntiThrash, String> {
    let mode = ANTI_THRASH.into_iter().find(|mode| anti_thrash_name(*mode) == text);
    mode.ok_or_else(|| format!("anti-thrash cannot be {text:?}: \"auto\", \"on\" or \"off\" are allowed"))
}

pub fn policy_name(policy: PolicyName) -> &'static str {
    match policy {
        PolicyName::Fcfs => "fcfs",
        PolicyName::Adaptive => "adaptive",
    }
}

pub const POLICY_NAMES: [PolicyName; 2] = [PolicyName::Fcfs, PolicyName::Adaptive];

/// Parses a name that [`policy_name`] returned.
pub fn parse_policy(text: &str) -> Result<PolicyName, String> {
    let policy = POLICY_NAMES.into_iter().find(|policy| policy_name(*policy) == text);
    policy.ok_or_else(|| format!("the policy cannot be {text:?}: \"fcfs\" or \"adaptive\" is allowed"))
}
