//! Clients that are taken off their GPUs altogether, and restored. `sleep` tracks each client's
//! progress. This module applies it to the lock, to memory and to contexts.
//!
//! A client that is held off its GPUs gets no lock and no memory. Its request is blocked, like the
//! request of a stopped process. The locks of a paused client are first revoked, like any holder's.
//! The memory of the client's context is lent to other clients on the GPU. Limits do not promise
//! this memory to the other clients, so a wake can evict it.
//!
//! A client is restored when all of its GPUs have room for its contexts. Other clients make this
//! room by evicting memory. The room is set aside (`gpu::returning`), then measured, and only then
//! does the restore begin, because a restore that runs out of memory cannot be repeated. Clients
//! are restored to a GPU one at a time, in the order in which they wake. After `RESTORE` the next
//! client no longer waits for a restore in progress, but the memory for that restore's context
//! stays set aside. No client sleeps on a GPU whose memory is not measured.
//!
//! A client that has been idle for `sleep_after` is put to sleep if other clients lack room. Other
//! clients lack room in two cases: a context does not fit beside the present contexts, or the
//! demands do not fit together even without the client's own demand. The client that has been idle
//! longest sleeps first. The memory that it frees is measured before the next client sleeps. A new
//! client is *deferred* if it has to wait until an attached client needs less. A deferred client
//! gets the room that a client frees by falling asleep. Until a client can sleep, holders are asked
//! to release the lock when they are idle.
//!
//! Where programs without nvshare use the GPU, their memory could take the room that a wake needs.
//! No client is put to sleep there, except at a user's request.

use super::contexts::RESTORE;
use crate::{
    api::*, gpu::Access, gpu::returning::Returning, machine::Machine, queue::Entity, quota::Expected, sleep::Step,
    timers::Wake,
};
use std::time::Duration;

/// The interval between measurements while a waking client waits for one.
const MEASURE: Duration = Duration::from_secs(1);
impl Machine {
    pub(crate) fn want_sleep(&mut self, client: ClientId, paused: bool) {
        if !self.clients.contains_key(&client) {
            return;
        }
        self.sleep.want(client, paused);
        self.answer_move(client);
        self.hold_off(client);
        self.try_sleep(client);
        self.return_next(client);
    }

    /// Puts the longest-idle client to sleep, if its idle time suffices and other clients lack
    /// room. Returns when the next client's idle time suffices.
    pub(super) fn sleep_idle(&mut self, id: GpuId) -> Option<Time> {
        let (client, due) = self.next_sleeper(id)?;
        if self.now < due {
            return Some(due);
        }
        self.want_sleep(client, false);
        None // the sleep changes the GPU, so it is settled again
    }

    /// The next client to put to sleep on a GPU, and when. Clients are put to sleep one at a time:
    /// the memory of one may be enough, and the GPU is measured first.
    fn next_sleeper(&self, id: GpuId) -> Option<(ClientId, Time)> {
        let gpu = self.gpus.get(id).filter(|gpu| gpu.has_only_clients && !gpu.measurement_requested)?;
        let lacks_contexts = self.lacks_contexts(id);
        let demand = |client: &ClientId| match self.sleep.is_away(*client) {
            true => 0,
            false => gpu.account(*client).map_or(0, |account| account.report.demand),
        };
        let usable = gpu.usable(&self.settings);
        // Usually the demands fit even if the demands of sleeping clients are counted, so the exact
        // sum is rarely needed.
        if !lacks_contexts && gpu.ledger.demanded() <= usable {
            return None;
        }
        let demands = gpu.attachments.keys().fold(0u64, |sum, client| sum.saturating_add(demand(client)));
        if !(lacks_contexts || demands > usable) || gpu.attachments.keys().any(|client| self.sleep.is_leaving(*client))
        {
            return None;
        }
        let makes_room = |client: &ClientId| lacks_contexts || demands - demand(client) > usable;
        let can = |client: &ClientId| !self.model().is_absent(*client) && self.obstacle(*client).is_none();
        let due = |client: &ClientId| {
            let after = self.sleep_after(*client)?;
            let idle = self.gpus.of_client(*client).into_iter().filter_map(|id| {
                let used = self.gpus.attachment(*client, id)?.used.unwrap_or_default();
                Some(self.gpus.lock(*client, id)?.last_run.max(used))
            });
            Some(idle.chain(self.sleep.tried(*client)).max().unwrap_or_default().saturating_add(after))
        };
        let candidates = gpu.attachments.keys().filter(|client| makes_room(client) && can(client));
        candidates.filter_map(|client| Some((due(client)?, *client))).min().map(|(due, client)| (client, due))
    }

