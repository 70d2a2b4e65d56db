//! Requests for the lock, from arrival to release: queueing, granting, revoking.

use crate::{
    api::*,
    gpu::{Access, Hold, Revoked},
    machine::Machine,
    queue::Class,
    queue::{Blocked, Entity, QueueKey, Request},
    settle::unresponsive::STUCK,
    timers::Wake,
};
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

impl Machine {
    /// Handles a client's request, which replaces the client's earlier request.
    pub(crate) fn request(&mut self, client: ClientId, gpus: GpuSet) {
        if !self.clients.contains_key(&client) {
            return;
        }
        // The client need not wait for locks that it holds. A revoked lock has to be released
        // first.
        let is_wanted = |gpu: &GpuId| {
            self.gpus.lock(client, *gpu).is_some_and(|lock| lock.hold.as_ref().is_none_or(|h| h.revoked.is_some()))
        };
        let wants: GpuSet = gpus.into_iter().filter(is_wanted).collect();
        let (entity, is_absent) = (self.queues.entity(client), self.model().is_absent(client));
        let not_before = self.model().delayed_until(client, &wants);
        // A replacement request keeps the key of the request it replaces.
        let before = self.queues.waiting(client).and_then(|entity| self.queues.request(entity));
        let old = before.and_then(|request| request.since.get(&client).copied());
        let key = before.map(|request| (request.key, request.ages, request.aged));
        let since = old.unwrap_or(self.now);
        self.withdraw(client);
        let now = self.now;
        for id in &wants {
            let is_new = old.is_none() && self.gpus.hold(client, *id).is_none();
            if let Some(attachment) = self.gpus.attachment_mut(client, *id) {
                attachment.used.get_or_insert(now);
            }
            if let Some(history) = self.gpus.history_mut(client, *id).filter(|_| is_new) {
                history.progress.asks(now);
            }
        }
        if wants.is_empty() {
            return;
        }
        self.dequeue(entity);
        let mut request = None;
        if self.queues.request(entity).is_none() {
            let (key, ages, aged) = key.unwrap_or_else(|| {
                let (rank, ages) = self.model().rank(client, &wants, now);
                let (number, joined) = (self.effects.number(), self.model().joined(client, &wants));
                (
                    QueueKey { class: Class::default(), has_turn: Reverse(false), at: rank, rank, number, joined },
                    ages,
                    false,
                )
            });
            request = Some(Request::new(key, ages, aged));
        }
        self.queues.add_to_request(entity, client, since, wants, request);
        let (key, gathers) = (self.model().current_key(entity), self.model().gathers_until(entity));
        if let Some(request) = self.queues.request_mut(entity) {
            request.key = key.unwrap_or(request.key);
            // A member that requests late does not prolong the wait of the other members.
            request.gathers = gathers.map(|until| request.gathers.map_or(until, |before| before.min(until)));
        }
        if is_absent {
            self.wait_until_it_runs(entity, client);
        } else if not_before > self.now {
            self.block(entity, Blocked::Until(not_before));
        } else {
            self.enqueue(entity);
        }
        self.check_gang_peers(entity);
    }

    /// Puts a request into the queues of its GPUs, unless it would only delay other requests in
    /// them.
    pub(crate) fn enqueue(&mut self, entity: Entity) {
        if self.join_queues(entity) {
            self.admit_if_needless(entity);
        }
    }

    /// Like `enqueue`, but does not grant the request immediately. Returns whether it is queued.
    pub(crate) fn join_queues(&mut self, entity: Entity) -> bool {
        if self.queues.request(entity).is_none_or(|request| request.blocked == Some(Blocked::Absent)) {
            return false; // the request is queued again when all of its members run
        }
        self.age(entity);
        if let Some(why) = self.stays_out(entity) {
            self.block(entity, why);
            return false;
        }
        let Some(request) = self.queues.request(entity) else { return false };
        let changes = self.model().position_changes_at(entity).into_iter().chain(self.model().turn_passes_at(entity));
        let next = request.gathers.into_iter().chain(request.ages).chain(changes).filter(|at| *at > self.now).min();
        let (owner, by_rank) = (self.model().owner_of(entity), self.model().is_by_rank(entity));
        self.queues.join_queues(&mut self.effects, entity, owner, by_rank);
        self.touch_conflicting_gangs(entity);
        self.effects.wake(Wake::Entity(entity), next);
        true
    }

