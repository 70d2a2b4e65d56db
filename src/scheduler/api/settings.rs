//! What an administrator can change while everything runs.

use crate::placement::Placement;
use std::time::Duration;

/// Whether holders of one GPU exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AntiThrash {
    /// One holder at a time, each for the full time quantum.
    On,
    /// Turns are short while nothing must move, and last the time quantum when memory must.
    #[default]
    Auto,
    /// Holders exclude each other only where their bytes do not fit together.
    Off,
}

/// In what order clients run, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// First come, first served; users take turns.
    #[default]
    Fcfs,
    /// Least attained service: clients that have used the least GPU time run first, which shortens mean completion time.
    Adaptive,
}

/// What an administrator can change while everything runs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Settings {
    /// How long a holder keeps the GPU lock while a client waits that cannot be admitted beside it.
    pub time_quantum: Duration,
    /// In [`AntiThrash::Auto`], quanta are shortened so that no client waits longer than this for its turn; 0: they never are.
    pub max_wait: Duration,
    pub anti_thrash: AntiThrash,
    pub policy: PolicyName,
    /// Bytes of each GPU that no client gets.
    pub reserve: u64,
    /// Bytes that a context counts for until its size has been measured.
    pub context: u64,
    /// The period of which a group has its minimum and its maximum of the time.
    pub time_period: Duration,
    /// Where a program runs that chooses no GPU.
    pub placement: Placement,
}

impl Settings {
    /// How long a group runs at a time when it is below its minimum.
    pub(crate) fn slice(&self) -> Duration {
        self.time_period / 40
    }
}