    /// Whether pending contexts lack room on a GPU, and a client could sleep to make room.
    pub(super) fn lacks_contexts(&self, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.lacks_contexts(self.model().gpu_context()))
    }

    fn sleep_after(&self, client: ClientId) -> Option<Duration> {
        self.rules.sleep_after(client, &self.settings)
    }

    /// Handles a possible change of the client's rule for sleep.
    pub(crate) fn sleep_after_changed(&mut self, client: ClientId) {
        for id in self.gpus.of_client(client) {
            self.touch(id);
        }
    }

    /// Keeps a held-off client from running: blocks its request and revokes its locks.
    pub(super) fn hold_off(&mut self, client: ClientId) {
        if !self.sleep.is_held_off(client) {
            return;
        }
        if let Some(entity) = self.queues.waiting(client) {
            self.wait_until_it_runs(entity, client);
        }
        if self.sleep.is_ordered(client) {
            for id in self.gpus.of_client(client) {
                self.revoke(client, id);
            }
        }
    }

    /// Asks a client that should sleep to prepare, if it can sleep.
    pub(crate) fn try_sleep(&mut self, client: ClientId) {
        if !self.sleep.is_to_prepare(client) {
            return;
        }
        // The client's turn is not ended for a sleep that is impossible.
        if let Some(why) = self.lasting_obstacle(client).filter(|_| self.sleep.is_drained(client)) {
            return self.stays_awake(client, why);
        }
        self.leave_drained(client);
        let is_ordered = self.sleep.is_ordered(client);
        if is_ordered {
            self.hold_off(client);
        }
        if is_ordered && self.gpus.holds_any(client) {
            return; // tried again when the client has released its locks
        }
        if is_ordered {
            self.take_all(client);
        }
        if let Some(why) = self.obstacle(client) {
            return self.stays_awake(client, why);
        }
        let step = self.sleep.prepare(self.now, client);
        self.hold_off(client);
        self.take_all(client);
        self.take_step(client, step);
    }

    /// Keeps awake a client that cannot sleep now. The client may run unless it is paused.
    fn stays_awake(&mut self, client: ClientId, why: SleepObstacle) {
        self.sleep.cannot_prepare(self.now, client, why);
        self.answer_move(client);
        if !self.model().is_absent(client) {
            self.may_run(client);
        }
        self.schedule_sleep(client);
    }

    /// Why a client cannot sleep, as far as the scheduler knows without asking the client.
    fn obstacle(&self, client: ClientId) -> Option<SleepObstacle> {
        let waits = self.queues.waiting(client).is_some() && !self.sleep.is_ordered(client);
        let is_busy = self.gpus.holds_any(client) || waits;
        is_busy.then_some(SleepObstacle::Busy).or_else(|| self.lasting_obstacle(client))
    }

    /// Like `obstacle`, but ignores the client's work.
    pub(super) fn lasting_obstacle(&self, client: ClientId) -> Option<SleepObstacle> {
        if !matches!(self.queues.entity(client), Entity::Solo(_)) {
            return Some(SleepObstacle::Gang);
        }
        let gpus = self.gpus.of_client(client);
        if gpus.is_empty() {
            return Some(SleepObstacle::NoContext);
        }
        gpus.into_iter().find_map(|id| {
            let (gpu, attachment) = (self.gpus.get(id)?, self.gpus.attachment(client, id)?);
            let obstacles = [
                (attachment.attached.is_none(), SleepObstacle::NoContext),
                (attachment.engine != Engine::Swap, SleepObstacle::Managed),
                (gpu.measured.is_none() || !gpu.verifies, SleepObstacle::Unmeasured),
                (gpu.access != Access::Turns, SleepObstacle::Busy),
            ];
            obstacles.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why)
        })
    }

    /// Evicts all evictable memory of a client.
    fn take_all(&mut self, client: ClientId) {
        for id in self.gpus.of_client(client) {
            self.with_gpu(id, |gpu, cx, fx| gpu.take_all(cx, fx, client));
        }
        self.check(client);
    }

    pub(crate) fn sleep_ready(&mut self, client: ClientId) {
        let is_there = |id: &GpuId| self.gpus.account(client, *id).is_some_and(|account| account.charge > 0);
        let is_any_there = self.gpus.of_client(client).iter().any(is_there);
        // The client may have requested a lock or attached another GPU after it was asked to
        // prepare.
        let obstacle = is_any_there.then_some(SleepObstacle::Immovable).or_else(|| self.obstacle(client));
        let step = self.sleep.ready(self.now, client, obstacle);
        self.take_step(client, step);
    }

    pub(crate) fn sleep_refused(&mut self, client: ClientId, why: SleepObstacle) {
        let step = self.sleep.refused(self.now, client, why);
        self.take_step(client, step);
    }

    pub(crate) fn found_asleep(&mut self, client: ClientId) {
        if self.clients.contains_key(&client) {
            let step = self.sleep.found(client);
            self.take_step(client, step);
        }
    }

    /// Handles the attachment of a GPU by a client that may already be off its GPUs.
    pub(crate) fn attached_asleep(&mut self, client: ClientId) {
        if self.sleep.is_away(client) {
            self.has_left(client);
        }
        if self.sleep.view(client).phase != SleepPhase::Awake {
            self.drain_client(client);
        }
    }

    pub(crate) fn wake(&mut self, client: ClientId, resumed: bool) {
        let number = self.effects.number();
        let step = self.sleep.wake(self.now, client, resumed, number);
        self.take_step(client, step);
    }

    pub(crate) fn checkpointed(&mut self, client: ClientId, outcome: SleepOutcome) {
        let number = self.effects.number();
        let has_failed_to_move = self.sleep.has_failed_to_move(client, outcome);
        let step = self.sleep.answered(self.now, client, outcome, number);
        if has_failed_to_move {
            self.move_back(client);
        }
        self.take_step(client, step);
        for id in self.gpus.of_client(client) {
            self.touch(id); // other clients no longer wait for this client to leave
        }
    }

    pub(crate) fn look_at_sleep(&mut self, client: ClientId) {
        let number = self.effects.number();
        let step = self.sleep.look(self.now, client, number);
        self.move_sleeper(client);
        self.take_step(client, step);
    }

    pub(super) fn take_step(&mut self, client: ClientId, step: Step) {
        // Called before the client prepares, so that the client first acknowledges lower limits.
        self.limit_sleeper(client);
        match step {
            Step::Nothing => {}
            Step::Prepare => {
                let paused = self.sleep.is_ordered(client);
                self.effects.command(Command::PrepareSleep { client, paused });
            }
            Step::Call(operation) => {
                let is_wake = operation == SleepOperation::Wake;
                let moves = if is_wake { self.sleep.moves(client) } else { Vec::new() };
                self.effects.command(Command::Checkpoint { client, operation, moves });
            }
            Step::Sleeps | Step::Wakes => {
                self.has_left(client);
                self.move_sleeper(client);
            }
            Step::Runs => {
                self.has_come_back(client);
                let moved = self.sleep.take_moves(client);
                self.limit_sleeper(client); // the client does not return to its old GPUs any more
                self.effects.command(Command::Awake { client, moved });
                self.may_run(client);
            }
            Step::Stays => self.may_run(client),
            Step::IsLost => {
                self.has_left(client);
                for id in self.gpus.of_client(client) {
                    if let Some(bytes) = self.gpus.get_mut(id).and_then(|gpu| gpu.away.get_mut(&client)) {
                        *bytes = 0; // the client will never need a context
                    }
                    self.with_quota(|quota, cx, _| quota.note_offer(cx, id));
                }
                // The client's calls return the driver's error and need no turn.
                self.effects.command(Command::Awake { client, moved: Vec::new() });
            }
        }
        self.answer_move(client);
        self.return_next(client);
        self.try_sleep(client);
        self.schedule_sleep(client);
    }

    /// Updates a client's limits for its sleep. Sets room aside on the GPU that the client will be
    /// moved to, and on the GPUs that it may be moved back to.
    pub(crate) fn limit_sleeper(&mut self, client: ClientId) {
        let is_asleep = self.sleep.view(client).phase != SleepPhase::Awake;
        let place = |to: Move| Expected { to, context: self.context_elsewhere(client, to.from) };
        let goes: Vec<Expected> = self.sleep.coming(client).into_iter().map(place).collect();
        let back: Vec<Expected> = self.sleep.ways_back(client).into_iter().map(place).collect();
        self.with_quota(|quota, cx, fx| {
            quota.set_asleep(cx, fx, client, is_asleep);
            quota.expect(cx, client, &goes, &back);
        });
    }

    fn schedule_sleep(&mut self, client: ClientId) {
        self.effects.wake(Wake::Sleep(client), self.sleep.due(client));
    }

    /// Handles a client that has left its GPUs.
    fn has_left(&mut self, client: ClientId) {
        self.quota.set_stopped(client, true); // the client reads no messages
        for id in self.gpus.of_client(client) {
            self.with_gpu(id, |gpu, cx, fx| gpu.left(cx, fx, client));
        }
    }

    /// Handles a client that is on its GPUs again.
    fn has_come_back(&mut self, client: ClientId) {
        let is_stopped = self.clients.get(&client).is_some_and(|state| state.stopped);
        self.quota.set_stopped(client, is_stopped);
        for id in self.gpus.of_client(client) {
            self.with_gpu(id, |gpu, cx, fx| gpu.came_back(cx.now, fx, client));
        }
    }

    /// Allows a client to take locks again, unless it is held off.
    pub(super) fn may_run(&mut self, client: ClientId) {
        if let Some(entity) = self.queues.waiting(client)
            && !self.model().any_absent(entity)
        {
            self.unblock(entity);
            self.enqueue(entity);
            self.update_entity(client);
        }
        for id in self.gpus.of_client(client) {
            self.touch(id);
        }
    }

    pub(crate) fn forget_sleep(&mut self, client: ClientId) {
        self.sleep.forget(client);
        self.effects.wake(Wake::Sleep(client), None);
        self.return_next(client);
    }

    /// Bytes that a restore needs for a client's context on a GPU.
    pub(super) fn context_of(&self, client: ClientId, id: GpuId) -> u64 {
        self.gpus.get(id).map_or(0, |gpu| gpu.context_of(self.model().gpu_context(), client))
    }

    /// Sets room aside for waking clients, in the order in which they wake. If two clients wait for
    /// the same GPU, the later one waits for the earlier one. `changed`: the client whose state may
    /// have changed.
    pub(super) fn return_next(&mut self, changed: ClientId) {
        let waking = self.sleep.waking();
        let is_waking = waking.contains(&changed);
        for id in self.gpus.of_client(changed) {
            // Releases the room of a client that stays asleep.
            if !is_waking
                && self.sleep.is_away(changed)
                && let Some(gpu) = self.gpus.get_mut(id)
                && gpu.returning.take_if(|returning| returning.client == changed).is_some()
            {
                self.touch(id);
            }
        }
        let mut taken = GpuSet::new();
        for client in waking {
            let ids = self.gpus.of_client(client);
            if ids.is_empty() {
                let step = self.sleep.has_room(client);
                self.take_step(client, step);
                continue;
            }
            let others = |id: &GpuId| {
                let returning = self.gpus.get(*id).and_then(|gpu| gpu.returning);
                taken.contains(id) || returning.is_some_and(|returning| returning.client != client)
            };
            let is_next = !ids.iter().any(others);
            taken.extend(ids.iter().copied());
            if !is_next {
                continue;
            }
            for id in &ids {
                let bytes = self.gpus.get(*id).and_then(|gpu| gpu.away.get(&client).copied());
                let bytes = bytes.unwrap_or_else(|| self.context_of(client, *id));
                let Some(gpu) = self.gpus.get_mut(*id).filter(|gpu| gpu.returning.is_none()) else { continue };
                gpu.returning = Some(Returning::new(client, bytes));
                self.touch(*id);
            }
        }
    }

    /// Starts the restore of a client if all of its GPUs have room. Returns the time of the next
    /// check.
    pub(super) fn serve_returning(&mut self, id: GpuId) -> Option<Time> {
        let now = self.now;
        let gpu = self.gpus.get_mut(id)?;
        let Returning { client, restored, .. } = gpu.returning?;
        if let Some(due) = restored.map(|since| since + RESTORE) {
            if now < due {
                return Some(due);
            }
            gpu.give_up_return();
            self.return_next(client);
            return None; // `return_next` changes the GPU, so it is settled again
        }
        let is_gone = gpu.access == Access::Gone; // the driver's error should reach the client
        let has_room = gpu.access == Access::Turns
            && gpu.trial.is_none()
            && !gpu.incomplete
            && gpu.ledger.unverified() == 0
            && gpu.ledger.charged() <= gpu.usable(&self.settings)
            && gpu.overhead_wanted(&self.settings) <= gpu.total.saturating_sub(gpu.reserve(&self.settings));
        let gpu = self.gpus.get_mut(id)?;
        let returning = gpu.returning.as_mut()?;
        returning.set_secured(now, has_room || is_gone);
        if is_gone {
            returning.is_measured = true;
        }
        let mut next = None;
        if !returning.is_measured {
            let due = returning.asked.map_or(now, |asked| asked + MEASURE);
            if due <= now {
                returning.asked = Some(now);
                // A pending measurement may never arrive, or may have begun too early.
                self.measure_again(id);
            }
            next = Some(due.max(now + MEASURE));
        }
        let is_ready = |id: &GpuId| {
            let returning = self.gpus.get(*id).and_then(|gpu| gpu.returning);
            returning.is_some_and(|returning| returning.client == client && returning.is_measured)
        };
        let ids = self.gpus.of_client(client);
        if ids.iter().all(is_ready) {
            for id in &ids {
                if let Some(returning) = self.gpus.get_mut(*id).and_then(|gpu| gpu.returning.as_mut()) {
                    returning.restored = Some(now);
                }
            }
            let step = self.sleep.has_room(client);
            self.take_step(client, step);
        }
        next
    }
}
