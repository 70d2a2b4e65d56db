//! Settings that an administrator can change at run time.

use super::Placement;
use std::time::Duration;

/// The anti-thrash mode: whether holders of one GPU exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AntiThrash {
    /// One holder at a time, each for the whole time quantum.
    On,
    /// Turns are short while no memory has to move. Otherwise a turn lasts a multiple of the time
    /// that moving the memory takes, at most the time quantum. Holders that fit together may run at
    /// the same time.
    #[default]
    Auto,
    /// Holders exclude each other only if their memory does not fit together.
    Off,
}

/// The scheduling policy: the order and the length of clients' turns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// First come, first served; tenants take turns.
    #[default]
    Fcfs,
    /// Least attained service: clients that have used the least GPU time run first. This order
    /// shortens the mean completion time.
    Adaptive,
}

/// Settings that an administrator can change at run time.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Settings {
    /// How long a holder keeps the GPU lock while a client that cannot be admitted beside it waits.
    pub time_quantum: Duration,
    /// In [`AntiThrash::Auto`], turns are shortened so that no client waits longer than this for
    /// its turn. 0: turns are never shortened.
    pub max_wait: Duration,
    pub anti_thrash: AntiThrash,
    pub policy: PolicyName,
    /// Bytes of each GPU that are never given to clients.
    pub reserve: u64,
    /// Assumed size in bytes of a CUDA context, until the context has been measured.
    pub context: u64,
    /// The period over which a group's minimum and maximum GPU time are counted.
    pub time_period: Duration,
    /// How a GPU is chosen for programs that do not choose one.
    pub placement: Placement,
    /// The idle time after which a client is put to sleep if other clients lack room. `None`:
    /// clients are not put to sleep.
    pub sleep_after: Option<Duration>,
}

/// The latest time (34 years). Later times are clamped to this time, so that no sum of times
/// overflows.
pub(crate) const MAX_TIME: Duration = Duration::from_secs(1 << 30);

impl Settings {
    /// Clamps durations, so that no sum of times overflows.
    pub(crate) fn clamp(&mut self) {
        self.time_quantum = self.time_quantum.min(MAX_TIME);
        self.time_period = self.time_period.min(MAX_TIME / 100);
        self.sleep_after = self.sleep_after.map(|after| after.min(MAX_TIME));
    }

    /// The length of a holder's turn while a waiting client's group is below its minimum.
    pub(crate) fn slice(&self) -> Duration {
        self.time_period / 40
    }

    /// The longest turn with which the last of `waiters` clients waits no longer than `max_wait`.
    pub(crate) fn turn_within_max_wait(&self, waiters: u32) -> Duration {
        if self.max_wait.is_zero() { Duration::MAX } else { self.max_wait / waiters.max(1) }
    }
}