    /// Why a request would only delay other requests in the queues. `None`: the request should be
    /// queued. Splits off members that wait for their own locks.
    fn stays_out(&mut self, entity: Entity) -> Option<Blocked> {
        // A client that waits for its own lock must not delay other clients. The other members of
        // its gang continue without it, because it may need them in order to drain.
        let undrained = self.model().undrained(entity);
        if !undrained.is_empty() {
            if undrained.len() == self.queues.request(entity)?.wants.len() {
                return Some(Blocked::Undrained);
            }
            self.split(entity, &undrained);
        }
        if let Some(until) = self.model().shares().request_capped_until(entity) {
            return Some(Blocked::Until(until));
        }
        // Keeps out a request that would take bytes on other GPUs and could not use them.
        let ids = self.queues.request(entity)?.gpus();
        let full = ids.iter().find(|id| {
            let members = self.queues.members(entity, **id);
            (members.len() == 1 || self.model().is_crowded_out(**id, &members))
                && !self.model().has_room(entity, **id, &members)
        });
        if let Some(full) = full {
            return Some(Blocked::Pinned(*full));
        }
        let key = self.model().current_key(entity);
        let request = self.queues.request_mut(entity)?;
        if request.blocked.take().is_some() {
            request.key = key.unwrap_or(request.key);
        }
        // Holders of other GPUs are not revoked for a request that has to wait on this GPU.
        ids.into_iter().find(|id| self.model().waits_behind(entity, *id)).map(Blocked::Behind)
    }

    /// Removes a request from the queues. The owner's requests behind it then join the queues, with
    /// keys no earlier than the key of the removed request.
    pub(crate) fn dequeue(&mut self, entity: Entity) {
        let Some((id, owner, first)) = self.queues.leave_queues(&mut self.effects, entity) else { return };
        while let Some(next) = self.queues.take_next_of(id, owner) {
            let key = self.model().key_behind(&first, next);
            if let Some((request, key)) = self.queues.request_mut(next).zip(key) {
                request.key = key;
            }
            self.join_queues(next);
        }
    }

    /// Keeps a request out of the queues because of an obstacle. A blocked request reserves no
    /// bytes and delays no other request.
    pub(crate) fn block(&mut self, entity: Entity, why: Blocked) {
        self.dequeue(entity);
        self.queues.set_blocked(&mut self.effects, entity, why);
        match why {
            Blocked::Until(at) if self.queues.request(entity).is_some() => {
                self.effects.wake(Wake::Entity(entity), Some(at))
            }
            Blocked::Pinned(_) => self.report_wait(entity, WaitReason::Pinned),
            Blocked::Undrained => self.report_wait(entity, WaitReason::HolderStuck),
            Blocked::Until(_) | Blocked::Behind(_) | Blocked::Absent => {}
        }
    }

    /// Removes a client's part from its request.
    pub(crate) fn withdraw(&mut self, client: ClientId) {
        let Some(entity) = self.queues.waiting(client) else { return };
        self.dequeue(entity);
        self.queues.take_from_request(client);
        let Some(blocked) = self.queues.request(entity).map(|request| request.blocked) else { return };
        match blocked {
            Some(Blocked::Until(at)) if self.model().is_delayed(entity) => self.block(entity, Blocked::Until(at)),
            Some(Blocked::Absent) if self.model().any_absent(entity) => {}
            _ => {
                self.unblock(entity);
                self.enqueue(entity);
            }
        }
    }

    /// Clears the reason for which a request is blocked.
    pub(crate) fn unblock(&mut self, entity: Entity) {
        if let Some(request) = self.queues.request_mut(entity) {
            request.blocked = None;
        }
    }

    pub(crate) fn cancel(&mut self, client: ClientId, gpus: &GpuSet) {
        let Some(wants) = self.queues.wants(client).filter(|wants| !wants.is_disjoint(gpus)) else { return };
        let rest: GpuSet = wants.difference(gpus).copied().collect();
        if rest.is_empty() {
            self.withdraw(client);
        } else {
            self.request(client, rest);
        }
    }

    /// Tells the clients of a request why it waits, if the reason has changed.
    pub(crate) fn report_wait(&mut self, entity: Entity, why: WaitReason) {
        let Some(request) = self.queues.request_mut(entity).filter(|request| request.told != Some(why)) else { return };
        request.told = Some(why);
        for (client, gpus) in &request.wants {
            self.effects.command(Command::Waiting { client: *client, gpus: gpus.clone(), why });
        }
    }

