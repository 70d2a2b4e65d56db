//! How clients share the GPUs: memory is allocated to them, and requests become holds and end.
//!
//! [`Sharing`] joins the GPUs, their queues, the limits on memory, and the service that clients have
//! received. It may change these four, and reads everything else. Decisions are made elsewhere: by
//! `model`, if they only read, by [`Gpu`] about its memory, by [`Quota`] about limits, and by
//! [`Requests`] about the queues.
//!
//! - `answers`: clients that do not answer, or answer that they cannot drain.
//! - `gangs`: clients that join and leave gangs.
//! - `limits`: the limits on clients' memory.
//! - `attachments`: GPUs that appear and disappear, and clients that attach and detach them.

mod answers;
mod attachments;
mod gangs;
mod limits;

use crate::{
    api::*,
    client::Clients,
    effects::Effects,
    fairness::Fairness,
    gpu::{self, FAILURE_TIMEOUT, Gpu, Gpus, Hold, Measurement, ReservationNeeds, capacity::GpuCapacities},
    model::{Model, Pressure},
    placement::Placements,
    queue::{Blocked, Entity, Queues},
    quota::{self, Quota},
    requests::Requests,
    rules::Rules,
    sleep::Sleep,
};
use std::collections::BTreeMap;
use std::time::Duration;

/// The components to change, and the state that decisions about them depend on.
pub(crate) struct Sharing<'a> {
    pub gpus: &'a mut Gpus,
    pub queues: &'a mut Queues,
    pub quota: &'a mut Quota,
    pub fairness: &'a mut Fairness,
    pub effects: &'a mut Effects,
    pub now: Time,
    pub settings: &'a Settings,
    pub rules: &'a Rules,
    pub clients: &'a Clients,
    pub sleep: &'a Sleep,
    pub places: &'a Placements,
}

