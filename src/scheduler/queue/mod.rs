//! The queues for the GPUs' locks: requests, and the order in which they are served. `gpu` has the
//! holders.
//!
//! An [`Entity`] (a client, or the members of a gang) is queued and granted as a whole. An entity
//! is granted either all GPUs that it wants or none, and has the same [`QueueKey`] in the queue of
//! each of them. Any two entities therefore have the same order in all queues, and the first of all
//! entities always makes progress. No entity holds one GPU while it waits for another (no hold and
//! wait, hence no deadlock).
//!
//! [`Queues`] keeps requests, queues and gangs consistent, and marks the GPUs that a change
//! affects. `requests` decides where a request waits, and `model` which requests are granted and when
//! turns end, because these decisions also depend on memory and shares.
//!
//! - `gang`: clients that are granted and revoked together.

pub(crate) mod gang;

pub(crate) use crate::entity::{Entity, Gang, ShareOwner};

use crate::{api::*, effects::Effects};
use gang::Gangs;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

/// A client's class. Requests of the smallest class are served first, regardless of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Serialize, serde::Deserialize)]
pub(crate) struct Class {
    pub tier: Tier,
    pub interactive_first: Reverse<bool>,
    pub below_minimum: Reverse<bool>,
}

/// The part of a class that depends only on the rule. Better tiers are smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) enum Tier {
    /// The priority of the rule. The highest priority is served first.
    Ordinary(Reverse<i8>),
    /// Weight 0: served only while no other client wants the GPU.
    Idle,
}

