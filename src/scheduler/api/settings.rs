//! Settings that an administrator can change at run time.

use super::Placement;
use std::time::Duration;

/// The anti-thrash mode: whether holders of one GPU exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AntiThrash {
    /// One holder at a time, each for the whole time quantum.
    On,
    /// Turns are short while no memory has to move. Otherwise they last a multiple of the time to move it, at most the
    /// time quantum. Holders that fit together may run at the same time.
    #[default]
    Auto,
    /// Holders exclude each other only where their bytes do not fit together.
    Off,
}

/// The scheduling policy: in which order clients run, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// First come, first served; tenants take turns.
    #[default]
    Fcfs,
    /// Least attained service: clients that have used the least GPU time run first, which shortens mean completion
    /// time.
    Adaptive,
}

/// Settings that an administrator can change at run time.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Settings {
    /// How long a holder keeps the GPU lock while a client waits that cannot be admitted beside it.
    pub time_quantum: Duration,
    /// In [`AntiThrash::Auto`], quanta are shortened so that no client waits longer than this for its turn. 0: they are
    /// never shortened.
    pub max_wait: Duration,
    pub anti_thrash: AntiThrash,
    pub policy: PolicyName,
    /// Bytes of each GPU that no client gets.
    pub reserve: u64,
    /// Bytes that a CUDA context counts for until its size has been measured.
    pub context: u64,
    /// The period of the minimum and the maximum of a group's GPU time.
    pub time_period: Duration,
    /// How a GPU is chosen for programs that choose none.
    pub placement: Placement,
    /// How long a client is idle before it is put to sleep if others lack room. `None`: it is not put to sleep.
    #[serde(default)]
    pub sleep_after: Option<Duration>,
}

impl Settings {
    /// The length of a holder's turn while a client of a group below its minimum waits.
    pub(crate) fn slice(&self) -> Duration {
        self.time_period / 40
    }
}
