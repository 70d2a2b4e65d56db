//! The state, and the dispatch of events to the components. A component decides about its own state:
//! its methods read the other components, and leave commands, wake-ups and GPUs to settle in
//! [`Effects`]. Only this file changes several components, and it decides nothing itself: `model`
//! does.

use crate::{
    api::*,
    client::{Client, Clients},
    effects::Effects,
    explain::Explanation,
    fairness::Fairness,
    gpu::{
        self, AT_REST, Access, Admission, EndedHold, FAILURE_TIMEOUT, Gpu, Gpus, Hold, Measurement, ReservationNeeds,
    },
    gpu::{Return, capacity::GpuCapacities},
    model::{Model, Pressure},
    placement::{Placements, Sites},
    presence::{Presence, Task, Tasks},
    queue::{Blocked, Entity, Gang, Queues},
    quota::{self, Quota},
    requests::Requests,
    rules::Rules,
    sleep::{Sleep, Step},
    timers::Wake,
    view::{Activity, ClientView, GpuView, Turns},
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The latest time (34 years). Later times are clamped to this time, so that no sum of times
/// overflows.
const MAX_TIME: Time = Duration::from_secs(1 << 30);

impl Settings {
    /// Clamps durations, so that no sum of times overflows.
    fn clamp(&mut self) {
        self.time_quantum = self.time_quantum.min(MAX_TIME);
        self.time_period = self.time_period.min(MAX_TIME / 100);
        self.sleep_after = self.sleep_after.map(|after| after.min(MAX_TIME));
    }
}

/// The scheduler's state machine. Decides which clients run on which GPU, and which clients' memory
/// is on each GPU.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct Machine {
    now: Time,
    settings: Settings,
    gpus: Gpus,
    clients: Clients,
    queues: Queues,
    fairness: Fairness,
    rules: Rules,
    quota: Quota,
    places: Placements,
    #[serde(default)]
    sleep: Sleep,
    effects: Effects,
    /// The host is about to suspend.
    suspended: bool,
}

impl Machine {
    /// A machine without GPUs and clients, at time 0.
    pub fn new(mut settings: Settings) -> Self {
        settings.clamp();
        Self {
            now: Time::ZERO,
            settings,
            gpus: Gpus::default(),
            clients: Clients::new(),
            queues: Queues::default(),
            fairness: Fairness::default(),
            rules: Rules::default(),
            quota: Quota::default(),
            places: Placements::default(),
            sleep: Sleep::default(),
            effects: Effects::default(),
            suspended: false,
        }
    }

    /// The time at which the next [`Event::Tick`] is due if no other event arrives before. `None`:
    /// no tick is due.
    pub fn deadline(&self) -> Option<Time> {
        self.effects.deadline()
    }