impl Sharing<'_> {
    fn model(&self) -> Model<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, .. } = self;
        Model { now: *now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places }
    }

    /// Runs `act` on a GPU. `None`: the GPU is unknown.
    pub fn with_gpu<R>(&mut self, id: GpuId, act: impl FnOnce(&mut Gpu, gpu::Context, &mut Effects) -> R) -> Option<R> {
        let Self { now, settings, gpus, rules, clients, queues, sleep, quota, effects, .. } = self;
        let context = gpu::Context { now: *now, settings, rules, clients, queues, sleep, quota };
        Some(act(gpus.get_mut(id)?, context, effects))
    }

    /// Runs `act` on the quota.
    pub fn with_quota<R>(&mut self, act: impl FnOnce(&mut Quota, quota::Context, &mut Effects) -> R) -> R {
        let Self { now, settings, gpus, rules, quota, effects, .. } = self;
        let gpus = GpuCapacities { gpus, settings };
        act(quota, quota::Context { now: *now, rules, gpus: &gpus }, effects)
    }

    fn requests(&mut self) -> Requests<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, effects } = self;
        Requests { queues, effects, now: *now, settings, rules, clients, gpus, sleep, quota, fairness, places }
    }

    /// Requests a measurement of a GPU if none is pending.
    pub fn measure(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, fx| gpu.measure(fx));
    }

    // Memory: who gets the bytes of a GPU, and from whom they are taken.

    pub fn credit(&mut self, client: ClientId, id: GpuId, reserved_ahead: u64) -> u64 {
        self.with_gpu(id, |gpu, cx, fx| gpu.credit(cx, fx, client, reserved_ahead)).unwrap_or(0)
    }

    /// Grants requests for a GPU that is gone, if all other GPUs that the requests want can be
    /// granted too.
    pub fn let_through(&mut self, id: GpuId) {
        for entity in self.model().whole_queue(id) {
            self.credit_all(entity, id, 0);
            if self.model().is_grantable(entity) {
                self.grant(entity);
            }
        }
        for holder in self.gpus.holders(id).collect::<Vec<_>>() {
            self.credit(holder, id, 0);
        }
    }

    /// Credits the clients of a request. Returns the bytes that they still lack.
    fn credit_all(&mut self, entity: Entity, id: GpuId, reserved_ahead: u64) -> u64 {
        let members = self.queues.members(entity, id);
        members.into_iter().fold(0, |sum: u64, member| sum.saturating_add(self.credit(member, id, reserved_ahead)))
    }

    /// Serves the needs that precede all waiting clients: first contexts and other programs, then
    /// holders that grow. Returns the number of bytes being freed that are reserved for these needs.
    pub fn serve_holders(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let mut reserved_ahead = self.model().overdrawn(id);
        if reserved_ahead > 0 {
            let next = self.model().members_of_first(id);
            pressure.short = self.collect(id, reserved_ahead, &[], &next);
            let vacates = self.gpus.get(id).is_some_and(|gpu| gpu.vacates(self.settings));
            pressure.at_once = pressure.short > 0 && vacates;
        }
        for holder in self.model().unrevoked_holders(id) {
            let lacking = self.credit(holder, id, reserved_ahead);
            if lacking > 0 {
                reserved_ahead = reserved_ahead.saturating_add(lacking);
                let next = self.model().members_of_first(id);
                let short = self.collect(id, reserved_ahead, &[holder], &next);
                pressure.add_growth(holder, short);
                break;
            }
        }
        reserved_ahead
    }

    /// Reserves free bytes and evicts memory for the rest. `reserved_ahead` of the bytes being freed
    /// are reserved for earlier needs.
    pub fn serve_reservations(&mut self, id: GpuId, reserved_ahead: u64) -> ReservationNeeds {
        let mut needs = ReservationNeeds::default();
        let count = self.with_gpu(id, |gpu, cx, _| gpu.end_reservations(cx.now)).unwrap_or(0);
        for at in 0..count {
            let secured = self.with_gpu(id, |gpu, cx, _| gpu.secure(cx, at, reserved_ahead)).flatten();
            let lacks = match secured {
                Some((client, short)) if short > 0 => {
                    let before = reserved_ahead.saturating_add(needs.lacking);
                    (short, self.collect(id, before.saturating_add(short), &[client], &[]).min(short))
                }
                _ => (0, 0),
            };
            self.with_gpu(id, |gpu, cx, fx| gpu.answer_reservation(cx, fx, at, lacks, &mut needs));
        }
        needs
    }

    /// Evicts memory of clients without the lock until `bytes` are free or being freed. Returns the
    /// number of bytes that only holders can free. Clients in `exempt` are not evicted, and clients
    /// in `last` are evicted last.
    pub fn collect(&mut self, id: GpuId, bytes: u64, exempt: &[ClientId], last: &[ClientId]) -> u64 {
        let Some(arriving) = self.with_gpu(id, |gpu, cx, fx| gpu.arriving(cx, fx, exempt)) else { return bytes };
        if bytes <= arriving {
            return 0;
        }
        let queue = self.model().policy().evicts_by_queue().then(|| self.model().whole_queue(id));
        let evict = |gpu: &mut Gpu, cx: gpu::Context, fx: &mut Effects| {
            let asked = gpu.evict(cx, fx, bytes - arriving, exempt, last, queue.as_deref());
            (asked, gpu.arriving(cx, fx, exempt))
        };
        let Some((asked, arriving)) = self.with_gpu(id, evict) else { return bytes };
        // Sets the time at which each client's answer is due.
        asked.into_iter().for_each(|client| self.check(client));
        bytes.saturating_sub(arriving)
    }

    /// Allocates bytes to the first request, grants it if possible, and continues with the next
    /// request until one has to wait. Returns the bytes that the waiting request lacks.
    ///
    /// Bytes that the first request lacks are evicted from clients without the lock while the holder
    /// runs. Only the holder's own bytes wait for the end of its turn. The loop ends because each
    /// round but the last takes a request out of the queue.
    pub fn serve_queue(&mut self, id: GpuId, reserved_ahead: u64, pressure: &mut Pressure) -> u64 {
        loop {
            let Some(entity) = self.queues.first(id) else { return 0 };
            // Without room on another GPU, bytes and a turn here would be of no use. That other GPU may
            // be settled after this one.
            let full = self.model().full_gpus(entity).next();
            if let Some(full) = full {
                self.with_requests(|requests| requests.does_not_fit(entity, full));
                continue;
            }
            let members = self.queues.members(entity, id);
            if let Some(holder) = self.model().undrainable_ahead_of(entity, id, &members) {
                let lacking = self.credit(holder, id, reserved_ahead);
                if lacking > 0 {
                    // Other clients beside the holder free their bytes when their turns end.
                    let short = self.collect(id, reserved_ahead.saturating_add(lacking), &[holder], &[]);
                    pressure.short = pressure.short.max(short);
                    self.with_requests(|requests| requests.wait_for(id, entity, Some(WaitReason::HolderStuck)));
                    return lacking;
                }
            }
            let lacking = match pressure.short {
                0 => self.credit_all(entity, id, reserved_ahead),
                // No bytes are free, and bytes being freed are reserved for earlier needs.
                _ => self.model().lacking(entity, id),
            };
            let short = match lacking {
                0 => 0,
                _ => self.collect(id, reserved_ahead.saturating_add(lacking), &members, &[]),
            };
            let locked = !self.model().is_admissible(entity, id);
            if !locked && self.model().is_grantable(entity) {
                self.grant(entity);
                continue;
            }
            if self.model().waits_behind(entity, id) {
                self.with_requests(|requests| requests.block(entity, Blocked::Behind(id)));
                continue;
            }
            if short == 0 && pressure.short == 0 && reserved_ahead == 0 && self.backfill(id, entity) {
                continue;
            }
            let arrives = lacking > 0 && !locked;
            self.gpus.note_idle_for(self.now, id, entity, arrives);
            let waiter = self.model().first_waiter(entity, id, &members, lacking, short);
            pressure.add_first(entity, waiter, short, locked);
            self.with_requests(|requests| requests.wait_for(id, entity, arrives.then_some(WaitReason::Eviction)));
            return lacking;
        }
    }

    /// Grants a request behind the first request that wants this GPU alone, while the first request
    /// waits for other GPUs. Returns whether a request was granted.
    fn backfill(&mut self, id: GpuId, first: Entity) -> bool {
        let Some((client, until)) = self.model().backfill(id, first) else { return false };
        self.grant(Entity::Solo(client));
        self.gpus.hold_mut(client, id).into_iter().for_each(|hold| hold.backfills = Some((first, until)));
        true
    }

    /// Serves undrainable holders, because they may need more bytes in order to drain. Such holders
    /// are served after all waiting requests. Other holders free memory for them when their turns
    /// end. Returns the bytes that undrainable holders lack.
    pub fn serve_undrainable(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let mut lacking = 0u64;
        for holder in self.model().undrainable_holders(id) {
            lacking = lacking.saturating_add(self.credit(holder, id, lacking));
            if lacking > 0 {
                let mut exempt = self.model().members_of_first(id);
                exempt.push(holder);
                let short = self.collect(id, lacking, &exempt, &[]);
                if self.model().can_be_served(holder, id) {
                    pressure.short = pressure.short.max(short);
                }
            }
        }
        lacking
    }

    /// Runs the clocks of holders that keep other clients waiting, informs holders, and revokes
    /// holders whose turn is over. Returns the time at which the next turn ends.
    pub fn update_turns(&mut self, id: GpuId, pressure: &Pressure) -> Option<Time> {
        let until = self.model().together_until(id);
        let all = self.model().holders_of(id, pressure);
        if until.is_some_and(|until| until <= self.now) {
            self.with_gpu(id, |gpu, _, _| gpu.forget_utilization());
        }
        let mut next = until.filter(|_| all.are_together());
        let mut short = pressure.short;
        for client in self.gpus.holders(id).collect::<Vec<_>>() {
            let Some(step) = self.model().turn_step(client, id, pressure, &all, &mut short) else { continue };
            let (goes, again) = (step.goes, step.next);
            self.with_gpu(id, |gpu, _, fx| gpu.step_turn(fx, client, step));
            if goes {
                self.revoke(client, id);
            }
            next = next.into_iter().chain(again).min();
        }
        next
    }

    /// Handles the release of a client whose mapping failed.
    pub fn mapping_failed(&mut self, client: ClientId, id: GpuId) {
        if self.with_gpu(id, |gpu, cx, fx| gpu.mapping_failed(cx, fx, client)) == Some(true) {
            self.with_requests(|requests| requests.delay_changed(client));
            // A pending measurement may have begun before the failure.
            self.with_gpu(id, |gpu, _, fx| gpu.measure_again(fx));
        }
    }

    /// Explains failures by a measurement that began at `begun`. `free`: bytes that plain
    /// allocations can get. `found`: the bytes of each client.
    pub fn explain_failures(&mut self, id: GpuId, begun: Time, free: Option<u64>, found: &BTreeMap<ClientId, Found>) {
        let Some(gpu) = self.gpus.get(id) else { return };
        let measurement = Measurement { begun, free, found, in_use: gpu.in_use() };
        for client in gpu.attachments.keys().copied().collect::<Vec<_>>() {
            if self.with_gpu(id, |gpu, cx, fx| gpu.explain_failure(cx, fx, client, measurement)) == Some(true) {
                self.with_requests(|requests| requests.delay_changed(client));
            }
        }
        self.with_gpu(id, |gpu, _, fx| gpu.failures_explained(fx));
    }

    /// Decides on failures whose measurement did not arrive in time.
    pub fn failures_are_unexplained(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, _| gpu.measurement_requested = false); // the answer may never come
        self.explain_failures(id, self.now.saturating_sub(FAILURE_TIMEOUT), None, &BTreeMap::new());
    }

    /// Evicts memory beyond the limits of rules.
    pub fn swap_surplus(&mut self, client: ClientId, id: GpuId) {
        if let Some(bytes) = self.model().within_limits(client, id) {
            self.with_gpu(id, |gpu, cx, fx| gpu.allow(cx, fx, client, bytes));
            self.check(client);
        }
    }

    // Grants and releases.

    /// Runs `act` on the queues. Then grants the requests that joined them and need no turn.
    pub fn with_requests<R>(&mut self, act: impl FnOnce(&mut Requests) -> R) -> R {
        let result = act(&mut self.requests());
        self.grant_needless();
        result
    }

    /// Like `with_requests`, for each of these requests in turn.
    pub fn with_each(&mut self, all: impl IntoIterator<Item = Entity>, act: impl Fn(&mut Requests, Entity)) {
        all.into_iter().for_each(|entity| self.with_requests(|requests| act(requests, entity)));
    }

    /// Grants requests that joined the queues and need no turn. A grant can move other requests and
    /// so grant them first. This ends because each grant takes a request, and makes none.
    fn grant_needless(&mut self) {
        for entity in self.effects.take_needless() {
            if self.model().needs_no_turn(entity) {
                self.grant(entity);
            }
        }
    }

    /// Handles a client's request, which replaces the client's earlier request.
    pub fn request(&mut self, client: ClientId, gpus: GpuSet) {
        if !self.clients.contains_key(&client) {
            return;
        }
        let wants = self.model().locks_to_wait_for(client, gpus);
        let (now, place) = (self.now, self.queues.place(client));
        self.with_requests(|requests| requests.withdraw(client));
        for id in &wants {
            let is_new = place.is_none() && self.gpus.hold(client, *id).is_none();
            self.with_gpu(*id, |gpu, _, _| gpu.used_by(now, client, is_new));
        }
        if wants.is_empty() {
            return;
        }
        self.with_requests(|requests| requests.add(client, wants, place));
        // Another member of the client's gang may need the client in order to drain.
        let gang = self.queues.entity(client).gang().filter(|gang| self.queues.gangs().is_job(*gang));
        let members = gang.into_iter().flat_map(|gang| self.queues.gangs().members(gang));
        members.collect::<Vec<_>>().into_iter().for_each(|member| self.check(member));
    }

    pub fn cancel(&mut self, client: ClientId, gpus: &GpuSet) {
        let Some(wants) = self.queues.wants(client).filter(|wants| !wants.is_disjoint(gpus)) else { return };
        let rest: GpuSet = wants.difference(gpus).copied().collect();
        if rest.is_empty() {
            self.with_requests(|requests| requests.withdraw(client));
        } else {
            self.request(client, rest);
        }
    }

    /// Grants a request: gives its clients the locks that they want.
    pub fn grant(&mut self, entity: Entity) {
        self.requests().dequeue(entity);
        let Some(request) = self.queues.take_request(entity) else { return };
        let now = self.now;
        self.requests().begin_gang_turn(entity, now);
        let group = self.effects.number();
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
                let lead = self.model().shares().virtual_time_lead(*id, client);
                if !lead.is_zero() {
                    self.fairness.advance_virtual_time(*id, lead);
                    let queue: Vec<Entity> = self.queues.queue(*id).map(|(_, entity)| entity).collect();
                    self.with_each(queue, |requests, entity| requests.requeue(entity));
                }
                let (finish_tag, own_finish_tag) = self.model().shares().finish_tags_before(client, *id);
                let hold = Hold::new(entity, number, group, now);
                let hold = Hold { moved, aged: request.aged, finish_tag, own_finish_tag, ..hold };
                self.with_gpu(*id, |gpu, cx, fx| gpu.begin_hold(cx, fx, client, hold, waited));
            }
            self.effects.command(Command::Grant { client, gpus });
        }
    }

    /// Takes over locks that a previous scheduler granted, and restarts their turns.
    pub fn held(&mut self, client: ClientId, gpus: &GpuSet) {
        let (entity, now, group) = (self.queues.entity(client), self.now, self.effects.number());
        self.requests().begin_gang_turn(entity, now);
        for id in gpus {
            let hold = Hold::new(entity, self.effects.number(), group, now);
            if self.gpus.lock(client, *id).is_some_and(|lock| lock.hold.is_none()) {
                self.with_gpu(*id, |gpu, cx, fx| gpu.take_over_hold(cx, fx, client, hold));
            }
        }
    }

    /// Revokes a lock and all locks that were granted together with it.
    pub fn revoke(&mut self, client: ClientId, id: GpuId) {
        for (member, gpus) in self.model().revoked_with(client, id) {
            if !gpus.is_empty() {
                self.send_revoke(member, gpus, None);
                self.check(member);
                self.requeue_peers(member);
            }
        }
    }

    /// Sends a revoke. `again`: the revoke is a repetition, with this backoff.
    fn send_revoke(&mut self, client: ClientId, gpus: GpuSet, again: Option<Duration>) {
        for id in &gpus {
            if let Some(gang) = self.gpus.hold(client, *id).and_then(|hold| hold.entity.gang()) {
                self.queues.gangs_mut().revoked(self.now, gang);
            }
            self.with_gpu(*id, |gpu, cx, fx| gpu.revoke(cx, fx, client, again));
        }
        self.effects.command(Command::Revoke { client, gpus });
    }

    /// Handles a client's release.
    pub fn released(&mut self, client: ClientId, gpus: &GpuSet, reason: ReleaseReason, busy: Duration) {
        let (held, revoked) = self.model().released(client, gpus);
        for id in held {
            self.end_hold(client, id, busy, reason == ReleaseReason::Idle);
            if reason == ReleaseReason::NoMemory {
                self.mapping_failed(client, id);
            } else if let Some(attachment) = self.gpus.attachment_mut(client, id) {
                attachment.failures.has_run();
            }
            self.swap_surplus(client, id);
        }
        if let Some((client, id)) = revoked.and_then(|gang| self.model().remaining_lock(gang)) {
            self.revoke(client, id);
        }
        self.check(client);
    }

    /// Ends a client's hold of a GPU. `idle`: the client released the lock because it had no more
    /// work.
    pub fn end_hold(&mut self, client: ClientId, id: GpuId, busy: Duration, idle: bool) {
        let ended = self.with_gpu(id, |gpu, cx, fx| gpu.end_hold(cx, fx, client, busy, idle)).flatten();
        let Some((hold, waited)) = ended else { return };
        if let Some(owner) = self.model().shares().bounded_owner(client).filter(|_| !hold.is_bypassed()) {
            self.fairness.record_usage(owner, id, hold.since, self.now, self.settings.time_period);
        }
        self.charge(client, id, &hold, waited);
        self.with_requests(|requests| {
            requests.touch_conflicting_gangs(hold.entity);
            requests.end_gang_turn(hold.entity);
            requests.requeue(hold.entity);
            requests.retry(client, |blocked| blocked == Blocked::Undrained);
        });
    }

    /// Charges a client's owners for a hold. `waited` is the part of the hold in which other clients
    /// waited. The owners' finish tags rise, and their requests move back in the queue.
    fn charge(&mut self, client: ClientId, id: GpuId, hold: &Hold, waited: Duration) {
        let Some(owner) = self.model().shares().owner(client) else { return };
        let tags = self.model().finish_tags(client, id, hold, waited);
        let (is_charged, keep) = (!tags.is_empty(), self.model().owners_with_one_key(id));
        self.fairness.set_finish_tags(self.now, id, &keep, tags);
        if is_charged {
            let own = self.model().own_requests(id, owner);
            self.with_each(own, |requests, entity| requests.requeue(entity));
        }
    }
}