impl Default for Tier {
    fn default() -> Self {
        Self::Ordinary(Reverse(0))
    }
}

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

    /// All GPUs that the request's members want, each once, in order.
    pub fn gpus(&self) -> impl Iterator<Item = GpuId> {
        let from = |from: Bound<GpuId>| {
            self.wants.values().filter_map(move |gpus| gpus.range((from, Bound::Unbounded)).next()).min().copied()
        };
        std::iter::successors(from(Bound::Unbounded), move |last| from(Bound::Excluded(*last)))
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
struct Line {
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
struct OwnRequests {
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

/// The requests for GPUs, and the queue of each GPU.
#[derive(Debug, Default, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Queues {
    /// Waiting requests, queued or blocked.
    #[serde(with = "crate::encoding::pairs")]
    requests: BTreeMap<Entity, Request>,
    gangs: Gangs,
    /// The request to which each waiting client belongs.
    waiting: BTreeMap<ClientId, Entity>,
    gpus: BTreeMap<GpuId, Line>,
}

impl Queues {
    pub fn gpu_found(&mut self, id: GpuId) {
        self.gpus.entry(id).or_default();
    }

    /// Forgets a GPU that no client has attached.
    pub fn gpu_forgotten(&mut self, id: GpuId) {
        self.gpus.remove(&id);
    }

    /// Records the first request of a GPU, if it also waits for other GPUs, and when this GPU is
    /// expected to admit that request. Returns the previous first request if the request or its expected
    /// time has changed.
    pub fn note_opening(&mut self, id: GpuId, opens: Option<(Entity, Option<Time>)>) -> Option<Option<Entity>> {
        let line = self.gpus.get_mut(&id).filter(|line| line.opens != opens)?;
        Some(std::mem::replace(&mut line.opens, opens).map(|(entity, _)| entity))
    }

    // Gangs.

    pub fn gang(&self, client: ClientId) -> Option<Gang> {
        self.gangs.of(client)
    }

    pub fn gangs(&self) -> &Gangs {
        &self.gangs
    }

    pub fn gangs_mut(&mut self) -> &mut Gangs {
        &mut self.gangs
    }

    /// The entity that a client belongs to: its gang, or the client alone if its gang has no other
    /// member.
    pub fn entity(&self, client: ClientId) -> Entity {
        let gang = self.gangs.of(client).filter(|gang| self.gangs.size(*gang) > 1);
        gang.map_or(Entity::Solo(client), Entity::Gang)
    }

    /// All clients of an entity, even if they neither hold nor want a GPU.
    pub fn clients_of_entity(&self, entity: Entity) -> Vec<ClientId> {
        match entity {
            Entity::Solo(client) => vec![client],
            Entity::Gang(gang) => self.gangs.members(gang).collect(),
        }
    }

    /// The other members of a client's gang.
    pub fn gang_peers(&self, client: ClientId) -> impl Iterator<Item = ClientId> {
        let gang = self.gangs.of(client);
        gang.into_iter().flat_map(|gang| self.gangs.members(gang)).filter(move |peer| *peer != client)
    }

    // Requests.

    pub fn requests(&self) -> impl Iterator<Item = (Entity, &Request)> {
        self.requests.iter().map(|(entity, request)| (*entity, request))
    }

    /// The entities that have a request.
    pub fn entities(&self) -> Vec<Entity> {
        self.requests.keys().copied().collect()
    }

    pub fn request(&self, entity: Entity) -> Option<&Request> {
        self.requests.get(&entity)
    }

    /// A request, for changes that do not affect its position in queues.
    pub fn request_mut(&mut self, entity: Entity) -> Option<&mut Request> {
        self.requests.get_mut(&entity)
    }

    /// The request to which a client belongs.
    pub fn waiting(&self, client: ClientId) -> Option<Entity> {
        self.waiting.get(&client).copied()
    }

    /// The place of a client's request, for a request that replaces it.
    pub fn place(&self, client: ClientId) -> Option<Place> {
        let request = self.request(self.waiting(client)?)?;
        let Request { key, ages, aged, .. } = *request;
        Some(Place { since: *request.since.get(&client)?, key, ages, aged })
    }

    /// The GPUs that a client waits for.
    pub fn wants(&self, client: ClientId) -> Option<&GpuSet> {
        self.request(self.waiting(client)?)?.wants.get(&client)
    }

    /// Whether a client waits for this GPU.
    pub fn waits_for(&self, client: ClientId, id: GpuId) -> bool {
        self.wants(client).is_some_and(|gpus| gpus.contains(&id))
    }

    /// The clients of a request.
    pub fn clients_of(&self, entity: Entity) -> impl Iterator<Item = ClientId> {
        self.requests.get(&entity).into_iter().flat_map(|request| request.wants.keys().copied())
    }

    /// The first client of a request, which represents a gang.
    pub fn first_client(&self, entity: Entity) -> Option<ClientId> {
        self.clients_of(entity).next()
    }

    /// The clients of a request that want this GPU.
    pub fn members(&self, entity: Entity, id: GpuId) -> Vec<ClientId> {
        self.wanting(entity, id).collect()
    }

    /// Like `members`, as an iterator.
    pub fn wanting(&self, entity: Entity, id: GpuId) -> impl Iterator<Item = ClientId> + Clone {
        let wants = self.requests.get(&entity).into_iter().flat_map(|request| &request.wants);
        wants.filter(move |(_, gpus)| gpus.contains(&id)).map(|(client, _)| *client)
    }

    /// The queue of a GPU, in the order of service. Excludes requests that stand behind another
    /// request of their owner.
    pub fn queue(&self, id: GpuId) -> impl Iterator<Item = (&QueueKey, Entity)> {
        self.gpus.get(&id).into_iter().flat_map(|line| &line.queue).map(|(key, entity)| (key, *entity))
    }

    /// All requests in the queue of a GPU, in no particular order.
    pub fn queued(&self, id: GpuId) -> impl Iterator<Item = Entity> {
        self.gpus.get(&id).into_iter().flat_map(|line| line.owners.values()).flat_map(OwnRequests::all)
    }

    /// Requests that stand behind another request of their owner, each with the key of that other
    /// request. The requests of one owner are in order.
    pub fn behind_first(&self, id: GpuId) -> impl Iterator<Item = (&QueueKey, Entity)> {
        let owners = self.gpus.get(&id).into_iter().flat_map(|line| line.owners.values());
        let first = owners.filter_map(|own| Some((own, own.first.as_ref().map(|(key, _)| key)?)));
        first.flat_map(|(own, key)| own.behind_first.iter().map(move |(.., entity)| (key, *entity)))
    }

    pub fn first(&self, id: GpuId) -> Option<Entity> {
        self.queue(id).next().map(|(_, entity)| entity)
    }

    pub fn queue_length(&self, id: GpuId) -> u32 {
        self.gpus.get(&id).map_or(0, |line| line.length)
    }

    /// The first client of each request in the queue, in no particular order.
    pub fn waiting_on(&self, id: GpuId) -> impl Iterator<Item = ClientId> {
        self.queued(id).filter_map(|entity| self.first_client(entity))
    }

    /// Requests kept out of the queue because a client of a better class wants or holds the GPU. In
    /// the queue, these requests would block other GPUs while they wait.
    pub fn behind(&self, id: GpuId) -> impl Iterator<Item = Entity> {
        self.gpus.get(&id).into_iter().flat_map(|line| line.behind.iter().copied())
    }

    /// Whether unevictable memory on a GPU blocks any request.
    pub fn blocks_any(&self, id: GpuId) -> bool {
        self.gpus.get(&id).is_some_and(|line| !line.blocked_by_pinned.is_empty())
    }

    /// Removes and returns the requests that unevictable memory on a GPU has blocked, so that they
    /// can be retried.
    pub fn take_blocked_by_pinned(&mut self, id: GpuId) -> impl IntoIterator<Item = Entity> + use<> {
        self.gpus.get_mut(&id).map(|line| std::mem::take(&mut line.blocked_by_pinned)).unwrap_or_default()
    }

    /// The owners of the requests in the queue.
    pub fn owners_waiting(&self, id: GpuId) -> impl Iterator<Item = ShareOwner> {
        self.gpus.get(&id).into_iter().flat_map(|line| line.owners.keys().copied())
    }

    /// The queued requests of an owner, in no particular order.
    pub fn queued_of(&self, id: GpuId, owner: ShareOwner) -> impl Iterator<Item = Entity> {
        self.own_requests(id, owner).into_iter().flat_map(OwnRequests::all)
    }

    /// The queued requests of an owner, except the requests behind its first request.
    pub fn first_of(&self, id: GpuId, owner: ShareOwner) -> impl Iterator<Item = Entity> {
        self.own_requests(id, owner).into_iter().flat_map(OwnRequests::in_queue)
    }

    fn own_requests(&self, id: GpuId, owner: ShareOwner) -> Option<&OwnRequests> {
        self.gpus.get(&id)?.owners.get(&owner)
    }

    /// Adds a request to the queues of the GPUs that it wants. The request must be in no queue, or
    /// already at its position. `owner` is the owner of the request's turns. For `by_rank`, see
    /// [`Request::by_rank`].
    pub fn join_queues(&mut self, fx: &mut Effects, entity: Entity, owner: Option<ShareOwner>, by_rank: bool) {
        let Some(request) = self.requests.get_mut(&entity) else { return };
        (request.owner, request.by_rank) = (owner, by_rank);
        for id in request.wants.values().flatten() {
            if let Some(line) = self.gpus.get_mut(id) {
                line.join(request, entity);
                line.blocked_by_pinned.remove(&entity);
                line.behind.remove(&entity);
                fx.touch(*id);
            }
        }
    }

    /// Removes a request from the queues. If the request was the first of its owner on a GPU, other
    /// requests may have stood behind it. The function then returns that GPU, the owner, and the
    /// request's key.
    pub fn leave_queues(&mut self, fx: &mut Effects, entity: Entity) -> Option<(GpuId, ShareOwner, QueueKey)> {
        let request = self.requests.get(&entity)?;
        let mut first_on = None;
        for id in request.wants.values().flatten() {
            if let Some(line) = self.gpus.get_mut(id) {
                line.blocked_by_pinned.remove(&entity);
                line.behind.remove(&entity);
                let (was_queued, was_first) = line.leave(request, entity);
                if was_queued {
                    fx.touch(*id);
                }
                first_on = first_on.or(was_first.then_some(*id));
            }
        }
        fx.wake(crate::timers::Wake::Entity(entity), None);
        Some((first_on?, request.owner?, request.key))
    }

    /// If an owner's first request has left the queue, removes and returns the next request behind
    /// it.
    pub fn take_next_of(&mut self, id: GpuId, owner: ShareOwner) -> Option<Entity> {
        self.gpus.get_mut(&id)?.take_next(owner)
    }

    /// Sets why a request is blocked. The request must be in no queue.
    pub fn set_blocked(&mut self, fx: &mut Effects, entity: Entity, why: Blocked) {
        let Some(request) = self.requests.get_mut(&entity) else { return };
        request.blocked = Some(why);
        match why {
            Blocked::Pinned(id) => {
                if let Some(line) = self.gpus.get_mut(&id) {
                    line.blocked_by_pinned.insert(entity);
                }
            }
            Blocked::Behind(id) => {
                // Settling the GPU tells the holder that a request waits.
                if let Some(line) = self.gpus.get_mut(&id) {
                    line.behind.insert(entity);
                    fx.touch(id);
                }
            }
            Blocked::Until(_) | Blocked::Absent | Blocked::Undrained => {}
        }
    }

    /// Adds a client's wanted GPUs to a request that is in no queue: to `new`, or to the existing
    /// request.
    pub fn add_to_request(
        &mut self,
        entity: Entity,
        client: ClientId,
        since: Time,
        wants: GpuSet,
        new: Option<Request>,
    ) {
        self.requests.extend(new.map(|request| (entity, request)));
        let Some(request) = self.requests.get_mut(&entity) else { return };
        request.since.insert(client, since);
        request.wants.insert(client, wants);
        self.waiting.insert(client, entity);
    }

    /// Removes a client from its request, which must be in no queue. A request without clients
    /// ends. Returns when the client began to wait, and the GPUs that it wanted.
    pub fn take_from_request(&mut self, client: ClientId) -> Option<(Time, GpuSet)> {
        let entity = self.waiting.remove(&client)?;
        let request = self.requests.get_mut(&entity)?;
        let taken = request.since.remove(&client).zip(request.wants.remove(&client));
        if request.wants.is_empty() {
            self.requests.remove(&entity);
        }
        taken
    }

    /// Ends a request that has been granted. The request must be in no queue.
    pub fn take_request(&mut self, entity: Entity) -> Option<Request> {
        let request = self.requests.remove(&entity)?;
        for client in request.wants.keys() {
            self.waiting.remove(client);
        }
        Some(request)
    }
}
