//! Requests, and the queue of each GPU.

use super::Class;
use crate::{
    api::*,
    entity::{Entity, ShareOwner},
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

/// An entity's request for the locks of one or several GPUs.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Request {
    pub key: QueueKey,
    /// When each client began to wait, and the GPUs that it wants.
    pub since: BTreeMap<ClientId, Time>,
    pub wants: BTreeMap<ClientId, GpuSet>,
    /// The earliest time of the grant. Other members of the gang are likely to request a GPU by
    /// then.
    pub gathers: Option<Time>,
    /// When the request ages: from then on, it precedes all others of its owner. `None`: never.
    pub ages: Option<Time>,
    /// The request has aged: it precedes all others of its owner.
    pub aged: bool,
    /// Why the request is in no queue. `None`: the request is queued.
    pub blocked: Option<Blocked>,
    /// The owner of the request's turns, while the request is queued.
    pub owner: Option<ShareOwner>,
    /// The request's position among its owner's requests for a GPU depends only on its rank and
    /// number, because the owner's usage affects all of these requests alike. So only the first of
    /// these requests is in the queue, and the others stand behind it.
    pub by_rank: bool,
    /// The reason for waiting that was last sent to the request's clients.
    #[serde(with = "crate::encoding::wait_reason")]
    pub told: Option<WaitReason>,
}

/// The place of a waiting request, which a request that replaces it keeps.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    /// When the client began to wait.
    pub since: Time,
    pub key: QueueKey,
    pub ages: Option<Time>,
    pub aged: bool,
}

impl Request {
    pub fn new(key: QueueKey, ages: Option<Time>, aged: bool) -> Self {
        let (since, wants) = (BTreeMap::new(), BTreeMap::new());
        Self { key, since, wants, gathers: None, ages, aged, blocked: None, owner: None, by_rank: false, told: None }
    }

    /// All GPUs that the request's members want.
    pub fn gpus(&self) -> GpuSet {
        self.wants.values().flatten().copied().collect()
    }
}

/// Why a request is in no queue. Such a request does not reserve memory or delay other requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Blocked {
    /// The request must wait until this time: a mapping failed, or the owner has used its maximum.
    Until(Time),
    /// The process of a member is stopped, or a member is kept off its GPUs.
    #[serde(alias = "Stopped")] // in older recordings
    Absent,
    /// The request wants a lock that its client still holds. The client was asked to release the
    /// lock and cannot drain.
    Undrained,
    /// Unevictable memory on this GPU leaves too little room.
    Pinned(GpuId),
    /// A client of a better class wants or holds this GPU, and the request also wants other GPUs.
    Behind(GpuId),
}

/// The position of a request in queues; the smallest is served first. Requests are ordered by
/// class. Within a class, requests of a gang that has its turn come first. Next, requests are
/// ordered by finish tag or arrival (`at`), and requests of one owner by `rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct QueueKey {
    pub class: Class,
    pub has_turn: Reverse<bool>,
    pub at: Time,
    pub rank: Time,
    pub number: u64,
    /// When the request's owner began to wait in the queue without being served.
    pub joined: Time,
}

/// The queue of a GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct Line {
    /// Requests that want this GPU, in the order of service. Excludes requests that stand behind
    /// another request of their owner.
    pub queue: BTreeSet<(QueueKey, Entity)>,
    /// All requests in the queue, by the owner of their turns.
    #[serde(with = "crate::encoding::pairs")]
    pub owners: BTreeMap<ShareOwner, OwnRequests>,
    /// The number of all requests in `owners`.
    pub length: u32,
    /// Requests kept out of the queue because a client of a better class wants or holds the GPU. In
    /// the queue, these requests would block other GPUs while they wait.
    pub behind: BTreeSet<Entity>,
    /// Requests that cannot be served while unevictable memory stays on this GPU.
    pub blocked_by_pinned: BTreeSet<Entity>,
    /// The first request, if it also waits for other GPUs, and the time when this GPU is expected
    /// to admit it.
    pub opens: Option<(Entity, Option<Time>)>,
}

/// The requests of one owner in the queue of a GPU. Serving the owner changes the position of all
/// its requests. If all were in the queue, each turn of an owner with a thousand clients would move
/// a thousand requests.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(super) struct OwnRequests {
    /// The first of the requests that are ordered by rank. This request is in the queue.
    pub first: Option<(QueueKey, Entity)>,
    /// The other requests ordered by rank, by rank and number. They are not in the queue.
    pub behind_first: BTreeSet<(Time, u64, Entity)>,
    /// Requests with individual positions. They are in the queue.
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
    /// Adds a request that is not in the queue yet. A request that is already there stays in place.
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

    /// Removes a request. Returns whether the request was queued, and whether it was the first of
    /// its owner.
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

    /// If an owner's first request has left the queue, removes and returns the next request behind
    /// it.
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
