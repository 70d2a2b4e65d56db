//! Limits that rules set for groups of clients, and limits that a client's own environment sets.

use std::time::Duration;

/// A group: the clients that a rule counts together, such as all programs of a unit, a container or a user.
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
    /// The most that the group may allocate on each GPU, contexts included.
    pub memory_max: Amount,
    /// This much of the group's memory on each GPU is evicted only when no other client has evictable memory.
    pub memory_low: Option<Amount>,
    /// Bytes that the group may allocate over all GPUs: all of them may have to be evicted to host memory. `None`: no
    /// limit.
    pub swap_max: Option<u64>,
    pub on_memory_full: OnMemoryFull,
    /// When its clients are put to sleep. `None`: the setting applies.
    #[serde(default)]
    pub sleep_after: Option<SleepAfter>,
    /// The group's share of GPU time. `None`: its clients take turns with all other clients of their tenant.
    pub share: Option<Share>,
    /// Makes the group's clients one gang, whatever gang they name themselves.
    pub gang: bool,
}

/// Limits that a program sets for itself by its environment. They apply to this client alone, beside the limits of its
/// group's rule, and only where they are tighter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct EnvLimits {
    /// The most that the client may allocate on each GPU, its context included.
    pub memory_max: Amount,
    /// The client's weight, if that is lower than its owner's. 0: it runs only while no other client wants the GPU.
    pub weight: Option<u16>,
}

/// How long a client is idle before it is put to sleep if others lack room. Shorter times order first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SleepAfter {
    Idle(Duration),
    Never,
}

impl SleepAfter {
    /// `None`: the client is not put to sleep.
    pub fn time(self) -> Option<Duration> {
        match self {
            Self::Idle(time) => Some(time),
            Self::Never => None,
        }
    }
}

/// A group's share of the time of each GPU, and its precedence over others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// The group's part of the time that is divided among the groups and tenants that want the GPU, relative to their
    /// weights. A tenant has weight 100. 0: the group runs only while no other client wants the GPU.
    pub weight: u16,
    /// The least GPU time that the group gets if it wants that much, and the most, in percent of
    /// [`Settings::time_period`](super::Settings::time_period).
    pub min: u8,
    pub max: u8,
    /// Clients with a higher priority never wait for the turn of a client with a lower one to end.
    pub priority: i8,
    /// While the group has used no more than its share, it does not wait for turns to end.
    pub interactive: bool,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 100, min: 0, max: 100, priority: 0, interactive: false }
    }
}

/// The handling of an allocation that finds no room, under a group's limit or in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMemoryFull {
    /// It fails.
    #[default]
    Fail,
    /// It waits until other clients have freed enough. A group's oldest allocation is served first, and later ones wait
    /// for it.
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