    /// Grants a request immediately if it needs neither bytes nor turns, because its clients use
    /// managed memory and anti-thrash is `off`. While memory of such a client is being evicted for
    /// other clients, the client's request waits in the queue.
    fn admit_if_needless(&mut self, entity: Entity) {
        let Some(request) = self.queues.request(entity) else { return };
        let mut wants = request.wants.iter().flat_map(|(client, gpus)| gpus.iter().map(|id| (*client, *id)));
        let is_needless = |client, id| {
            self.model().faults_in(client, id)
                && self.model().access(id) != Access::Suspended
                && self.gpus.hold(client, id).is_none()
                && !self.model().is_evicting(entity, id)
        };
        if wants.all(|(client, id)| is_needless(client, id)) {
            self.grant(entity);
        }
    }

    pub(crate) fn admit_needless(&mut self) {
        for entity in self.queues.requests().map(|(entity, _)| entity).collect::<Vec<_>>() {
            if self.queues.request(entity).is_some_and(|request| request.blocked.is_none()) {
                self.admit_if_needless(entity);
            }
        }
    }

    /// Grants a request: gives its clients the locks that they want.
    pub(crate) fn grant(&mut self, entity: Entity) {
        self.dequeue(entity);
        let Some(request) = self.queues.take_request(entity) else { return };
        self.begin_gang_turn(entity, self.now);
        let (now, group) = (self.now, self.effects.number());
        for (client, gpus) in request.wants {
            let waited = now.saturating_sub(request.since.get(&client).copied().unwrap_or(now));
            self.gpus.join_hold_group(client, group);
            for id in &gpus {
                let number = self.effects.number();
                if self.gpus.lock(client, *id).is_none() {
                    continue;
                }
                // If the GPU was idle because this client's memory was being moved in, the client
                // is charged for that time.
                let idle_since = self.gpus.take_idle_since(*id, entity);
                let moved = idle_since.map_or(Duration::ZERO, |since| now.saturating_sub(since));
                let (finish_tag, own_finish_tag) = self.finish_tags_before(client, *id);
                let hold = Hold::new(entity, number, group, now);
                // A client does not evict memory while it holds the lock, so a pending eviction is
                // cancelled. A client that runs by page faults can be granted the lock while its
                // eviction is blocked.
                self.with_gpu(*id, |gpu, cx, fx| gpu.stop_evicting(cx, fx, client));
                self.begin_hold(client, *id, Hold { moved, aged: request.aged, finish_tag, own_finish_tag, ..hold });
                if let Some(lock) = self.gpus.lock_mut(client, *id) {
                    lock.grants += 1;
                    lock.wait_time += waited;
                }
            }
            self.effects.command(Command::Grant { client, gpus });
        }
    }

    fn begin_hold(&mut self, client: ClientId, id: GpuId, hold: Hold) {
        self.gpus.begin_hold(client, id, hold);
        self.lock_changed(client, id);
    }

    /// Takes over locks that a previous scheduler granted, and restarts their turns.
    pub(crate) fn held(&mut self, client: ClientId, gpus: &GpuSet) {
        let (entity, now, group) = (self.queues.entity(client), self.now, self.effects.number());
        self.begin_gang_turn(entity, now);
        for id in gpus {
            let number = self.effects.number();
            if self.gpus.lock(client, *id).is_some_and(|lock| lock.hold.is_none()) {
                self.begin_hold(client, *id, Hold::new(entity, number, group, now));
            }
        }
    }

    /// Revokes a lock and all locks that were granted together with it. A program that needs
    /// several GPUs at once gains nothing from some of them.
    pub(crate) fn revoke(&mut self, client: ClientId, id: GpuId) {
        let Some(hold) = self.gpus.hold(client, id) else { return };
        let (entity, group) = (hold.entity, hold.group);
        for member in self.queues.clients_of_entity(entity) {
            let is_part =
                |hold: &Hold| hold.entity == entity && (hold.group == group || entity != Entity::Solo(member));
            let holds = self.gpus.holds_of(member).filter(|(_, hold)| hold.revoked.is_none() && is_part(hold));
            let gpus = holds.map(|(id, _)| id).collect();
            self.revoke_now(member, gpus, None);
        }
    }

