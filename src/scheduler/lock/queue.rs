//! Requests, and the queue of each GPU.

use super::Gang;
use crate::{api::*, fairness::Class};
use std::collections::{BTreeMap, BTreeSet};

/// What is granted together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Entity {
    Solo(ClientId),
    Gang(Gang),
}

impl Entity {
    pub fn gang(self) -> Option<Gang> {
        match self {
            Self::Solo(_) => None,
            Self::Gang(gang) => Some(gang),
        }
    }
}

/// An entity that waits.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Request {
    pub key: QueueKey,
    pub since: BTreeMap<ClientId, Time>,
    pub wants: BTreeMap<ClientId, GpuSet>,
    /// Others of the gang are likely to ask within a moment: it is not granted before them.
    pub gathers: Option<Time>,
    /// When it will have waited for so long that it goes before all others of its party.
    pub ages: Option<Time>,
    /// It has.
    pub aged: bool,
    /// Whether it stands in line, and if not, why.
    pub blocked: Option<Blocked>,
    /// What it was last told about why it waits.
    #[serde(with = "crate::encoding::wait_reason")]
    pub told: Option<WaitReason>,
}

impl Request {
    pub fn new(key: QueueKey, ages: Option<Time>, aged: bool) -> Self {
        let (since, wants) = (BTreeMap::new(), BTreeMap::new());
        Self { key, since, wants, gathers: None, ages, aged, blocked: None, told: None }
    }

    /// All GPUs that its members want.
    pub fn gpus(&self) -> GpuSet {
        self.wants.values().flatten().copied().collect()
    }
}

/// Why a request is not in line. It then reserves nothing, and holds up nobody.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Blocked {
    Until(Time),
    Stopped,
    /// It wants a lock that it has to release first, and cannot drain.
    Undrained,
    /// What is pinned on that GPU leaves too little.
    Pinned(GpuId),
    /// That GPU is somebody's of a better class, and it wants others as well.
    Behind(GpuId),
}

/// Where a request stands in line: among those of its class by its time, and among those of one party by their rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueueKey {
    pub class: Class,
    pub at: Time,
    pub rank: Time,
    pub number: u64,
    /// Since when its party has waited there, if nobody of it was served meanwhile.
    pub joined: Time,
}

/// The queue of a GPU, and its holders.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Line {
    /// Requests that want this GPU, in the order in which they are served.
    pub queue: BTreeSet<(QueueKey, Entity)>,
    /// In the order of their grants.
    pub holders: BTreeMap<u64, ClientId>,
    /// Requests that wait for one of a better class, and would keep other GPUs from others meanwhile.
    pub behind: BTreeSet<Entity>,
    /// Requests that cannot be served while what is pinned here stays.
    pub blocked_by_pinned: BTreeSet<Entity>,
    /// No client holds it, since memory of this entity, which is to have it, is on its way.
    pub idle_for: Option<(Entity, Time)>,
    pub preempted: Option<ClientId>,
}
