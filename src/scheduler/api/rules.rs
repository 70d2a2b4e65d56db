//! What rules say of groups of clients, and what a client's own environment says of it.

/// Clients that a rule counts together: all programs of a unit, a container or a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct GroupId(pub u64);

/// A group, with what it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Group {
    pub id: GroupId,
    pub limits: RuleLimits,
}

/// What a rule says of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RuleLimits {
    pub memory_max: Amount,
    /// This much of its memory stays on each GPU as long as other clients have memory to give.
    pub memory_low: Option<Amount>,
    /// Bytes that it may have in all, over all GPUs, since all of them may have to leave.
    pub swap_max: Option<u64>,
    pub on_memory_full: OnMemoryFull,
    /// `None`: its clients take turns with all others of their user.
    pub share: Option<Share>,
    /// Its clients are one gang, whatever their own gang is.
    pub gang: bool,
}

/// Limits that a program sets for itself by its environment. They hold for this client alone, beside those of its group's rule, and
/// only where they are tighter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct EnvLimits {
    pub memory_max: Amount,
    /// The most of its memory that its group's `memory_low` protects.
    pub memory_low: Option<Amount>,
    pub swap_max: Option<u64>,
    /// Whether its allocations wait for memory instead of failing; `None`: as the rule says.
    pub waits: Option<bool>,
    /// 0: only time that no other client wants.
    pub weight: Option<u16>,
    /// The most of the time that it gets: percent of [`Settings::time_period`](super::Settings::time_period).
    pub time_max: u8,
    pub priority: Option<i8>,
    /// It is not interactive, whatever its rule says.
    pub batch: bool,
}

impl Default for EnvLimits {
    fn default() -> Self {
        Self {
            memory_max: Amount::Infinity,
            memory_low: None,
            swap_max: None,
            waits: None,
            weight: None,
            time_max: 100,
            priority: None,
            batch: false,
        }
    }
}

/// How much of each GPU's time a group gets, and how soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// Its part of the time that is divided among groups and users who want it, relative to their weights (a user has 100).
    /// 0: only time that no other client wants.
    pub weight: u16,
    /// Percent of [`Settings::time_period`](super::Settings::time_period) that it gets at least, if it wants so much, and at most.
    pub min: u8,
    pub max: u8,
    /// Clients with a higher priority never wait for clients with a lower one.
    pub priority: i8,
    /// As long as it has used no more than its share, it does not wait for turns to end.
    pub interactive: bool,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 100, min: 0, max: 100, priority: 0, interactive: false }
    }
}

/// What happens to an allocation for which there is no room now, under a group's limit or in host memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMemoryFull {
    #[default]
    Fail,
    /// It waits until others have freed enough.
    Wait(WaitOrder),
}

/// In which order waiting allocations of a group get memory that becomes free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WaitOrder {
    /// The first; the others wait until it has been served.
    #[default]
    Fifo,
    /// The largest that fits.
    BestFit,
    /// The last to come that fits.
    MostRecent,
    /// Any that fits.
    Random,
}

/// An amount of memory on each GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Amount {
    #[default]
    Infinity,
    Bytes(u64),
    /// Of the whole GPU.
    Percent(u8),
}

impl Amount {
    /// On a GPU of that size; `None`: there is no bound.
    pub fn on(self, total: u64) -> Option<u64> {
        match self {
            Self::Infinity => None,
            Self::Bytes(bytes) => Some(bytes),
            Self::Percent(percent) => Some((u128::from(total) * u128::from(percent.min(100)) / 100) as u64),
        }
    }
}
