//! Changes to the queues: where a request waits, from its arrival to its grant.
//!
//! [`Requests`] may change only the queues, and reads everything else. It does not grant requests:
//! it notes those that need no turn in [`Effects`], and `sharing` grants them.

use crate::{
    api::*,
    client::Clients,
    effects::Effects,
    fairness::Fairness,
    gpu::Gpus,
    model::Model,
    placement::Placements,
    queue::{Blocked, Class, Entity, Gang, Place, QueueKey, Queues, Request, ShareOwner},
    quota::Quota,
    rules::Rules,
    sleep::Sleep,
    timers::Wake,
};
use std::cmp::Reverse;

/// The queues to change, and the state that decisions about requests depend on.
pub(crate) struct Requests<'a> {
    pub queues: &'a mut Queues,
    pub effects: &'a mut Effects,
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub clients: &'a Clients,
    pub gpus: &'a Gpus,
    pub sleep: &'a Sleep,
    pub quota: &'a Quota,
    pub fairness: &'a Fairness,
    pub places: &'a Placements,
}

/// A step of [`Requests::work`].
#[derive(Clone)]
enum Work {
    /// Put a request into the queues. `takes_turn`: the request is not granted without a turn.
    Join { entity: Entity, takes_turn: bool },
    /// An owner's first request, with the key `first`, has left the queue of a GPU. Put the next
    /// request of the owner into the queues.
    Next { id: GpuId, owner: ShareOwner, first: QueueKey },
    /// Keep a request out of the queues.
    Block(Entity, Blocked),
    /// Give these clients of a request a request each.
    Split(Entity, Vec<ClientId>),
}

