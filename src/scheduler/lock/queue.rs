//! Requests, and the queue of each GPU.

use super::Class;
use crate::{
    api::*,
    entity::{Entity, ShareOwner},
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A request of an entity for the locks of one or several GPUs.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Request {
    pub key: QueueKey,
    /// Since when each client has waited, and for which GPUs.
    pub since: BTreeMap<ClientId, Time>,
    pub wants: BTreeMap<ClientId, GpuSet>,
    /// Other members of the gang are likely to ask within a moment: the request is not granted before this.
    pub gathers: Option<Time>,
    /// When the request goes before all others of its owner because of its age. `None`: never.
    pub ages: Option<Time>,
    /// It has aged: it goes before all others of its owner.
    pub aged: bool,
    /// Why the request is in no queue. `None`: it is queued.
    pub blocked: Option<Blocked>,
    /// The owner of its turns, while it is queued.
    pub owner: Option<ShareOwner>,
    /// The reason for waiting that its clients were last told.
    #[serde(with = "crate::encoding::wait_reason")]
    pub told: Option<WaitReason>,
}

impl Request {
    pub fn new(key: QueueKey, ages: Option<Time>, aged: bool) -> Self {
        let (since, wants) = (BTreeMap::new(), BTreeMap::new());
        Self { key, since, wants, gathers: None, ages, aged, blocked: None, owner: None, told: None }
    }

    /// All GPUs that its members want.
    pub fn gpus(&self) -> GpuSet {
        self.wants.values().flatten().copied().collect()
    }
}

/// Why a request is in no queue. It then reserves no memory and delays no other request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Blocked {
    /// It must wait until then: its mapping failed, or its owner has used its maximum.
    Until(Time),
    /// The process of a member is stopped.
    Stopped,
    /// It wants a lock that the client still holds, was asked to release, and cannot drain.
    Undrained,
    /// Unevictable memory on that GPU leaves too little room.
    Pinned(GpuId),
    /// That GPU is wanted or held by a client of a better class, and the request wants other GPUs as well.
    Behind(GpuId),
}

/// The position of a request in queues: by class, then those of a gang that has its turn, then by finish tag or arrival
/// (`at`), then, among the requests of one owner, by `rank`. The smallest is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueueKey {
    pub class: Class,
    pub has_turn: Reverse<bool>,
    pub at: Time,
    pub rank: Time,
    pub number: u64,
    /// Since when the request's owner has waited there, if none of its clients was served meanwhile.
    pub joined: Time,
}

/// The queue of a GPU, and its holders.
#[derive(Debug, Default, serde::Serialize, serde::Deserialize)]
pub(super) struct Line {
    /// Requests that want this GPU, in the order in which they are served.
    pub queue: BTreeSet<(QueueKey, Entity)>,
    /// The same requests by the owner of their turns.
    #[serde(with = "crate::encoding::pairs")]
    pub owners: BTreeMap<ShareOwner, BTreeSet<Entity>>,
    /// In the order of their grants.
    pub holders: BTreeMap<u64, ClientId>,
    /// Requests kept out of the queue by one of a better class, since they would block other GPUs meanwhile.
    pub behind: BTreeSet<Entity>,
    /// Requests that cannot be served while unevictable memory stays on this GPU.
    pub blocked_by_pinned: BTreeSet<Entity>,
    /// The GPU is idle, since then, because memory of this entity, which is next, is still being moved in.
    pub idle_for: Option<(Entity, Time)>,
    /// The first request, if it waits for other GPUs as well, and when this one lets it in, as far as is known.
    pub opens: Option<(Entity, Option<Time>)>,
    /// The last holder, if it was preempted.
    pub preempted: Option<ClientId>,
}

impl Line {
    pub fn join(&mut self, request: &Request, entity: Entity) {
        self.queue.insert((request.key, entity));
        if let Some(owner) = request.owner {
            self.owners.entry(owner).or_default().insert(entity);
        }
    }

    /// Returns whether it was queued.
    pub fn leave(&mut self, request: &Request, entity: Entity) -> bool {
        self.leave_owner(request.owner, entity);
        self.queue.remove(&(request.key, entity))
    }

    pub fn leave_owner(&mut self, owner: Option<ShareOwner>, entity: Entity) {
        let Some(owner) = owner else { return };
        if let Some(all) = self.owners.get_mut(&owner) {
            all.remove(&entity);
            if all.is_empty() {
                self.owners.remove(&owner);
            }
        }
    }
}
