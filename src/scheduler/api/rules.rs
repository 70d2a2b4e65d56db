//! Limits that rules set for groups of clients, and limits that a client's own environment sets.

use std::time::Duration;

/// A group: clients that a rule counts together, such as all programs of a unit, container or user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct GroupId(pub u64);

/// A group and the limits that its rule sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Group {
    pub id: GroupId,
    pub limits: RuleLimits,
}

/// The limits that a rule sets for a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RuleLimits {
    /// The most memory that the group may allocate on each GPU, contexts included.
    pub memory_max: Amount,
    /// The part of the group's memory on each GPU that is evicted only if no unprotected memory can
    /// be evicted.
    pub memory_low: Option<Amount>,
    /// Bytes that the group may allocate over all GPUs. The limit covers GPU memory too, because
    /// all of it may have to be evicted to host memory. `None`: no limit.
    pub swap_max: Option<u64>,
    pub on_memory_full: OnMemoryFull,
    /// The idle time after which the group's clients are put to sleep. `None`: the setting applies.
    pub sleep_after: Option<SleepAfter>,
    /// The group's share of GPU time. `None`: its clients count together with the other clients of
    /// their tenant that have no share or, under [`Adaptive`](super::PolicyName::Adaptive), with all
    /// clients that have no share.
    pub share: Option<Share>,
    /// Makes the group's clients one gang, overriding any gang that they name themselves.
    pub gang: bool,
    /// The managed memory of the group's clients may exceed the GPU: the driver pages it.
    pub managed_beyond_gpu: bool,
}

/// Limits that a client's own environment sets. These limits apply to this client alone, and can
/// only tighten the limits of its group's rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct EnvLimits {
    /// The most memory that the client may allocate on each GPU, its context included.
    pub memory_max: Amount,
    /// The client's weight, if lower than the weight of its group or tenant. With weight 0, the
    /// client runs only while no other client wants the GPU.
    pub weight: Option<u16>,
}

/// The idle time after which a client is put to sleep if other clients lack room. Shorter times
/// order first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepAfter {
    Idle(Duration),
    Never,
}

impl SleepAfter {
    /// The idle time. `None`: the client is not put to sleep.
    pub fn time(self) -> Option<Duration> {
        match self {
            Self::Idle(time) => Some(time),
            Self::Never => None,
        }
    }
}

/// A group's share of the time of each GPU, and its precedence over other groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// The group's weight in the division of GPU time among the groups and tenants that want the
    /// GPU. Each tenant has weight 100 for its clients without a share. With weight 0, the group
    /// runs only while no other client wants the GPU.
    pub weight: u16,
    /// The minimum GPU time that the group receives if it needs that time, and the maximum, both in
    /// percent of [`Settings::time_period`](super::Settings::time_period).
    pub min: u8,
    pub max: u8,
    /// Clients with a higher priority never wait for the end of a lower-priority client's turn.
    pub priority: i8,
    /// While the group has used no more than its share, its clients do not wait for turns to end.
    pub interactive: bool,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 100, min: 0, max: 100, priority: 0, interactive: false }
    }
}

/// Whether an allocation beyond the group's limit or host memory fails or waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMemoryFull {
    /// The allocation fails.
    #[default]
    Fail,
    /// The allocation waits until other clients have freed enough memory. A group's oldest
    /// allocation is served first, and later allocations wait for it.
    Wait,
}

/// An amount of memory on each GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Amount {
    #[default]
    Infinity,
    Bytes(u64),
    /// Percent of the GPU's total memory.
    Percent(u8),
}

impl Amount {
    /// The amount in bytes on a GPU of `total` bytes. `None`: no limit.
    pub fn on(self, total: u64) -> Option<u64> {
        match self {
            Self::Infinity => None,
            Self::Bytes(bytes) => Some(bytes),
            Self::Percent(percent) => Some((u128::from(total) * u128::from(percent.min(100)) / 100) as u64),
        }
    }
}
