//! The state, and the order in which events change it. A component decides about its own state: its
//! methods read the other components, and leave commands, wake-ups and GPUs to settle in [`Effects`].
//! Only this file and, for the locks and their memory, `sharing` change several components. Decisions
//! about several components only read: they are in `model`.
//!
//! - `dispatch`: which method handles each event.
//! - `view`: copies of the state, for readers.

mod dispatch;
mod view;

use crate::{
    api::*,
    client::{Client, Clients},
    effects::Effects,
    fairness::Fairness,
    gpu::{self, Access, Admission, Gpu, Gpus, Return},
    model::{Model, Pressure},
    placement::{self, Placements},
    presence::{Presence, Task, Tasks},
    queue::{Gang, Queues},
    quota::{self, Quota},
    requests::Requests,
    rules::Rules,
    sharing::Sharing,
    sleep::{Sleep, Step},
    timers::Wake,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

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

    /// Whether the host is about to suspend.
    pub fn is_suspended(&self) -> bool {
        self.suspended
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
                Wake::Gpu(gpu) => self.effects.touch(gpu),
                Wake::Client(client) => self.sharing().check(client),
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
                Wake::HeldRequests(gpu) => self.sharing().held_requests_timed_out(gpu),
                Wake::Failures(gpu) => self.sharing().failures_are_unexplained(gpu),
                Wake::Limits => self.quota.mark_all_changed(),
                Wake::Ahead(client, gpu) => self.sharing().ask_ahead(client, gpu),
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

    // Access to the components.

    /// A read-only view of the current state.
    fn model(&self) -> Model<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, .. } = self;
        Model { now: *now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places }
    }

    fn sharing(&mut self) -> Sharing<'_> {
        let Self { now, settings, rules, clients, gpus, queues, sleep, quota, fairness, places, effects, .. } = self;
        Sharing { gpus, queues, quota, fairness, effects, now: *now, settings, rules, clients, sleep, places }
    }

    /// Runs `act` on a GPU if the GPU is known.
    fn with_gpu<R>(&mut self, id: GpuId, act: impl FnOnce(&mut Gpu, gpu::Context, &mut Effects) -> R) -> Option<R> {
        self.sharing().with_gpu(id, act)
    }

    /// Changes a GPU if it is known.
    fn change_gpu<R>(&mut self, id: GpuId, act: impl FnOnce(&mut Gpu, gpu::Context, &mut Effects) -> R) {
        self.with_gpu(id, act);
    }

    /// Runs `act` on each GPU that a client has attached.
    fn with_gpus_of(&mut self, client: ClientId, mut act: impl FnMut(&mut Gpu, gpu::Context, &mut Effects)) {
        for id in self.gpus.of_client(client) {
            self.with_gpu(id, &mut act);
        }
    }

    /// Runs `act` on the quota.
    fn with_quota<R>(&mut self, act: impl FnOnce(&mut Quota, quota::Context, &mut Effects) -> R) -> R {
        self.sharing().with_quota(act)
    }

    fn with_places(&mut self, act: impl FnOnce(&mut Placements, placement::Context, &mut Effects)) {
        let Self { now, settings, rules, gpus, clients, places, effects, .. } = self;
        act(places, placement::Context { now: *now, settings, rules, gpus, clients }, effects);
    }

    /// Runs `act` on the queues.
    fn with_requests<R>(&mut self, act: impl FnOnce(&mut Requests) -> R) -> R {
        self.sharing().with_requests(act)
    }

    // Settling.

    /// Brings a GPU up to date: first its memory, then the lock, then messages to holders. Called for
    /// each GPU that an event has marked. Settling an unchanged GPU does nothing.
    fn settle(&mut self, id: GpuId) {
        // Rooms, the number of contexts, the capacity, and the order of the queue.
        let begin = |gpu: &mut Gpu, cx: gpu::Context, fx: &mut Effects| {
            let rooms = gpu.serve_rooms(cx.now, cx.settings, fx);
            gpu.count_deferred(cx);
            (rooms, gpu.note_capacity(cx.settings))
        };
        let Some((rooms, has_gained_room)) = self.with_gpu(id, begin) else { return };
        if let Some(client) = self.model().waits_to_return(id) {
            self.follow(client, vec![Task::ReturnNext]);
        }
        if has_gained_room {
            let pinned = self.queues.take_blocked_by_pinned(id);
            self.sharing().with_each(pinned, |requests, entity| requests.enqueue(entity));
        }
        self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
        let unblocked = self.model().unblocked(id);
        self.sharing().with_each(unblocked, |requests, entity| requests.enqueue(entity));
        let watched = self.model().watched_requests(id);
        self.sharing().with_each(watched, |requests, entity| requests.reclassify(entity));
        let reclassified = self.model().class_changes_at(id);
        if self.model().access(id) == Access::Gone {
            self.sharing().let_through(id);
            self.serve_returning(id);
            let next = self.answer_attaching(id);
            return self.effects.wake(Wake::Gpu(id), next);
        }

        // Memory, in order of precedence: contexts and holders, then reservations, then the queue.
        // `reserved_ahead` counts the bytes being freed for needs that precede the queue.
        let mut pressure = Pressure::default();
        let holders_lack = self.sharing().serve_holders(id, &mut pressure);
        let reserved = self.sharing().serve_reservations(id, holders_lack);
        pressure.add_reservations(&reserved);
        let reserved_ahead = holders_lack.saturating_add(reserved.lacking);
        let mut lacking = self.sharing().serve_queue(id, reserved_ahead, &mut pressure);
        self.with_gpu(id, |gpu, cx, fx| gpu.try_holder(cx, fx));
        if !pressure.locked_out {
            pressure.add_conflict(self.model().gang_awaiting_holders(id));
        }
        if reserved_ahead == 0 && lacking == 0 {
            lacking = self.sharing().serve_undrainable(id, &mut pressure);
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
        let turn = self.sharing().update_turns(id, &pressure);
        self.with_requests(|requests| requests.note_opening(id));
        let conflict = self.model().checks_conflict_at(pressure.first);
        let next = [rooms, attaching, returning, sleeping, turn, reserved.next, reclassified, conflict];
        self.effects.wake(Wake::Gpu(id), next.into_iter().flatten().min());
    }

    /// Admits attaching clients that have room or have waited long enough. Returns the time of the
    /// next check. The loop ends because each round but the last takes a client out of those that
    /// wait to create a context.
    fn answer_attaching(&mut self, id: GpuId) -> Option<Time> {
        loop {
            let client = match self.with_gpu(id, |gpu, cx, fx| gpu.admit_context(cx, fx))? {
                Admission::Waits(next) => return next,
                Admission::Admits(client) => client,
            };
            self.with_quota(|quota, cx, fx| quota.admit(cx, fx, client, id));
            if self.model().is_drained(id) {
                self.follow(client, vec![Task::Drain]); // the client's context predates this scheduler
            }
        }
    }

    // Processes that stop and continue.

    /// Handles a process that a signal has stopped, or that has been continued.
    fn stopped(&mut self, client: ClientId, signalled: bool) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.signalled = signalled;
        // A process that another program has locked runs none of its work either.
        let stopped = signalled || self.sleep.is_foreign(client);
        let changed = std::mem::replace(&mut state.stopped, stopped) != stopped;
        self.quota.set_stopped(client, stopped || self.sleep.is_away(client));
        self.with_gpus_of(client, |gpu, cx, fx| gpu.process_stopped(cx, fx, client, stopped, changed));
        self.with_requests(|requests| {
            requests.end_gang_turn(requests.queues.entity(client));
            if changed && stopped {
                requests.wait_until_it_runs(client);
            }
        });
        if changed && !stopped {
            self.sharing().runs_again(client);
        }
        self.sharing().check(client);
    }

    fn alive(&mut self, client: ClientId) {
        let Some(state) = self.clients.get_mut(&client) else { return };
        state.heard = self.now;
        if state.signalled {
            self.stopped(client, false);
        }
    }

    /// Handles a process that another program has locked, or that runs again.
    fn halt(&mut self, client: ClientId) {
        let Some(state) = self.clients.get(&client) else { return };
        // Turns may have been revoked since a signal stopped the process.
        if state.stopped != state.signalled || self.sleep.is_foreign(client) {
            self.stopped(client, state.signalled);
        }
    }

    /// Handles a client's release of locks.
    fn released(&mut self, client: ClientId, gpus: &GpuSet, reason: ReleaseReason, busy: Duration) {
        self.sharing().released(client, gpus, reason, busy);
        if self.sleep.is_to_prepare(client) {
            self.follow(client, vec![Task::Prepare]);
        }
    }

    // Memory.

    fn attach(&mut self, client: ClientId, id: GpuId, engine: Engine) {
        if !self.sharing().attach(client, id, engine) {
            return;
        }
        if self.sleep.is_away(client) {
            self.follow(client, vec![Task::Leave]);
        }
        if self.sleep.view(client).phase != SleepPhase::Awake {
            self.follow(client, vec![Task::Drain]);
        }
    }

    fn detach(&mut self, client: ClientId, id: GpuId) {
        if !self.sharing().detach(client, id) {
            return;
        }
        self.sleep.detached(client, id);
        self.follow(client, vec![Task::Limit, Task::AnswerMove]);
        self.effects.touch(id);
        if self.sleep.is_drained(client) {
            self.follow(client, vec![Task::Drain]);
        }
        self.sharing().forget_if_gone(id);
    }

    /// Handles a client's report of its memory on a GPU.
    fn report(&mut self, client: ClientId, id: GpuId, report: MemoryReport) {
        if !self.sharing().reported(client, id, report) {
            return;
        }
        // Holders and the first request in the queue are served first. Bytes that are still free
        // may then go to a client that is not waiting.
        self.settle(id);
        if self.gpus.get(id).is_some_and(|gpu| !gpu.lacking) && !self.model().is_over_limit(client, id) {
            let overdrawn = self.model().overdrawn(id);
            self.sharing().credit(client, id, overdrawn);
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
                    self.sharing().runs_again(client);
                    self.effects.touch_all(self.gpus.of_client(client));
                }
                Task::Revoke => {
                    self.gpus.of_client(client).into_iter().for_each(|id| self.sharing().revoke(client, id))
                }
                Task::TakeAll => {
                    self.with_gpus_of(client, |gpu, cx, fx| gpu.take_all(cx, fx, client));
                    self.sharing().check(client);
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
                Task::ForgetContexts => self.sharing().forget_contexts(client),
                Task::Limit => self.sharing().limit_sleeper(client),
                Task::ExpectReturn => self.with_gpus_of(client, |gpu, cx, fx| gpu.expect_return(cx, fx, client)),
                Task::GiveUpRoom => self.with_gpus_of(client, |gpu, _, fx| gpu.give_up_room(fx, client)),
                Task::Halt => self.halt(client),
                Task::Reserve => self.with_gpus_of(client, |gpu, _, fx| gpu.reserve_return(fx, client)),
                Task::Lend => self.with_gpus_of(client, |gpu, _, fx| gpu.lend(fx, client)),
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

    /// Like `change_sleep`, but ignores an unknown client.
    fn change_known(&mut self, client: ClientId, change: impl FnOnce(&mut Presence) -> Vec<Task>) {
        if self.clients.contains_key(&client) {
            self.change_sleep(client, change);
        }
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
        match self.with_gpu(id, |gpu, cx, fx| gpu.serve_return(cx, fx))?? {
            Return::Waits(next) => return next,
            // The GPU changes, so it is settled again.
            Return::IsOverdue(client) => self.follow(client, vec![Task::Return]),
            Return::DoesNotFit(client) => self.follow(client, vec![Task::GiveUpRoom, Task::Return]),
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
        self.effects.touch(id);
    }

    /// Moves the attachment of a sleeping client from one GPU to another, together with its limit
    /// and its request. Does nothing if the target is unknown or the client has already attached it.
    fn move_attachment(&mut self, client: ClientId, both: Move) {
        let Some(wanted) = self.sharing().move_client(client, both) else { return };
        self.places.move_client(client, both.from, both.to);
        let (is_drained, number) = (self.model().has_drained(client), self.effects.number());
        self.sleep.moved(client, both, is_drained, number);
        self.sharing().moved(client, both, wanted);
    }

    // Membership, rules and GPUs.

    fn connected(&mut self, id: ClientId, gang: u64, tenant: TenantId) {
        if self.clients.contains_key(&id) {
            return;
        }
        let client = Client { named: gang, tenant, signalled: false, stopped: false, heard: self.now };
        self.clients.insert(id, client);
        self.sharing().enter_gang(id, Gang::named(gang));
    }

    fn gang_changed(&mut self, id: ClientId, gang: u64) {
        let Some(client) = self.clients.get_mut(&id) else { return };
        client.named = gang;
        self.sharing().update_gang(id);
    }

    fn disconnected(&mut self, id: ClientId) {
        if !self.clients.contains_key(&id) {
            return;
        }
        let gpus = self.gpus.of_client(id);
        self.with_requests(|requests| requests.withdraw(id));
        self.sleep.forget(id); // a disconnected client receives no more commands
        self.sharing().limit_sleeper(id);
        for gpu in gpus {
            self.detach(id, gpu);
        }
        self.rules.set_env(id, EnvLimits::default());
        self.leave_group(id);
        self.quota.disconnected(id);
        self.sharing().leave_gang(id);
        self.fairness.disconnected(id);
        self.with_places(|places, cx, _| places.leave(cx, id));
        self.clients.remove(&id);
        self.gpus.set_probed(id, None);
        self.effects.wake(Wake::Client(id), None);
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
                self.sharing().update_gang(*client);
                continue;
            };
            let change = self.rules.join(*client, group);
            for peer in change.owners {
                self.with_requests(|requests| requests.owner_changed(peer));
            }
            self.quota.count_member(*client, group.id, true);
            bounds_changed.extend(change.bounds);
            shares_changed |= change.shares;
            self.sharing().update_gang(*client);
            change.gangs.into_iter().for_each(|member| self.sharing().update_gang(member));
        }
        bounds_changed.into_iter().for_each(|client| self.sharing().bounds_changed(client));
        groups.keys().for_each(|client| self.effects.touch_all(self.gpus.of_client(*client)));
        if shares_changed || groups.keys().any(|client| self.model().has_position(*client)) {
            self.sharing().requeue_all();
        }
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
        if !self.clients.contains_key(&client) {
            return;
        }
        let before = self.rules.set_env(client, limits);
        if before != limits {
            self.sharing().bounds_changed(client);
        }
        if before.weight != limits.weight && self.model().has_position(client) {
            self.sharing().requeue_all();
        }
    }

    fn configure(&mut self, mut settings: Settings) {
        settings.clamp();
        let is_same = settings.time_period == self.settings.time_period;
        let is_same_policy = settings.policy == self.settings.policy;
        self.settings = settings;
        if !is_same_policy {
            self.fairness.clear_finish_tags();
            let all = self.queues.entities();
            self.sharing().with_each(all, |requests, entity| requests.rerank(entity));
        }
        if !(is_same && is_same_policy) {
            self.sharing().requeue_all();
        }
        self.effects.touch_all(self.gpus.ids());
        self.with_requests(|requests| requests.all_may_need_no_turn());
    }

    fn gpu_found(&mut self, id: GpuId, total: u64) {
        let suspended = self.suspended;
        self.sharing().gpu_found(id, total, suspended);
    }

    /// Keeps memory of a GPU free for programs that are not clients. Refuses the room if it cannot be
    /// kept free.
    fn make_room(&mut self, room: RoomId, gpu: GpuId, bytes: u64, until: Time) {
        let made = self.with_gpu(gpu, |it, cx, fx| it.make_room(cx, fx, room, bytes, until.min(MAX_TIME)));
        if let Err(why) = made.unwrap_or(Err(RoomObstacle::Gone)) {
            self.gpus.end_room(&mut self.effects, room);
            self.effects.command(Command::RoomRefused { room, gpu, why });
        }
    }

    fn suspend(&mut self, suspended: bool) {
        self.suspended = suspended;
        self.gpus.suspend(suspended);
        self.effects.touch_all(self.gpus.ids());
        self.with_requests(|requests| requests.all_may_need_no_turn());
    }
}