impl Requests<'_> {
    fn model(&self) -> Model<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, .. } = self;
        Model { now: *now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places }
    }

    /// Adds a client's request for these GPUs. `place`: the place of the request that this request
    /// replaces.
    pub fn add(&mut self, client: ClientId, wants: GpuSet, place: Option<Place>) {
        let entity = self.queues.entity(client);
        self.dequeue(entity);
        let since = place.as_ref().map_or(self.now, |place| place.since);
        let mut request = None;
        if self.queues.request(entity).is_none() {
            request = Some(match place {
                Some(Place { key, ages, aged, .. }) => Request::new(key, ages, aged),
                None => {
                    let (rank, ages) = self.model().rank(client, &wants, self.now);
                    let (number, joined) = (self.effects.number(), self.model().joined(client, &wants));
                    let (class, has_turn) = (Class::default(), Reverse(false));
                    Request::new(QueueKey { class, has_turn, at: rank, rank, number, joined }, ages, false)
                }
            });
        }
        let not_before = self.model().delayed_until(client, &wants);
        self.queues.add_to_request(entity, client, since, wants, request);
        let (key, gathers) = (self.model().current_key(entity), self.model().gathers_until(entity));
        if let Some(request) = self.queues.request_mut(entity) {
            request.key = key.unwrap_or(request.key);
            // A member that requests late does not prolong the wait of the other members.
            request.gathers = gathers.map(|until| request.gathers.map_or(until, |before| before.min(until)));
        }
        if self.model().is_absent(client) {
            self.wait_until_it_runs(client);
        } else if not_before > self.now {
            self.block(entity, Blocked::Until(not_before));
        } else {
            self.enqueue(entity);
        }
    }

    /// Puts a request into the queues of its GPUs, unless it would only delay other requests in
    /// them.
    pub fn enqueue(&mut self, entity: Entity) {
        self.work(Work::Join { entity, takes_turn: false });
    }

    /// Removes a request from the queues. The owner's requests behind it then join the queues, with
    /// keys no earlier than the key of the removed request.
    pub fn dequeue(&mut self, entity: Entity) {
        self.leave(entity).into_iter().for_each(|work| self.work(work));
    }

    /// Keeps a request out of the queues because of an obstacle. A blocked request reserves no
    /// bytes and delays no other request.
    pub fn block(&mut self, entity: Entity, why: Blocked) {
        self.work(Work::Block(entity, why));
    }

    /// Splits members off a gang's request, so that each of them waits by itself. Afterwards, the
    /// rest of the request is in no queue.
    pub fn split(&mut self, entity: Entity, members: Vec<ClientId>) {
        self.work(Work::Split(entity, members));
    }

    /// Puts a request into the queues or keeps it out, and does what follows for other requests.
    /// What follows from a step is done before earlier work.
    ///
    /// The loop ends: each `Join` queues its request, blocks it, or splits it, which leaves fewer
    /// clients in it; each `Next` takes one of the requests that stand behind their owner's first.
    fn work(&mut self, work: Work) {
        let (mut next, mut todo) = (Some(work), Vec::new());
        while let Some(work) = next.take().or_else(|| todo.pop()) {
            match work {
                Work::Join { entity, takes_turn } => next = self.join(entity, takes_turn, &mut todo),
                Work::Next { id, owner, first } => {
                    let Some(entity) = self.queues.take_next_of(id, owner) else { continue };
                    let key = self.model().key_behind(&first, entity);
                    if let Some((request, key)) = self.queues.request_mut(entity).zip(key) {
                        request.key = key;
                    }
                    todo.push(work);
                    next = Some(Work::Join { entity, takes_turn: true });
                }
                Work::Block(entity, why) => {
                    next = self.leave(entity);
                    match next {
                        Some(_) => todo.push(Work::Block(entity, why)),
                        None => self.set_blocked(entity, why),
                    }
                }
                Work::Split(entity, members) => {
                    next = self.leave(entity);
                    if next.is_some() {
                        todo.push(Work::Split(entity, members));
                        continue;
                    }
                    let alone: Vec<Entity> =
                        members.into_iter().filter_map(|client| self.take_out(entity, client)).collect();
                    todo.extend(alone.into_iter().rev().map(|entity| Work::Join { entity, takes_turn: false }));
                }
            }
        }
    }

    /// Puts a request into the queues, or returns why not. `todo`: work to do after the returned
    /// work.
    fn join(&mut self, entity: Entity, takes_turn: bool, todo: &mut Vec<Work>) -> Option<Work> {
        let clients =
            self.queues.request(entity).filter(|request| request.blocked != Some(Blocked::Absent))?.wants.len();
        if self.model().is_due_to_age(entity) {
            let next = self.leave(entity);
            if let Some(request) = self.queues.request_mut(entity) {
                (request.key.rank, request.aged) = (Time::ZERO, true);
            }
            if next.is_some() {
                todo.push(Work::Join { entity, takes_turn });
                return next;
            }
        }
        // A client that waits for its own lock must not delay other clients. The other members of
        // its gang continue without it, because it may need them in order to drain.
        let undrained = self.model().undrained(entity);
        if undrained.len() == clients {
            return Some(Work::Block(entity, Blocked::Undrained));
        }
        if !undrained.is_empty() {
            todo.push(Work::Join { entity, takes_turn });
            return Some(Work::Split(entity, undrained));
        }
        if let Some(why) = self.model().stays_out(entity) {
            return Some(Work::Block(entity, why));
        }
        if self.queues.request(entity)?.blocked.is_some() {
            let key = self.model().current_key(entity);
            let request = self.queues.request_mut(entity)?;
            (request.key, request.blocked) = (key.unwrap_or(request.key), None);
        }
        let request = self.queues.request(entity)?;
        // Holders of other GPUs are not revoked for a request that has to wait on this GPU.
        if let Some(id) = request.gpus().find(|id| self.model().waits_behind(entity, *id)) {
            return Some(Work::Block(entity, Blocked::Behind(id)));
        }
        let changes = self.model().position_changes_at(entity).into_iter().chain(self.model().turn_passes_at(entity));
        let at = request.gathers.into_iter().chain(request.ages).chain(changes).filter(|at| *at > self.now).min();
        let (owner, by_rank) = (self.model().owner_of(entity), self.model().is_by_rank(entity));
        self.queues.join_queues(self.effects, entity, owner, by_rank);
        self.touch_conflicting_gangs(entity);
        self.effects.wake(Wake::Entity(entity), at);
        if !takes_turn && self.settings.anti_thrash == AntiThrash::Off {
            self.effects.may_need_no_turn(entity);
        }
        None
    }

    /// Removes a request from the queues. Returns the work that follows.
    fn leave(&mut self, entity: Entity) -> Option<Work> {
        let (id, owner, first) = self.queues.leave_queues(self.effects, entity)?;
        Some(Work::Next { id, owner, first })
    }

    fn set_blocked(&mut self, entity: Entity, why: Blocked) {
        self.queues.set_blocked(self.effects, entity, why);
        match why {
            Blocked::Until(at) if self.queues.request(entity).is_some() => {
                self.effects.wake(Wake::Entity(entity), Some(at))
            }
            Blocked::Pinned(_) => self.report_wait(entity, WaitReason::Pinned),
            Blocked::Undrained => self.report_wait(entity, WaitReason::HolderStuck),
            Blocked::Until(_) | Blocked::Behind(_) | Blocked::Absent => {}
        }
    }

    /// Takes a client out of a request that is in no queue, and gives it a request of its own.
    fn take_out(&mut self, entity: Entity, client: ClientId) -> Option<Entity> {
        let number = self.effects.number();
        let request = self.queues.request(entity).filter(|request| request.wants.contains_key(&client))?;
        let key = QueueKey { number, ..request.key };
        let is_absent = self.model().is_absent(client);
        let alone =
            Request { blocked: is_absent.then_some(Blocked::Absent), ..Request::new(key, request.ages, request.aged) };
        let (since, gpus) = self.queues.take_from_request(client)?;
        self.queues.add_to_request(Entity::Solo(client), client, since, gpus, Some(alone));
        Some(Entity::Solo(client))
    }

    /// Removes a client's part from its request.
    pub fn withdraw(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        self.dequeue(entity);
        self.queues.take_from_request(client);
        let Some(blocked) = self.queues.request(entity).map(|request| request.blocked) else { return };
        match blocked {
            Some(Blocked::Until(at)) if self.model().is_delayed(entity) => self.block(entity, Blocked::Until(at)),
            Some(Blocked::Absent) if self.model().any_absent(entity) => {}
            _ => self.unblock(entity),
        }
    }

    /// Clears the reason for which a request is blocked, and puts the request into the queues.
    fn unblock(&mut self, entity: Entity) {
        if let Some(request) = self.queues.request_mut(entity) {
            request.blocked = None;
        }
        self.enqueue(entity);
    }

    /// Puts a client's request back into the queues once all of its clients run. Returns whether they
    /// run.
    pub fn runs_again(&mut self, client: ClientId) -> bool {
        let Some(entity) = self.queues.waiting(client).filter(|entity| !self.model().any_absent(*entity)) else {
            return false;
        };
        self.unblock(entity);
        true
    }

    /// Puts a client's request back into the queues if `is_over` says that the obstacle is gone.
    pub fn retry(&mut self, client: ClientId, is_over: impl FnOnce(Blocked) -> bool) {
        if let Some(entity) = self.queues.waiting(client)
            && self.queues.request(entity).and_then(|request| request.blocked).is_some_and(is_over)
        {
            self.enqueue(entity);
        }
    }

    /// Keeps a request from being granted while one of its clients is absent: stopped or held off
    /// its GPUs. If the members named the gang themselves, the other members wait too, because they
    /// cannot run without the absent client. A gang made by a rule may contain clients that do not
    /// wait for each other, so only the absent client waits.
    pub fn wait_until_it_runs(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        if let Entity::Gang(Gang::Group(_)) = entity {
            self.split(entity, vec![client]);
            self.enqueue(entity);
        } else {
            self.block(entity, Blocked::Absent);
        }
    }

    /// Delays a client's request according to its failures.
    pub fn delay_changed(&mut self, client: ClientId) {
        let waiting = self.queues.waiting(client);
        let Some((entity, request)) = waiting.and_then(|entity| Some((entity, self.queues.request(entity)?))) else {
            return;
        };
        let until = request.wants.get(&client).map_or(self.now, |gpus| self.model().delayed_until(client, gpus));
        let blocked = request.blocked;
        if until > self.now {
            if !matches!(blocked, Some(Blocked::Absent)) {
                self.block(entity, Blocked::Until(until));
            }
        } else if matches!(blocked, Some(Blocked::Until(_))) && !self.model().is_delayed(entity) {
            self.enqueue(entity);
        }
    }

    /// Removes a request that does not fit on a GPU from the queues, until unevictable memory becomes
    /// evictable, so that it does not delay other requests. A gang whose members do not fit together
    /// is split instead.
    pub fn does_not_fit(&mut self, entity: Entity, id: GpuId) {
        let members = self.queues.members(entity, id);
        if members.len() > 1 && !self.model().is_crowded_out(id, members) {
            self.split(entity, self.queues.clients_of(entity).collect());
        } else {
            self.block(entity, Blocked::Pinned(id));
        }
    }

    /// Handles the wait of a GPU's first request. Removes other requests from the queue if they would
    /// only block other GPUs. A request blocks other GPUs if a request of a better tier waits in this queue.
    pub fn wait_for(&mut self, id: GpuId, first: Entity, why: Option<WaitReason>) {
        why.into_iter().for_each(|why| self.report_wait(first, why));
        if !self.rules.have_classes() {
            return;
        }
        let queue = self.queues.queue(id).map(|(_, entity)| entity);
        let behind: Vec<Entity> = queue.skip(1).filter(|entity| self.model().waits_behind(*entity, id)).collect();
        behind.into_iter().for_each(|entity| self.block(entity, Blocked::Behind(id)));
    }

    /// Blocks the request of a client that has become undrainable. Otherwise the request would wait
    /// for the client's own lock, ahead of other requests.
    pub fn becomes_undrainable(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        self.end_gang_turn(entity);
        self.touch_conflicting_gangs(entity);
        if let Some(entity) = self.queues.waiting(client)
            && self.queues.request(entity).is_some_and(|request| request.blocked.is_none())
        {
            self.enqueue(entity);
        }
    }

    /// Notes all requests, because something that makes them need turns may have changed.
    pub fn all_may_need_no_turn(&mut self) {
        self.queues.requests().for_each(|(entity, _)| self.effects.may_need_no_turn(entity));
    }

    /// Tells the clients that wait for a GPU why they wait.
    pub fn report_wait_on(&mut self, id: GpuId, why: WaitReason) {
        self.model().whole_queue(id).into_iter().for_each(|entity| self.report_wait(entity, why));
    }

    /// Tells the clients of a request why it waits, if the reason has changed.
    pub fn report_wait(&mut self, entity: Entity, why: WaitReason) {
        let Some(request) = self.queues.request_mut(entity).filter(|request| request.told != Some(why)) else { return };
        request.told = Some(why);
        for (client, gpus) in &request.wants {
            self.effects.command(Command::Waiting { client: *client, gpus: gpus.clone(), why });
        }
    }

    // The order of the queues, which `model::order` computes.

    /// Moves a queued request to its current position.
    pub fn requeue(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity).filter(|request| request.blocked.is_none()) else { return };
        let Some(key) = self.model().current_key(entity).filter(|key| *key != request.key) else { return };
        self.dequeue(entity);
        if let Some(request) = self.queues.request_mut(entity) {
            request.key = key;
        }
        self.enqueue(entity);
    }

    /// Requeues a client's request after its owner has changed.
    pub fn owner_changed(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        let is_queued = self.queues.request(entity).is_some_and(|request| request.blocked.is_none());
        if is_queued {
            self.dequeue(entity);
            self.work(Work::Join { entity, takes_turn: true });
        }
    }

    /// Reranks a request after a change of the policy.
    pub fn rerank(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity) else { return };
        let Some((client, wants)) = request.wants.first_key_value() else { return };
        let arrival = request.since.values().min().copied().unwrap_or(self.now);
        let (rank, ages) = self.model().rank(*client, wants, arrival);
        let is_queued = request.blocked.is_none();
        if is_queued {
            self.dequeue(entity);
        }
        if let Some(request) = self.queues.request_mut(entity) {
            (request.key.rank, request.ages, request.aged) = (rank, ages, false);
        }
        if is_queued {
            self.enqueue(entity);
        }
    }

    /// Moves a request to its current position after rules have changed.
    pub fn rules_changed(&mut self, entity: Entity) {
        self.requeue(entity);
        let blocked = self.queues.request(entity).and_then(|request| request.blocked);
        let is_capped = matches!(blocked, Some(Blocked::Until(_))) && !self.model().is_delayed(entity);
        if is_capped || matches!(blocked, Some(Blocked::Behind(_))) {
            self.enqueue(entity);
        }
    }

    /// Moves a queued request whose class depends on usage to its current position.
    pub fn reclassify(&mut self, entity: Entity) {
        match self.model().shares().request_capped_until(entity) {
            Some(until) => self.block(entity, Blocked::Until(until)),
            None => self.requeue(entity),
        }
    }

    /// Updates the time at which this GPU admits its first request. If that time or the first
    /// request has changed, marks the other GPUs that the present and the previous first request
    /// want.
    pub fn note_opening(&mut self, id: GpuId) {
        let first = self.queues.first(id).filter(|first| self.model().wants_others(id, *first));
        let opens = first.map(|first| (first, self.model().opens_at(id, first)));
        let Some(before) = self.queues.note_opening(id, opens) else { return };
        for entity in [before, first].into_iter().flatten() {
            let gpus = self.queues.request(entity).into_iter().flat_map(Request::gpus);
            self.effects.touch_all(gpus.filter(|gpu| *gpu != id));
        }
    }

    // Gangs: their turns, and requests that their state moves. `model::gangs` decides.

    /// Begins the turn of a gang that was granted a GPU at `since`. If the turn has already begun,
    /// moves its beginning back to `since`.
    pub fn begin_gang_turn(&mut self, entity: Entity, since: Time) {
        if let Some(gang) = entity.gang() {
            let is_measured = self.model().holds_of_gang(gang).all(|(_, hold)| !hold.is_bypassed());
            self.queues.gangs_mut().begin_turn(gang, since, is_measured);
        }
    }

    /// Ends the turn of a gang whose members hold no lock any more. Bypassed holds do not count.
    pub fn end_gang_turn(&mut self, entity: Entity) {
        let is_over = |gang: &Gang| self.model().holds_of_gang(*gang).all(|(_, hold)| hold.is_bypassed());
        if let Some(gang) = entity.gang().filter(is_over) {
            let drained = self.model().holds_of_gang(gang).next().is_none();
            self.queues.gangs_mut().end_turn(self.now, gang, drained);
        }
    }

    /// Records that a gang's members keep their locks, unless some of the locks are still revoked.
    pub fn gang_continues(&mut self, entity: Entity) {
        let continues = |gang: &Gang| self.model().holds_of_gang(*gang).all(|(_, hold)| hold.revoked.is_none());
        if let Some(gang) = entity.gang().filter(continues) {
            self.queues.gangs_mut().goes_on(gang);
        }
    }

    /// Requeues a request, and marks its GPUs. Called when its reason to precede other requests has
    /// changed.
    pub fn requeue_and_touch(&mut self, entity: Entity) {
        self.requeue(entity);
        self.effects.touch_all(self.queues.request(entity).into_iter().flat_map(Request::gpus));
    }

    /// Marks the GPUs of a gang whose holds or requests changed, and the GPUs of conflicting gangs.
    pub fn touch_conflicting_gangs(&mut self, entity: Entity) {
        let Some(gang) = entity.gang() else { return };
        let conflicting = self.queues.gangs().others(gang).filter(|other| self.model().gangs_conflict(gang, *other));
        let gpus: GpuSet = conflicting.chain([gang]).flat_map(|gang| self.model().gpus_of_gang(gang)).collect();
        self.effects.touch_all(gpus);
    }

    /// Handles a revoke that was withdrawn. GPUs are no longer kept to let the client drain.
    pub fn revoke_withdrawn(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        self.gang_continues(entity);
        self.touch_conflicting_gangs(entity);
    }

    /// Requeues a client's request after the members of its gang have changed.
    pub fn members_changed(&mut self, client: ClientId) {
        if let Some(entity) = self.queues.waiting(client) {
            self.requeue(entity);
            self.retry(client, |blocked| matches!(blocked, Blocked::Behind(_)));
        }
    }
}