    /// Sends a revoke. `again`: the revoke is a repetition, with this backoff.
    pub(crate) fn revoke_now(&mut self, client: ClientId, gpus: GpuSet, again: Option<Duration>) {
        let now = self.now;
        for id in &gpus {
            if let Some(gang) = self.gpus.hold(client, *id).and_then(|hold| hold.entity.gang()) {
                self.queues.gangs_mut().revoked(now, gang);
            }
            self.change_hold(client, *id, |hold| {
                hold.revoked = Some(Revoked {
                    first: hold.revoked.map_or(now, |revoked| revoked.first),
                    since: now,
                    again: None,
                    backoff: again.unwrap_or(STUCK.0),
                });
            });
        }
        if !gpus.is_empty() {
            self.effects.command(Command::Revoke { client, gpus });
            self.check(client);
            // The client may need its gang members in order to drain.
            let waiting: BTreeSet<Entity> =
                self.queues.gang_peers(client).filter_map(|peer| self.queues.waiting(peer)).collect();
            waiting.into_iter().for_each(|entity| self.requeue(entity));
        }
    }

    /// Handles a client's release.
    pub(crate) fn released(&mut self, client: ClientId, gpus: &GpuSet, reason: ReleaseReason, busy: Duration) {
        let held: Vec<GpuId> = gpus.iter().filter(|id| self.gpus.hold(client, **id).is_some()).copied().collect();
        let revoked = held.iter().find_map(|id| {
            let hold = self.gpus.hold(client, *id)?;
            hold.revoked.and(hold.entity.gang())
        });
        for id in &held {
            self.end_hold(client, *id, busy, reason == ReleaseReason::Idle);
            if reason == ReleaseReason::NoMemory {
                self.mapping_failed(client, *id);
            } else if let Some(attachment) = self.gpus.attachment_mut(client, *id) {
                attachment.failures.has_run();
            }
            self.swap_surplus(client, *id);
        }
        if let Some(gang) = revoked {
            self.revoke_gang(gang);
        }
        self.check(client);
    }

    /// Ends a client's hold of a GPU. `idle`: the client released the lock because it had no more
    /// work.
    pub(crate) fn end_hold(&mut self, client: ClientId, id: GpuId, busy: Duration, idle: bool) {
        let now = self.now;
        let Some(hold) = self.gpus.end_hold(client, id, !idle) else { return };
        let held = now.saturating_sub(hold.since);
        let waited = hold.waited(now).min(held);
        let uncontended = held - waited;
        if let Some(lock) = self.gpus.lock_mut(client, id) {
            lock.ended(now, &hold);
        }
        if let Some(history) = self.gpus.history_mut(client, id) {
            // As with bursts, uncontended time counts as at most one burst if the client ran out of
            // work.
            let ran = if idle { waited + uncontended.min(history.bursts.expected()) } else { held };
            history.progress.ran(now, ran, idle);
            history.bursts.ran(waited, uncontended, busy, idle);
            history.utilization.turn_ended(waited, idle);
        }
        self.lock_changed(client, id);
        self.with_gpu(id, |gpu, _, fx| gpu.end_trial(fx, client));
        if let Some(owner) = self.model().shares().bounded_owner(client).filter(|_| !hold.is_bypassed()) {
            self.fairness.record_usage(owner, id, hold.since, now, self.settings.time_period);
        }
        self.charge_service(client, id, &hold, waited);
        self.touch_conflicting_gangs(hold.entity);
        self.end_gang_turn(hold.entity);
        self.requeue(hold.entity);
        let is_undrained = |entity: &Entity| {
            self.queues.request(*entity).is_some_and(|request| request.blocked == Some(Blocked::Undrained))
        };
        if let Some(entity) = self.queues.waiting(client).filter(is_undrained) {
            self.enqueue(entity);
        }
    }

    /// Splits members off a gang's request, so that each of them waits by itself. Afterwards, the
    /// rest of the request is in no queue.
    pub(crate) fn split(&mut self, entity: Entity, members: &[ClientId]) {
        self.dequeue(entity);
        for client in members {
            let number = self.effects.number();
            let Some(request) = self.queues.request(entity) else { return };
            if !request.wants.contains_key(client) {
                continue;
            }
            let key = QueueKey { number, ..request.key };
            let is_absent = self.model().is_absent(*client);
            let alone = Request {
                blocked: is_absent.then_some(Blocked::Absent),
                ..Request::new(key, request.ages, request.aged)
            };
            let Some((since, gpus)) = self.queues.take_from_request(*client) else { continue };
            let solo = Entity::Solo(*client);
            self.queues.add_to_request(solo, *client, since, gpus, Some(alone));
            self.enqueue(solo);
        }
    }
}
