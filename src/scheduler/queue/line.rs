//! Requests, and the queue of each GPU.

use super::Class;
use crate::{
    api::*,
    entity::{Entity, ShareOwner},
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// A request of an entity for the locks of one or several GPUs.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
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
    /// Among the requests of its owner for a GPU, its position follows from its rank and number alone: whatever the owner
    /// has used concerns all of them alike. So all but the first of such requests stand behind that one.
    pub by_rank: bool,
    /// The reason for waiting that its clients were last told.
    #[serde(with = "crate::encoding::wait_reason")]
    pub told: Option<WaitReason>,
}

impl Request {
    pub fn new(key: QueueKey, ages: Option<Time>, aged: bool) -> Self {
        let (since, wants) = (BTreeMap::new(), BTreeMap::new());
        Self { key, since, wants, gathers: None, ages, aged, blocked: None, owner: None, by_rank: false, told: None }
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
    /// The process of a member is stopped, or a member is held off its GPUs.
    #[serde(alias = "Stopped")] // in older recordings
    Absent,
    /// It wants a lock that the client still holds, was asked to release, and cannot drain.
    Undrained,
    /// Unevictable memory on that GPU leaves too little room.
    Pinned(GpuId),
    /// That GPU is wanted or held by a client of a better class, and the request also wants other GPUs.
    Behind(GpuId),
}

/// The position of a request in queues: by class, then requests of a gang that has its turn, then by finish tag or
/// arrival (`at`), then, among the requests of one owner, by `rank`. The smallest is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueueKey {
    pub class: Class,
    pub has_turn: Reverse<bool>,
    pub at: Time,
    pub rank: Time,
    pub number: u64,
    /// Since when the request's owner has waited there without any of its clients being served.
    pub joined: Time,
}

/// The queue of a GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct Line {
    /// Requests that want this GPU, in the order in which they are served, except requests behind another one of their
    /// owner.
    pub queue: BTreeSet<(QueueKey, Entity)>,
    /// All requests in the queue, by the owner of their turns.
    #[serde(with = "crate::encoding::pairs")]
    pub owners: BTreeMap<ShareOwner, OwnRequests>,
    /// The number of these requests.
    pub length: u32,
    /// Requests kept out of the queue by a client of a better class, since they would block other GPUs while they wait.
    pub behind: BTreeSet<Entity>,
    /// Requests that cannot be served while unevictable memory stays on this GPU.
    pub blocked_by_pinned: BTreeSet<Entity>,
    /// The first request, if it also waits for other GPUs, and when this GPU admits it, as far as is known.
    pub opens: Option<(Entity, Option<Time>)>,
}

/// The requests of one owner in the queue of a GPU. Service to the owner moves all of them: if each was in the queue, a
/// turn of an owner with a thousand clients would move a thousand requests.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct OwnRequests {
    /// The first of the requests that are ordered by rank. It is in the queue.
    pub first: Option<(QueueKey, Entity)>,
    /// The others, by rank and number. They are not in the queue.
    pub behind_first: BTreeSet<(Time, u64, Entity)>,
    /// Requests that have positions of their own. They are in the queue.
    pub others: BTreeSet<Entity>,
}

impl OwnRequests {
    pub fn in_queue(&self) -> impl Iterator<Item = Entity> {
        self.others.iter().copied().chain(self.first.map(|(_, entity)| entity))
    }

    pub fn all(&self) -> impl Iterator<Item = Entity> {
        self.in_queue().chain(self.behind_first.iter().map(|(.., entity)| *entity))
    }

    fn is_empty(&self) -> bool {
        self.first.is_none() && self.others.is_empty() && self.behind_first.is_empty()
    }
}

impl Line {
    /// Adds a request, unless it is there already.
    pub fn join(&mut self, request: &Request, entity: Entity) {
        let new = (request.key, entity);
        let own = request.owner.map(|owner| self.owners.entry(owner).or_default());
        let is_new = match own {
            Some(own) if request.by_rank => {
                let position = |(key, entity): (QueueKey, Entity)| (key.rank, key.number, entity);
                match own.first {
                    Some(first) if position(first) < position(new) => own.behind_first.insert(position(new)),
                    Some(first) if first == new => false,
                    first => {
                        if let Some(first) = first {
                            self.queue.remove(&first);
                            own.behind_first.insert(position(first));
                        }
                        own.first = Some(new);
                        self.queue.insert(new)
                    }
                }
            }
            own => {
                if let Some(own) = own {
                    own.others.insert(entity);
                }
                self.queue.insert(new)
            }
        };
        self.length += u32::from(is_new);
    }

    /// Takes a request out. Returns whether it was there, and whether it was the first of its owner.
    pub fn leave(&mut self, request: &Request, entity: Entity) -> (bool, bool) {
        let key = request.key;
        let (mut was_queued, mut was_first) = (self.queue.remove(&(key, entity)), false);
        if let Some((owner, own)) = request.owner.and_then(|owner| Some((owner, self.owners.get_mut(&owner)?))) {
            own.others.remove(&entity);
            was_queued |= own.behind_first.remove(&(key.rank, key.number, entity));
            was_first = own.first.take_if(|(_, first)| *first == entity).is_some();
            if own.is_empty() {
                self.owners.remove(&owner);
            }
        }
        self.length -= u32::from(was_queued);
        (was_queued, was_first)
    }

    /// Takes out the next of an owner's requests that stand behind its first, if that has left.
    pub fn take_next(&mut self, owner: ShareOwner) -> Option<Entity> {
        let own = self.owners.get_mut(&owner).filter(|own| own.first.is_none())?;
        let (.., next) = own.behind_first.pop_first()?;
        if own.is_empty() {
            self.owners.remove(&owner);
        }
        self.length -= 1;
        Some(next)
    }
}
