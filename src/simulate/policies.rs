//! The table of the compared policies.

use crate::scheduler::{AntiThrash, PolicyName, Settings};

/// A combination of mode, order and rules under which a scenario is simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// The name in the output and on the command line.
    pub name: &'static str,
    pub mode: AntiThrash,
    pub order: PolicyName,
    /// Whether the jobs' rules apply.
    pub rules: bool,
}

/// All policies, in the order of the output, each under every mode. `fcfs` is first come, first
/// served. `rules` is `fcfs` with the jobs' rules, which can set shares. `adaptive` first runs
/// programs that have used the least GPU time. `both` is `adaptive` with the jobs' rules.
pub const POLICIES: [Policy; 12] = [
    Policy { name: "fcfs-on", mode: AntiThrash::On, order: PolicyName::Fcfs, rules: false },
    Policy { name: "fcfs-auto", mode: AntiThrash::Auto, order: PolicyName::Fcfs, rules: false },
    Policy { name: "fcfs-off", mode: AntiThrash::Off, order: PolicyName::Fcfs, rules: false },
    Policy { name: "adaptive-on", mode: AntiThrash::On, order: PolicyName::Adaptive, rules: false },
    Policy { name: "adaptive-auto", mode: AntiThrash::Auto, order: PolicyName::Adaptive, rules: false },
    Policy { name: "adaptive-off", mode: AntiThrash::Off, order: PolicyName::Adaptive, rules: false },
    Policy { name: "rules-on", mode: AntiThrash::On, order: PolicyName::Fcfs, rules: true },
    Policy { name: "rules-auto", mode: AntiThrash::Auto, order: PolicyName::Fcfs, rules: true },
    Policy { name: "rules-off", mode: AntiThrash::Off, order: PolicyName::Fcfs, rules: true },
    Policy { name: "both-on", mode: AntiThrash::On, order: PolicyName::Adaptive, rules: true },
    Policy { name: "both-auto", mode: AntiThrash::Auto, order: PolicyName::Adaptive, rules: true },
    Policy { name: "both-off", mode: AntiThrash::Off, order: PolicyName::Adaptive, rules: true },
];

/// The name of the baseline, in which programs run one after another.
pub const SERIAL: &str = "serial";

impl Policy {
    pub fn by_name(name: &str) -> Option<Self> {
        POLICIES.into_iter().find(|policy| policy.name == name)
    }

    /// Returns the scenario's settings under this policy.
    pub fn settings(&self, settings: &Settings) -> Settings {
        Settings { anti_thrash: self.mode, policy: self.order, ..settings.clone() }
    }
}