    /// The current settings.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Handles an event. Returns the commands to carry out, in this order. Invalid events, such as
    /// events of unknown clients, change nothing. `now` should not decrease; an earlier time is
    /// raised to the time of the last event.
    pub fn handle(&mut self, now: Time, event: Event) -> Vec<Command> {
        self.now = self.now.max(now.min(MAX_TIME));
        // The event is handled before due wake-ups, so that an answer that arrives in time counts,
        // and clients that have just disconnected receive no requests.
        self.dispatch(event);
        while let Some(wake) = self.effects.take_due(self.now) {
            match wake {
                Wake::Gpu(gpu) => self.touch(gpu),
                Wake::Client(client) => self.check(client),
                Wake::Entity(entity) => self.with_requests(|requests| {
                    requests.requeue(entity);
                    requests.enqueue(entity);
                }),
                Wake::Eviction(client, gpu) => {
                    self.with_gpu(gpu, |gpu, cx, fx| gpu.unblock_eviction(cx, fx, client));
                }
                Wake::Verification(gpu) => {
                    self.with_gpu(gpu, |gpu, cx, fx| gpu.expire_unverified(cx.now, fx));
                }
                Wake::HeldRequests(gpu) => self.held_requests_timed_out(gpu),
                Wake::Failures(gpu) => self.failures_are_unexplained(gpu),
                Wake::Limits => self.quota.mark_all_changed(),
                Wake::Ahead(client, gpu) => self.ask_ahead(client, gpu),
                Wake::Sleep(client) => self.change_sleep(client, |presence| presence.look(client)),
            }
        }
        loop {
            while let Some(gpu) = self.effects.take_touched() {
                self.settle(gpu);
            }
            if !self.quota.has_changed() {
                break;
            }
            self.with_quota(Quota::balance);
            for client in self.quota.take_expected() {
                // Limits have made room for the client on the GPU that it moves to.
                self.follow(client, vec![Task::Move, Task::Step(Step::Nothing)]);
            }
        }
        self.effects.take_commands()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::Tick => {}
            Event::Configure(settings) => self.configure(settings),
            Event::GpuFound { gpu, total } => self.gpu_found(gpu, total),
            Event::GpuGone { gpu } => self.gpu_gone(gpu),
            Event::Suspend { suspended } => self.suspend(suspended),
            Event::GpuLink { gpu, rate } => {
                self.with_gpu(gpu, |gpu, _, fx| gpu.link_found(fx, rate));
            }
            Event::GpuOverhead { gpu, begun, bytes, others, complete } => {
                self.with_gpu(gpu, |gpu, cx, fx| gpu.overhead_measured(cx, fx, begun, bytes, others, complete));
            }
            Event::Measured { gpu, begun, free, found } => self.measured(gpu, begun, free, &found),
            Event::ContextSizes { gpu, bytes } => {
                self.with_quota(|quota, cx, _| quota.contexts_measured(cx, gpu, &bytes))
            }
            Event::OtherPrograms { gpu, present } => {
                self.with_gpu(gpu, |gpu, _, fx| gpu.other_programs(fx, present));
            }
            Event::HostMemory { bytes } => self.quota.host_memory(bytes),
            Event::HostAhead { bytes } => self.host_ahead(bytes),
            Event::Connected { client, gang, tenant } => self.connected(client, gang, tenant),
            Event::Groups { groups } => self.grouped(&groups),
            Event::EnvLimits { client, limits } => self.set_env_limits(client, limits),
            Event::Labels { labels } => self.places.label(&labels),
            Event::PlacementRequested { client, request } => self.request_placement(client, &request),
            Event::PlacementTaken { client, from } => self.take_placement(client, from),
            Event::Disconnected { client } => self.disconnected(client),
            Event::Attached { client, gpu, engine } => {
                self.alive(client);
                self.attach(client, gpu, engine);
            }
            Event::Detached { client, gpu } => {
                self.alive(client);
                self.detach(client, gpu);
            }
            Event::Memory { client, gpu, report } => {
                self.alive(client);
                self.report(client, gpu, report);
            }
            Event::LimitRequested { client, gpu, bytes } => {
                self.alive(client);
                self.request_limit(client, gpu, bytes);
            }
            Event::ReservationRequested { client, gpu, bytes } => {
                self.alive(client);
                self.with_gpu(gpu, |gpu, cx, fx| gpu.request_reservation(cx, fx, client, bytes));
            }
            Event::Utilization { client, gpu, permille } => {
                self.alive(client);
                self.with_gpu(gpu, |gpu, _, fx| gpu.utilization(fx, client, permille));
            }
            Event::Requested { client, gpus } => {
                self.alive(client);
                self.request(client, gpus);
            }
            Event::Cancelled { client, gpus } => {
                self.alive(client);
                self.cancel(client, &gpus);
            }
            Event::Released { client, gpus, reason, busy } => {
                self.alive(client);
                self.released(client, &gpus, reason, busy);
                if self.sleep.is_to_prepare(client) {
                    self.follow(client, vec![Task::Prepare]);
                }
            }
            Event::Held { client, gpus } => {
                self.alive(client);
                self.held(client, &gpus);
            }
            Event::Stuck { client, gpus, reason } => {
                self.alive(client);
                self.stuck(client, &gpus, reason);
            }
            Event::Stopped { client, stopped } => self.stopped(client, stopped),
            Event::RoomRequested { room, gpu, bytes, until } => {
                self.request_room(room, gpu, bytes, until.min(MAX_TIME))
            }
            Event::RoomClosed { room } => self.end_room(room),
            Event::SleepWanted { client, paused } => {
                self.change_sleep(client, |presence| presence.want(client, paused));
            }
            Event::FoundAsleep { client } => self.change_sleep(client, |presence| presence.found(client)),
            Event::Resumed { client } => self.change_sleep(client, |presence| presence.wake(client, true)),
            Event::Migrate { client, from, to } => {
                self.change_sleep(client, |presence| presence.migrate(client, Move { from, to }));
            }
            Event::Drain { gpu, drained } => self.drain(gpu, drained),
            Event::Kinds { kinds } => self.places.set_kinds(kinds),
            Event::Failing { gpu, failing } => {
                self.gpus.get_mut(gpu).into_iter().for_each(|gpu| gpu.failing = failing);
            }
            Event::Allowed { allowed } => self.places.allow(allowed),
            Event::SleepReady { client } => {
                self.alive(client);
                self.change_sleep(client, |presence| presence.ready(client));
            }
            Event::SleepRefused { client, why } => {
                self.alive(client);
                self.change_sleep(client, |presence| presence.refused(client, why));
            }
            Event::WakeRequested { client } => {
                self.alive(client);
                self.change_sleep(client, |presence| presence.wake(client, false));
            }
            Event::Checkpointed { client, outcome } => {
                self.change_sleep(client, |presence| presence.checkpointed(client, outcome));
            }
        }
    }

    // Access to the components.

    /// A read-only view of the current state.
    fn model(&self) -> Model<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, .. } = self;
        Model { now: *now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places }
    }

    /// A GPU to change, the state that decisions about it depend on, and the effects to add to.
    /// `None`: the GPU is unknown.
    fn gpu_mut(&mut self, id: GpuId) -> Option<(&mut Gpu, gpu::Context<'_>, &mut Effects)> {
        let Self { now, settings, gpus, rules, clients, queues, sleep, quota, effects, .. } = self;
        let context = gpu::Context { now: *now, settings, rules, clients, queues, sleep, quota };
        Some((gpus.get_mut(id)?, context, effects))
    }

    /// Runs `act` on a GPU if the GPU is known.
    fn with_gpu(&mut self, id: GpuId, act: impl FnOnce(&mut Gpu, gpu::Context, &mut Effects)) {
        if let Some((gpu, cx, fx)) = self.gpu_mut(id) {
            act(gpu, cx, fx);
        }
    }

    /// Runs `act` on each GPU that a client has attached.
    fn with_gpus_of(&mut self, client: ClientId, mut act: impl FnMut(&mut Gpu, gpu::Context, &mut Effects)) {
        for id in self.gpus.of_client(client) {
            self.with_gpu(id, &mut act);
        }
    }

    /// Runs `act` on the quota.
    fn with_quota<R>(&mut self, act: impl FnOnce(&mut Quota, quota::Context, &mut Effects) -> R) -> R {
        let gpus = GpuCapacities { gpus: &self.gpus, settings: &self.settings };
        let context = quota::Context { now: self.now, rules: &self.rules, gpus: &gpus };
        act(&mut self.quota, context, &mut self.effects)
    }

    fn requests(&mut self) -> Requests<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, effects, .. } = self;
        Requests { queues, effects, now: *now, settings, rules, clients, gpus, sleep, quota, fairness, places }
    }

    /// Runs `act` on the queues. Then grants the requests that joined them and need no turn.
    fn with_requests<R>(&mut self, act: impl FnOnce(&mut Requests) -> R) -> R {
        let result = act(&mut self.requests());
        self.grant_needless();
        result
    }

    /// Marks a GPU to be settled.
    fn touch(&mut self, gpu: GpuId) {
        if self.gpus.contains(gpu) {
            self.effects.touch(gpu);
        }
    }

    fn credit(&mut self, client: ClientId, id: GpuId, reserved_ahead: u64) -> u64 {
        self.gpu_mut(id).map_or(0, |(gpu, cx, fx)| gpu.credit(cx, fx, client, reserved_ahead))
    }

    /// Requests a measurement of a GPU if none is pending.
    fn measure(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, fx| gpu.measure(fx));
    }

    // Settling.

    /// Brings a GPU up to date: first its memory, then the lock, then messages to holders. Called for
    /// each GPU that an event has marked. Settling an unchanged GPU does nothing.
    fn settle(&mut self, id: GpuId) {
        // Rooms, the number of contexts, the capacity, and the order of the queue.
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        let rooms = gpu.serve_rooms(cx.now, cx.settings, fx);
        gpu.count_deferred(cx);
        if gpu.note_capacity(cx.settings) {
            self.with_requests(|requests| requests.enqueue_pinned(id));
        }
        self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
        let reclassified = self.with_requests(|requests| {
            requests.enqueue_unblocked(id);
            requests.reclassify(id)
        });
        if self.model().access(id) == Access::Gone {
            self.let_through(id);
            self.serve_returning(id);
            let next = self.answer_attaching(id);
            return self.effects.wake(Wake::Gpu(id), next);
        }

        // Memory, in order of precedence: contexts and holders, then reservations, then the queue.
        // `reserved_ahead` counts the bytes being freed for needs that precede the queue.
        let mut pressure = Pressure::default();
        let holders_lack = self.serve_holders(id, &mut pressure);
        let reserved = self.serve_reservations(id, holders_lack);
        pressure.add_reservations(&reserved);
        let reserved_ahead = holders_lack.saturating_add(reserved.lacking);
        let mut lacking = self.serve_queue(id, reserved_ahead, &mut pressure);
        self.with_gpu(id, |gpu, cx, fx| gpu.try_holder(cx, fx));
        if !pressure.locked_out {
            pressure.add_conflict(self.model().gang_awaiting_holders(id));
        }
        if reserved_ahead == 0 && lacking == 0 {
            lacking = self.serve_undrainable(id, &mut pressure);
        }
        let is_enough = reserved_ahead == 0 && lacking == 0;
        self.with_gpu(id, |gpu, _, _| gpu.lacking = !is_enough);
        // Contexts and sleep: clients that return, arrive, and leave for others.
        let returning = self.serve_returning(id);
        let attaching = self.answer_attaching(id);
        let sleeping = self.sleep_idle(id);
        if is_enough {
            self.with_gpu(id, |gpu, cx, fx| gpu.credit_ahead(cx, fx));
        }

        // The lock: turns that end, and messages to holders.
        let turn = self.update_turns(id, &pressure);
        self.with_requests(|requests| requests.note_opening(id));
        let conflict = self.model().checks_conflict_at(pressure.first);
        let next = [rooms, attaching, returning, sleeping, turn, reserved.next, reclassified, conflict];
        self.effects.wake(Wake::Gpu(id), next.into_iter().flatten().min());
    }

    /// Grants requests for a GPU that is gone, if all other GPUs that the requests want can be
    /// granted too.
    fn let_through(&mut self, id: GpuId) {
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
    fn serve_holders(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
        let mut reserved_ahead = self.model().overdrawn(id);
        let next = self.model().members_of_first(id);
        if reserved_ahead > 0 {
            pressure.short = self.collect(id, reserved_ahead, &[], &next);
            let vacates = self.gpus.get(id).is_some_and(|gpu| gpu.vacates(&self.settings));
            pressure.at_once = pressure.short > 0 && vacates;
        }
        for holder in self.model().unrevoked_holders(id) {
            let lacking = self.credit(holder, id, reserved_ahead);
            if lacking > 0 {
                reserved_ahead = reserved_ahead.saturating_add(lacking);
                let short = self.collect(id, reserved_ahead, &[holder], &next);
                pressure.add_growth(holder, short);
                break;
            }
        }
        reserved_ahead
    }

    /// Reserves free bytes and evicts memory for the rest. `reserved_ahead` of the bytes being freed
    /// are reserved for earlier needs.
    fn serve_reservations(&mut self, id: GpuId, reserved_ahead: u64) -> ReservationNeeds {
        let mut needs = ReservationNeeds::default();
        let count = self.gpu_mut(id).map_or(0, |(gpu, cx, _)| gpu.end_reservations(cx.now));
        for at in 0..count {
            let secured = self.gpu_mut(id).and_then(|(gpu, cx, _)| gpu.secure(cx, at, reserved_ahead));
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
    fn collect(&mut self, id: GpuId, bytes: u64, exempt: &[ClientId], last: &[ClientId]) -> u64 {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return bytes };
        let arriving = gpu.arriving(cx, fx, exempt);
        if bytes <= arriving {
            return 0;
        }
        let queue = self.model().policy().evicts_by_queue().then(|| self.model().whole_queue(id));
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return bytes };
        let asked = gpu.evict(cx, fx, bytes - arriving, exempt, last, queue.as_deref());
        let arriving = gpu.arriving(cx, fx, exempt);
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
    fn serve_queue(&mut self, id: GpuId, reserved_ahead: u64, pressure: &mut Pressure) -> u64 {
        loop {
            let Some(entity) = self.queues.first(id) else { return 0 };
            let members = self.queues.members(entity, id);
            if !self.model().has_room(entity, id, &members) {
                self.with_requests(|requests| requests.does_not_fit(entity, id));
                continue;
            }
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
    fn serve_undrainable(&mut self, id: GpuId, pressure: &mut Pressure) -> u64 {
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
    fn update_turns(&mut self, id: GpuId, pressure: &Pressure) -> Option<Time> {
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

    /// Admits attaching clients that have room or have waited long enough. Returns the time of the
    /// next check. The loop ends because each round but the last takes a client out of those that
    /// wait to create a context.
    fn answer_attaching(&mut self, id: GpuId) -> Option<Time> {
        loop {
            let (gpu, cx, fx) = self.gpu_mut(id)?;
            let client = match gpu.admit_context(cx, fx) {
                Admission::Waits(next) => return next,
                Admission::Admits(client) => client,
            };
            self.with_quota(|quota, cx, fx| quota.admit(cx, fx, client, id));
            if self.model().is_drained(id) {
                self.follow(client, vec![Task::Drain]); // the client's context predates this scheduler
            }
        }
    }

    // Grants and releases.

    /// Handles a client's request, which replaces the client's earlier request.
    fn request(&mut self, client: ClientId, gpus: GpuSet) {
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

    fn cancel(&mut self, client: ClientId, gpus: &GpuSet) {
        let Some(wants) = self.queues.wants(client).filter(|wants| !wants.is_disjoint(gpus)) else { return };
        let rest: GpuSet = wants.difference(gpus).copied().collect();
        if rest.is_empty() {
            self.with_requests(|requests| requests.withdraw(client));
        } else {
            self.request(client, rest);
        }
    }

    /// Grants requests that joined the queues and need no turn. Ends because each grant takes a
    /// request, and grants make no requests.
    fn grant_needless(&mut self) {
        loop {
            let joined = self.effects.take_needless();
            if joined.is_empty() {
                return;
            }
            for entity in joined {
                if self.model().needs_no_turn(entity) {
                    self.give(entity);
                }
            }
        }
    }

    /// Grants a request: gives its clients the locks that they want.
    fn grant(&mut self, entity: Entity) {
        self.give(entity);
        self.grant_needless();
    }

    fn give(&mut self, entity: Entity) {
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
                    self.requests().requeue_on(*id);
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
    fn held(&mut self, client: ClientId, gpus: &GpuSet) {
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
    fn revoke(&mut self, client: ClientId, id: GpuId) {
        for (member, gpus) in self.model().revoked_with(client, id) {
            if !gpus.is_empty() {
                self.send_revoke(member, gpus, None);
                self.check(member);
                self.with_requests(|requests| requests.requeue_gang_peers(member));
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
    fn released(&mut self, client: ClientId, gpus: &GpuSet, reason: ReleaseReason, busy: Duration) {
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
    fn end_hold(&mut self, client: ClientId, id: GpuId, busy: Duration, idle: bool) {
        let ended = self.gpu_mut(id).and_then(|(gpu, cx, fx)| gpu.end_hold(cx, fx, client, busy, idle));
        let Some(EndedHold { hold, waited }) = ended else { return };
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
            self.with_requests(|requests| requests.requeue_own(id, owner));
        }
    }

    // Clients that do not answer.

    /// Handles a holder's report that it cannot drain or evict.
    fn stuck(&mut self, client: ClientId, gpus: &GpuSet, reason: StuckReason) {
        let cannot_evict = match reason {
            StuckReason::UntrackedWork => return, // concerns the client's memory, not a drain
            StuckReason::HostFull => Some(EvictionBlock::HostFull),
            StuckReason::Broken => Some(EvictionBlock::Broken),
            StuckReason::UnseenWork => Some(EvictionBlock::UnseenWork),
            StuckReason::NeedsHost | StuckReason::LongWork | StuckReason::Capturing => None,
        };
        if let Some(why) = cannot_evict {
            return gpus.iter().for_each(|id| self.with_gpu(*id, |gpu, cx, fx| gpu.cannot_evict(cx, fx, client, why)));
        }
        if reason == StuckReason::NeedsHost {
            // The client's gate is open again and no thread waits at it. So the client's own
            // request must not cause a revoke.
            self.cancel(client, gpus);
        }
        for id in gpus {
            if self.gpu_mut(*id).is_some_and(|(gpu, cx, fx)| gpu.is_stuck(cx.now, fx, client)) {
                self.with_requests(|requests| requests.report_wait_on(*id, WaitReason::HolderStuck));
            }
        }
        self.with_requests(|requests| requests.touch_gang_peers(client));
        self.check(client);
    }

    /// Handles a process that was stopped, or has been continued.
    fn stopped(&mut self, client: ClientId, stopped: bool) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        let changed = std::mem::replace(&mut state.stopped, stopped) != stopped;
        self.quota.set_stopped(client, stopped || self.sleep.is_away(client));
        self.with_gpus_of(client, |gpu, cx, fx| gpu.process_stopped(cx, fx, client, stopped, changed));
        self.with_requests(|requests| {
            requests.end_gang_turn(requests.queues.entity(client));
            if changed && stopped {
                requests.wait_until_it_runs(client);
            }
        });
        if changed && !stopped && self.with_requests(|requests| requests.runs_again(client)) {
            self.update_entity(client);
        }
        self.check(client);
    }

    /// Takes any message from a client as proof that its process runs.
    fn alive(&mut self, client: ClientId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.heard = self.now;
        if state.stopped {
            self.stopped(client, false);
        }
    }

    /// Checks the answers that a client owes, asks again for overdue answers, and sets the time of
    /// the next check. The loop ends because a repeated revoke is not due again at the same time.
    fn check(&mut self, client: ClientId) {
        let mut is_revoked_again = false;
        loop {
            let mut answers = self.model().answers(client);
            for id in &answers.late {
                self.with_gpu(*id, |gpu, cx, fx| gpu.eviction_is_late(cx, fx, client));
            }
            for id in &answers.lagging {
                self.with_gpu(*id, |gpu, _, fx| gpu.lags(fx, client));
                self.with_requests(|requests| requests.touch_gang_peers(client));
            }
            self.schedule_around(client, std::mem::take(&mut answers.undrainable));
            self.model().withdraw_unwanted(client, &mut answers);
            for id in &answers.unwanted {
                self.with_gpu(*id, |gpu, cx, fx| gpu.change_hold(cx, fx, client, |hold| hold.revoked = None));
            }
            if !answers.unwanted.is_empty() {
                self.with_requests(|requests| requests.revoke_withdrawn(client));
            }
            let Some(state) = self.clients.get_mut(&client) else { return };
            let is_probed;
            (is_probed, state.probed) = answers.probe(self.now, state.probed);
            if is_probed {
                self.effects.command(Command::Probe { client });
            }
            self.effects.wake(Wake::Client(client), answers.next);
            let Some((gpus, backoff)) = answers.again else { break };
            self.send_revoke(client, gpus, Some(backoff));
            is_revoked_again = true;
        }
        if is_revoked_again {
            self.with_requests(|requests| requests.requeue_gang_peers(client));
        }
    }

    /// Marks holds as undrainable: other clients are admitted beside them from now on.
    fn schedule_around(&mut self, client: ClientId, gpus: GpuSet) {
        if gpus.is_empty() {
            return;
        }
        for id in &gpus {
            if let Some((hold, waited)) = self.model().charged_early(client, *id) {
                self.charge(client, *id, &hold, waited);
            }
            self.with_gpu(*id, |gpu, cx, fx| gpu.becomes_undrainable(cx, fx, client));
        }
        self.effects.command(Command::Undrainable { client, gpus });
        self.with_requests(|requests| requests.becomes_undrainable(client));
    }

    // Gangs.

    fn enter_gang(&mut self, client: ClientId, gang: Option<Gang>) {
        let Some(gang) = gang else { return };
        self.queues.join_gang(client, gang);
        self.members_changed(gang);
        self.requests().touch_conflicting_gangs(Entity::Gang(gang));
    }

    fn leave_gang(&mut self, client: ClientId) {
        let Some(gang) = self.queues.gang(client) else { return };
        self.requests().touch_conflicting_gangs(Entity::Gang(gang));
        self.queues.leave_gang(client);
        self.members_changed(gang);
    }

    /// Updates the members of a gang after a member joined or left. The members' class changes, and
    /// they may have become a gang or ceased to be one.
    fn members_changed(&mut self, gang: Gang) {
        for member in self.queues.gangs().members(gang).collect::<Vec<_>>() {
            self.update_entity(member);
            self.effects.touch_all(self.gpus.holds_of(member).map(|(id, _)| id));
            self.with_requests(|requests| requests.members_changed(member));
        }
    }

    /// Assigns a client's holds and requests to the client's present entity: its gang, or the client
    /// alone.
    fn update_entity(&mut self, client: ClientId) {
        let entity = self.queues.entity(client);
        // The holds are revoked together with the members of the new entity.
        if let Some(since) = self.gpus.set_entity_of_holds(client, entity) {
            self.requests().begin_gang_turn(entity, since);
        }
        if self.queues.waiting(client).is_some_and(|waiting| waiting != entity)
            && let Some(wants) = self.queues.wants(client).cloned()
        {
            self.request(client, wants);
        }
    }

    /// Updates a client's gang after its rule changed. The client's requests become requests of the
    /// new gang.
    fn update_gang(&mut self, client: ClientId) {
        let gang = self.model().gang_by_rule(client);
        if !self.clients.contains_key(&client) || gang == self.queues.gang(client) {
            return;
        }
        self.leave_gang(client);
        self.enter_gang(client, gang);
        self.update_entity(client);
    }

    // Memory.

    fn attach(&mut self, client: ClientId, id: GpuId, engine: Engine) {
        let now = self.now;
        let Some(tenant) = self.clients.get(&client).filter(|_| self.gpus.contains(id)).map(|state| state.tenant)
        else {
            return;
        };
        if let Some(attachment) = self.gpus.attachment_mut(client, id) {
            attachment.engine = engine;
            // The request is answered again, unless its first answer is pending.
            if attachment.attached.is_some() {
                self.effects.command(Command::Attached { client, gpu: id });
                self.with_quota(|quota, cx, fx| quota.tell(cx, fx, client, id));
            }
            return;
        }
        self.gpus.attach(now, client, id, tenant, engine);
        self.quota.attach(client, id);
        self.touch(id);
        if self.sleep.is_away(client) {
            self.follow(client, vec![Task::Leave]);
        }
        if self.sleep.view(client).phase != SleepPhase::Awake {
            self.follow(client, vec![Task::Drain]);
        }
    }

    /// Removes a client from a GPU, with its memory, its hold and its requests.
    fn detach(&mut self, client: ClientId, id: GpuId) {
        if self.gpus.attachment(client, id).is_none() {
            return;
        }
        let entity = self.queues.entity(client);
        self.requests().touch_conflicting_gangs(entity);
        self.cancel(client, &GpuSet::from([id]));
        self.end_hold(client, id, Duration::ZERO, false);
        self.quota.detach(client, id, &self.rules);
        self.gpus.detach(client, id);
        self.effects.forget_client(client, id);
        self.sleep.detached(client, id);
        self.follow(client, vec![Task::Limit, Task::AnswerMove]);
        self.touch(id);
        if self.sleep.is_drained(client) {
            self.follow(client, vec![Task::Drain]);
        }
        self.forget_if_gone(id);
    }

    /// Handles a client's report of its memory on a GPU.
    fn report(&mut self, client: ClientId, id: GpuId, report: MemoryReport) {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        let Some(report) = gpu.reported(cx, fx, client, report) else { return };
        self.with_quota(|quota, cx, _| quota.reported(cx, client, id, report.limit_ack, report.demand));
        self.check(client); // the report may be a late answer to a revoke or an eviction
        // The client's need may have changed, and its blocked request may now be servable.
        self.with_requests(|requests| requests.retry(client, |blocked| blocked == Blocked::Pinned(id)));
        // Holders and the first request in the queue are served first. Bytes that are still free
        // may then go to a client that is not waiting.
        self.effects.untouch(id);
        self.settle(id);
        if self.gpus.get(id).is_some_and(|gpu| !gpu.lacking) && !self.model().is_over_limit(client, id) {
            self.credit(client, id, self.model().overdrawn(id));
        }
    }

    /// Handles a client's request for a higher limit.
    fn request_limit(&mut self, client: ClientId, id: GpuId, bytes: u64) {
        // A client allocates only in a context.
        self.with_gpu(id, |gpu, cx, _| gpu.used_by(cx.now, client, false));
        if self.with_quota(|quota, cx, fx| quota.request(cx, fx, client, id, bytes)) {
            self.measure(id);
        }
    }

    /// Handles the timeout of a measurement that limit requests wait for.
    fn held_requests_timed_out(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, _| gpu.measurement_requested = false); // it may never arrive
        if self.with_quota(|quota, cx, fx| quota.held_requests_timed_out(cx, fx, id)) {
            self.measure(id);
        }
    }

    /// Handles a measurement of clients' memory.
    fn measured(&mut self, id: GpuId, begun: Time, free: Option<u64>, found: &BTreeMap<ClientId, Found>) {
        let Some((gpu, cx, fx)) = self.gpu_mut(id) else { return };
        gpu.clients_measured(cx, fx, begun, found);
        if self.with_quota(|quota, cx, fx| quota.answer_held(cx, fx, id, begun)) {
            self.measure(id);
        }
        self.with_gpu(id, |gpu, cx, _| gpu.returning_measured(cx.settings, begun, free));
        self.explain_failures(id, begun, free, found);
        self.touch(id);
    }

    /// Handles the release of a client whose mapping failed.
    fn mapping_failed(&mut self, client: ClientId, id: GpuId) {
        if self.gpu_mut(id).is_some_and(|(gpu, cx, fx)| gpu.mapping_failed(cx, fx, client)) {
            self.with_requests(|requests| requests.delay_changed(client));
            // A pending measurement may have begun before the failure.
            self.with_gpu(id, |gpu, _, fx| gpu.measure_again(fx));
        }
    }

    /// Explains failures by a measurement that began at `begun`. `free`: the GPU's free bytes.
    /// `found`: the bytes of each client.
    fn explain_failures(&mut self, id: GpuId, begun: Time, free: Option<u64>, found: &BTreeMap<ClientId, Found>) {
        let Some(gpu) = self.gpus.get(id) else { return };
        let measurement = Measurement { begun, free, found, in_use: gpu.in_use() };
        for client in gpu.attachments.keys().copied().collect::<Vec<_>>() {
            if self.gpu_mut(id).is_some_and(|(gpu, cx, fx)| gpu.explain_failure(cx, fx, client, measurement)) {
                self.with_requests(|requests| requests.delay_changed(client));
            }
        }
        self.with_gpu(id, |gpu, _, fx| gpu.failures_explained(fx));
    }

    /// Decides on failures whose measurement did not arrive in time.
    fn failures_are_unexplained(&mut self, id: GpuId) {
        self.with_gpu(id, |gpu, _, _| gpu.measurement_requested = false); // the answer may never come
        self.explain_failures(id, self.now.saturating_sub(FAILURE_TIMEOUT), None, &BTreeMap::new());
    }

    /// Evicts memory beyond the limits of rules.
    fn swap_surplus(&mut self, client: ClientId, id: GpuId) {
        if let Some(bytes) = self.model().within_limits(client, id) {
            self.with_gpu(id, |gpu, cx, fx| gpu.allow(cx, fx, client, bytes));
            self.check(client);
        }
    }

    /// Asks a client whose memory is unchanged to allocate host memory for it. At the first eviction
    /// of memory, allocating host memory takes longer than copying.
    fn ask_ahead(&mut self, client: ClientId, id: GpuId) {
        let bytes = self.gpus.get(id).and_then(|gpu| gpu.unchanged_memory(client));
        if let Some(bytes) = bytes.and_then(|bytes| self.quota.ahead(client, id, bytes)) {
            self.effects.command(Command::Prepare { client, gpu: id, bytes });
        }
    }

    /// Sets the host memory that may be allocated ahead.
    fn host_ahead(&mut self, bytes: Option<u64>) {
        if self.with_quota(|quota, cx, fx| quota.host_ahead(cx, fx, bytes)) {
            let at = Some(self.now + AT_REST);
            for (id, gpu) in self.gpus.iter() {
                gpu.attachments.keys().for_each(|client| self.effects.wake(Wake::Ahead(*client, id), at));
            }
        }
    }

    // Sleep.

    fn presence(&mut self) -> Presence<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, effects, .. } = self;
        Presence { sleep, effects, now: *now, settings, rules, clients, gpus, queues, quota, fairness, places }
    }

    /// Does these tasks for a client in their order. What follows from a task is done before the
    /// tasks behind it. [`Presence::follow`] says why this ends.
    fn follow(&mut self, client: ClientId, tasks: Vec<Task>) {
        let mut todo: Tasks = tasks.into_iter().rev().map(|task| (client, task)).collect();
        while let Some((client, task)) = todo.pop() {
            match task {
                Task::WaitUntilItRuns => self.with_requests(|requests| requests.wait_until_it_runs(client)),
                Task::MayRun => {
                    if self.with_requests(|requests| requests.runs_again(client)) {
                        self.update_entity(client);
                    }
                    self.effects.touch_all(self.gpus.of_client(client));
                }
                Task::Revoke => self.gpus.of_client(client).into_iter().for_each(|id| self.revoke(client, id)),
                Task::TakeAll => {
                    self.with_gpus_of(client, |gpu, cx, fx| gpu.take_all(cx, fx, client));
                    self.check(client);
                }
                Task::Leave => {
                    self.quota.set_stopped(client, true); // the client reads no messages
                    self.with_gpus_of(client, |gpu, cx, fx| gpu.left(cx, fx, client));
                }
                Task::ComeBack => {
                    let is_stopped = self.clients.get(&client).is_some_and(|state| state.stopped);
                    self.quota.set_stopped(client, is_stopped);
                    self.with_gpus_of(client, |gpu, cx, fx| gpu.came_back(cx.now, fx, client));
                }
                Task::ForgetContexts => {
                    for id in self.gpus.of_client(client) {
                        self.with_gpu(id, |gpu, _, _| {
                            gpu.away.get_mut(&client).into_iter().for_each(|bytes| *bytes = 0)
                        });
                        self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
                    }
                }
                Task::Limit => self.limit_sleeper(client),
                Task::ExpectReturn => self.with_gpus_of(client, |gpu, cx, fx| gpu.expect_return(cx, fx, client)),
                Task::CancelReturn => self.with_gpus_of(client, |gpu, _, fx| gpu.cancel_return(fx, client)),
                Task::Restore => self.with_gpus_of(client, |gpu, cx, _| gpu.begin_restore(cx.now)),
                Task::MoveTo(to) => self.move_attachment(client, to),
                task => todo.extend(self.presence().follow(client, task).into_iter().rev()),
            }
        }
    }

    /// Lets a change of a client's sleep happen, with all that follows.
    fn change_sleep(&mut self, client: ClientId, change: impl FnOnce(&mut Presence) -> Vec<Task>) {
        let tasks = change(&mut self.presence());
        self.follow(client, tasks);
    }

    /// Puts the longest-idle client to sleep, if its idle time suffices and other clients lack room.
    /// Returns when the next client's idle time suffices.
    fn sleep_idle(&mut self, id: GpuId) -> Option<Time> {
        let (client, due) = self.model().next_sleeper(id)?;
        if self.now < due {
            return Some(due);
        }
        self.change_sleep(client, |presence| presence.want(client, false));
        None // the sleep changes the GPU, so it is settled again
    }

    /// Starts the restore of a client if all of its GPUs have room. Returns the time of the next
    /// check.
    fn serve_returning(&mut self, id: GpuId) -> Option<Time> {
        let (gpu, cx, fx) = self.gpu_mut(id)?;
        match gpu.serve_return(cx, fx)? {
            Return::Waits(next) => return next,
            // The GPU changes, so it is settled again.
            Return::IsOverdue(client) => self.follow(client, vec![Task::Return]),
            Return::HasRoom(client) => self.change_sleep(client, |presence| presence.restore(client)),
        }
        None
    }

    /// Starts to empty the GPU (`drained`), or puts it back into use.
    fn drain(&mut self, id: GpuId, drained: bool) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.drained = drained;
        let clients: Vec<ClientId> = gpu.attachments.keys().copied().collect();
        clients.into_iter().for_each(|client| self.follow(client, vec![Task::Drain]));
        self.touch(id);
    }

    /// Updates a client's limits for its sleep. Sets room aside on the GPU that the client will be
    /// moved to, and on the GPUs that it may be moved back to.
    fn limit_sleeper(&mut self, client: ClientId) {
        let is_asleep = self.sleep.view(client).phase != SleepPhase::Awake;
        let (goes, back) = self.model().expected(client);
        self.with_quota(|quota, cx, fx| {
            quota.set_asleep(cx, fx, client, is_asleep);
            quota.expect(cx, client, &goes, &back);
        });
    }

    /// Moves the attachment of a sleeping client from one GPU to another, together with its limit
    /// and its request. Does nothing if the target is unknown or the client has already attached it.
    fn move_attachment(&mut self, client: ClientId, both @ Move { from, to }: Move) {
        if !self.gpus.move_client(self.now, client, both) {
            return;
        }
        let wanted = self.with_quota(|quota, cx, _| quota.move_client(cx, client, from, to));
        let wants = self.queues.wants(client).filter(|wants| wants.contains(&from)).cloned();
        self.places.move_client(client, from, to);
        self.effects.forget_client(client, from);
        let (is_drained, number) = (self.model().has_drained(client), self.effects.number());
        self.sleep.moved(client, both, is_drained, number);
        // Called in the same step, so that no other client is promised this client's bytes.
        self.limit_sleeper(client);
        self.effects.command(Command::Moved { client, from, to });
        if let Some(mut wants) = wants {
            wants.remove(&from);
            wants.insert(to);
            self.request(client, wants); // the request keeps its place
        }
        if let Some(bytes) = wanted {
            self.request_limit(client, to, bytes);
        }
        self.with_gpu(to, |gpu, cx, fx| gpu.lock_changed(cx, fx, client));
        self.with_gpu(from, |gpu, _, fx| gpu.schedule_verification(fx));
        for id in [from, to] {
            self.measure(id);
            self.touch(id);
        }
        self.forget_if_gone(from);
    }

    // Membership, rules and GPUs.

    fn connected(&mut self, id: ClientId, gang: u64, tenant: TenantId) {
        if self.clients.contains_key(&id) {
            return;
        }
        let client = Client { named: gang, tenant, stopped: false, heard: self.now, probed: None };
        self.clients.insert(id, client);
        self.fairness.connected(id, tenant);
        self.enter_gang(id, Gang::named(gang));
    }

    fn disconnected(&mut self, id: ClientId) {
        if !self.clients.contains_key(&id) {
            return;
        }
        let gpus = self.gpus.of_client(id);
        self.with_requests(|requests| requests.withdraw(id));
        self.sleep.forget(id); // a disconnected client receives no more commands
        self.limit_sleeper(id);
        for gpu in gpus {
            self.detach(id, gpu);
        }
        self.rules.set_env(id, EnvLimits::default());
        self.leave_group(id);
        self.quota.disconnected(id);
        self.leave_gang(id);
        self.queues.disconnected(id);
        self.fairness.disconnected(id);
        self.places.leave(id, |client| self.clients.contains_key(client));
        self.clients.remove(&id);
        self.effects.wake(Wake::Client(id), None);
        self.sleep.forget(id);
        self.effects.wake(Wake::Sleep(id), None);
        self.follow(id, vec![Task::Return]);
    }

    /// Applies new rules to these clients.
    fn grouped(&mut self, groups: &BTreeMap<ClientId, Option<Group>>) {
        let mut bounds_changed: BTreeSet<ClientId> = groups.keys().copied().collect();
        let mut shares_changed = false;
        // All clients change groups before any limit is computed. Otherwise a limit could count a
        // member too early and give that member other clients' memory.
        for (client, group) in groups {
            self.leave_group(*client);
            if !self.clients.contains_key(client) {
                continue;
            }
            let Some(group) = *group else {
                self.update_gang(*client);
                continue;
            };
            let (before, now) = (self.rules.join(*client, group), group.limits);
            if before.share.is_some() == now.share.is_some() {
                self.with_requests(|requests| requests.owner_changed(*client));
            } else {
                self.rules
                    .members(group.id)
                    .collect::<Vec<_>>()
                    .into_iter()
                    .for_each(|peer| self.with_requests(|requests| requests.owner_changed(peer)));
            }
            self.quota.count_member(*client, group.id, true);
            // `memory_low` needs no update: eviction reads the rule.
            let RuleLimits { memory_max, memory_low: _, swap_max, on_memory_full, sleep_after: _, share, gang } =
                before;
            if (memory_max, swap_max, on_memory_full) != (now.memory_max, now.swap_max, now.on_memory_full) {
                bounds_changed.extend(self.rules.members(group.id));
            }
            shares_changed |= share != now.share;
            self.update_gang(*client);
            if gang != now.gang {
                self.rules.members(group.id).collect::<Vec<_>>().into_iter().for_each(|other| self.update_gang(other));
            }
        }
        bounds_changed.into_iter().for_each(|client| self.bounds_changed(client));
        groups.keys().for_each(|client| self.effects.touch_all(self.gpus.of_client(*client)));
        let has_position = |client: &ClientId| self.has_position(*client);
        if shares_changed || groups.keys().any(has_position) {
            self.requeue_all();
        }
    }

    /// Moves all requests to their current positions after rules have changed.
    fn requeue_all(&mut self) {
        self.with_requests(|requests| requests.requeue_all());
        self.fairness.forget_usage(self.now, self.settings.time_period);
    }

    /// Whether a client holds or waits for a lock.
    fn has_position(&self, client: ClientId) -> bool {
        self.queues.waiting(client).is_some() || self.gpus.holds_any(client)
    }

    fn leave_group(&mut self, client: ClientId) {
        if let Some(group) = self.rules.group(client) {
            self.quota.count_member(client, group, false);
            self.rules.leave(client);
            self.with_requests(|requests| requests.owner_changed(client));
        }
    }

    /// Applies the limits of a client's environment.
    fn set_env_limits(&mut self, client: ClientId, limits: EnvLimits) {
        let has_position = self.has_position(client);
        if !self.clients.contains_key(&client) {
            return;
        }
        let before = self.rules.set_env(client, limits);
        if before == limits {
            return;
        }
        self.bounds_changed(client);
        if has_position && before.weight != limits.weight {
            self.requeue_all();
        }
    }

    /// Applies a change of the bounds on a client's memory. Evicts memory beyond the bounds from
    /// GPUs on which the client does not run. Notifies the client of the bounds, and later of its
    /// new limits.
    fn bounds_changed(&mut self, client: ClientId) {
        for id in self.quota.gpus_of(client) {
            self.quota.mark_changed(id);
            self.swap_surplus(client, id);
            self.with_quota(|quota, cx, fx| quota.tell_again(cx, fx, client, id));
        }
    }

    fn request_placement(&mut self, client: ClientId, request: &PlacementRequest) {
        let Some(tenant) = self.clients.get(&client).map(|state| state.tenant) else { return };
        self.end_expected_placements();
        self.places.forget(client);
        let Self { now, settings, rules, gpus, places, .. } = &*self;
        match (Sites { now: *now, settings, rules, gpus, places }).place(client, request) {
            Err(why) => self.effects.command(Command::Unplaced { client, why }),
            Ok(needs) => {
                let gpus = needs.iter().map(|(id, _)| *id).collect();
                self.places.set(client, tenant, request, self.now, needs);
                self.effects.command(Command::Placed { client, gpus });
            }
        }
    }

    fn take_placement(&mut self, client: ClientId, from: ClientId) {
        self.end_expected_placements();
        if self.clients.contains_key(&client) && !self.clients.contains_key(&from) {
            self.places.take_over(client, from);
        }
    }

    fn end_expected_placements(&mut self) {
        self.places.end_expected(self.now, |client| self.clients.contains_key(client));
    }

    fn request_room(&mut self, room: RoomId, id: GpuId, bytes: u64, until: Time) {
        let made = match self.gpu_mut(id) {
            Some((gpu, cx, fx)) => gpu.make_room(cx.now, cx.settings, fx, room, bytes, until),
            None => Err(RoomObstacle::Gone),
        };
        if let Err(why) = made {
            self.end_room(room);
            self.effects.command(Command::RoomRefused { room, gpu: id, why });
        }
    }

    /// Ends a room on all GPUs.
    fn end_room(&mut self, room: RoomId) {
        self.gpus.iter_mut().for_each(|(_, gpu)| gpu.end_room(&mut self.effects, room));
    }

    fn configure(&mut self, mut settings: Settings) {
        settings.clamp();
        let is_same = settings.time_period == self.settings.time_period;
        let is_same_policy = settings.policy == self.settings.policy;
        self.settings = settings;
        if !is_same_policy {
            self.fairness.clear_finish_tags();
            self.with_requests(|requests| requests.rerank_all());
        }
        if !(is_same && is_same_policy) {
            self.requeue_all();
        }
        self.effects.touch_all(self.gpus.ids());
        self.with_requests(|requests| requests.all_may_need_no_turn());
    }

    fn gpu_found(&mut self, id: GpuId, total: u64) {
        let gpu = self.gpus.found(id, total);
        gpu.found(total, self.suspended);
        self.quota.gpu_found(id);
        self.queues.gpu_found(id);
        self.fairness.gpu_found(id);
        self.touch(id);
    }

    fn gpu_gone(&mut self, id: GpuId) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.access = Access::Gone;
        gpu.end_rooms(&mut self.effects);
        self.touch(id);
        self.forget_if_gone(id);
    }

    /// Forgets a GPU that is gone and has no clients.
    fn forget_if_gone(&mut self, id: GpuId) {
        if !self.gpus.get(id).is_some_and(|gpu| gpu.access == Access::Gone && gpu.attachments.is_empty()) {
            return;
        }
        self.gpus.forget(id);
        self.quota.gpu_forgotten(id);
        self.queues.gpu_forgotten(id);
        self.fairness.gpu_forgotten(id);
        self.effects.forget(id);
    }

    fn suspend(&mut self, suspended: bool) {
        self.suspended = suspended;
        for (_, gpu) in self.gpus.iter_mut().filter(|(_, gpu)| gpu.access != Access::Gone) {
            gpu.access = if suspended { Access::Suspended } else { Access::Turns };
        }
        self.effects.touch_all(self.gpus.ids());
        self.with_requests(|requests| requests.all_may_need_no_turn());
    }

    /// The view of one GPU. `None`: the GPU is unknown.
    pub fn gpu(&self, id: GpuId) -> Option<GpuView> {
        self.model().gpu(id, self.effects.wakes_at(Wake::Gpu(id)))
    }

    /// Views of all known GPUs.
    pub fn gpus(&self) -> Vec<GpuView> {
        self.gpus.ids().filter_map(|id| self.gpu(id)).collect()
    }
}

/// Methods of [`Machine`] that return what the method of [`Model`] with the same name returns.
macro_rules! reads {
    ($($name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        impl Machine {
            $(
                #[doc = concat!("See `Model::", stringify!($name), "`.")]
                pub fn $name(&self, $($argument: $kind),*) -> $result {
                    self.model().$name($($argument),*)
                }
            )*
        }
    };
}

reads! {
    // Clients.
    clients() -> Vec<ClientView>;
    client(id: ClientId) -> Option<ClientView>;
    tenants() -> BTreeMap<ClientId, TenantId>;
    allowed(client: ClientId) -> Option<&GpuSet>;
    sleep_of(client: ClientId) -> SleepView;
    activities(id: ClientId) -> impl Iterator<Item = (GpuId, Activity)>;
    explain(client: ClientId, now: Time) -> impl Iterator<Item = Explanation>;

    // GPUs.
    is_known(id: GpuId) -> bool;
    is_held(gpu: GpuId) -> bool;
    offer(gpu: GpuId) -> u64;
    charged(gpu: GpuId) -> u64;
    kinds() -> &[GpuSet];
    shares_due(id: GpuId) -> BTreeMap<ClientId, u32>;
    expected_starts(id: GpuId, most: usize, now: Time) -> Vec<(ClientId, Duration)>;
    is_evacuated() -> bool;

    // A client on one GPU.
    engine(id: ClientId, gpu: GpuId) -> Option<Engine>;
    extent(id: ClientId, gpu: GpuId) -> Option<(u64, u64)>;
    resident_and_swapped(id: ClientId, gpu: GpuId) -> Option<(u64, u64)>;
    committed_or_requested(id: ClientId, gpu: GpuId) -> u64;
    turns(id: ClientId, gpu: GpuId, now: Time) -> Option<Turns>;
    has_context(client: ClientId, id: GpuId, begun: Time) -> bool;
    counted_context(client: ClientId, id: GpuId) -> u64;
    contexts_of_group(client: ClientId, id: GpuId) -> u64;
    memory_max(client: ClientId, id: GpuId) -> Option<u64>;
    env_memory_max(client: ClientId, id: GpuId) -> Option<u64>;
    lowest_max(client: ClientId, id: GpuId) -> Option<u64>;

    // Host memory.
    host() -> (Option<u64>, u64);
    is_host_scarce() -> bool;
    swapped() -> u64;
    is_ahead() -> bool;
}
