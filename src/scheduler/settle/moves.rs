//! Clients that go from one GPU to another of the same kind: each sleeps, is moved, and comes back there.
//!
//! A client that sleeps has nothing on a GPU but what the scheduler knows of it. So to move it is to take that out of one GPU's maps
//! and to put it into the other's, whatever state it is in, and it wakes there as it would have woken at home. Where its process is
//! restored follows from where it was and where it is attached now (`sleep`); the client hears of it when it is awake.

use crate::{
    api::*,
    machine::Machine,
    memory::Access,
    quota::{Expected, RoomToMove},
    sleep::Step,
    timers::Wake,
};

impl Machine {
    pub(crate) fn migrate(&mut self, client: ClientId, to: Move) {
        if !self.clients.contains_key(&client) {
            return;
        }
        let is_away = self.sleep.is_away(client);
        let asleep = || self.lasting_obstacle(client).filter(|_| !is_away).map(MoveObstacle::Sleep);
        let why = self.move_obstacle(client, to).or_else(asleep).or_else(|| self.sleep.want_move(client, to));
        if let Some(why) = why {
            let Move { from, to } = to;
            return self.effects.command(Command::Migrated { client, from, to, why: Some(why) });
        }
        self.limit_sleeper(client);
        self.move_sleeper(client);
        self.hold_off(client);
        self.take_step(client, Step::Nothing);
    }

    /// The GPUs between which clients can be moved, as the daemon has said.
    pub fn kinds(&self) -> &[GpuSet] {
        self.places.kinds()
    }

    /// The GPUs on which a client may be, as the daemon has said; `None`: any.
    pub fn allowed(&self, client: ClientId) -> Option<&GpuSet> {
        self.places.allowed(client)
    }

    /// Why a client cannot be moved, whether or not it can sleep.
    fn move_obstacle(&self, client: ClientId, both @ Move { from, to }: Move) -> Option<MoveObstacle> {
        let total = |id| self.memory.get(&id).filter(|gpu| gpu.access != Access::Gone).map(|gpu| gpu.total);
        // That clients are measured shows only where there are any: here they were, or it would not sleep.
        let is_measured = self.memory.get(&to).is_some_and(|gpu| gpu.measured.is_some());
        let is_gang = self.lock.gang_peers(client).next().is_some();
        let is_like_it = total(to).is_some() && total(to) == self.memory.get(&from).map(|gpu| gpu.total);
        let obstacles = [
            (self.memory_of(client, from).is_none(), MoveObstacle::NotThere),
            (self.memory_of(client, to).is_some() || self.is_way_back(client, both), MoveObstacle::Attached),
            (!is_like_it, MoveObstacle::NoGpu),
            (self.is_drained(to), MoveObstacle::Drained),
            (is_gang, MoveObstacle::Sleep(SleepObstacle::Gang)),
            (!is_measured, MoveObstacle::Sleep(SleepObstacle::Unmeasured)),
        ];
        let first = obstacles.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why);
        first.or_else(|| (self.room_for(client, both) == RoomToMove::None).then_some(MoveObstacle::NoRoom))
    }

    /// Whether what a client has on yet another GPU may have to come back to where it is to be moved.
    fn is_way_back(&self, client: ClientId, Move { from, to }: Move) -> bool {
        self.sleep.ways_back(client).into_iter().any(|back| back.to == to && back.from != from)
    }

    /// Bytes that a client's context will need on another GPU than this one.
    pub(super) fn context_elsewhere(&self, client: ClientId, from: GpuId) -> u64 {
        let away = self.memory.get(&from).and_then(|gpu| gpu.away.get(&client).copied());
        away.unwrap_or_else(|| self.context_of(client, from))
    }

    /// Whether there is room for a client on another GPU: for its context and what it needs, beside what cannot leave; and for its
    /// context beside what any other client there needs in order to run. And whether what it was promised can be kept there.
    fn room_for(&self, client: ClientId, both @ Move { from, to }: Move) -> RoomToMove {
        let (Some(account), Some(gpu)) = (self.account(client, from), self.memory.get(&to)) else {
            return RoomToMove::None;
        };
        let here = gpu.promisable(&self.settings);
        let context = self.context_elsewhere(client, from);
        let room = here.saturating_sub(context);
        let runs_all_at_once = |id: &ClientId| gpu.clients.get(id).is_some_and(|it| it.engine != Engine::Managed);
        // Those whose needs do not fit anyway are not made worse off.
        let most = gpu.ledger.needs_up_to(here).find(|(_, id)| runs_all_at_once(id)).map_or(0, |(need, _)| need);
        let need = account.report.demand.saturating_add(gpu.ledger.unevictable());
        if need.max(most) > room {
            return RoomToMove::None;
        }
        let is_away = self.sleep.is_away(client);
        // Where its process was it may have to come back to.
        let keeps = self.sleep.ways_back(client).iter().all(|back| back.from != from);
        self.ask_quota(|quota, cx| quota.room_to_move(cx, client, Expected { to: both, context }, keeps, is_away))
    }

    /// Moves a client that sleeps, if it is to be moved.
    pub(super) fn move_sleeper(&mut self, client: ClientId) {
        while let Some(to) = self.sleep.due_move(client) {
            let why = match self.move_obstacle(client, to) {
                Some(why) => why,
                None if self.room_for(client, to) == RoomToMove::Now => return self.move_attachment(client, to),
                // Others are to acknowledge lower limits first.
                None if self.sleep.waits_for_room(self.now, client) => return,
                None => MoveObstacle::NoRoom,
            };
            self.cannot_move(client, why);
        }
    }

    /// A client that sleeps does not get where it was to go. One that is to leave a GPU that is drained tries the next.
    fn cannot_move(&mut self, client: ClientId, why: MoveObstacle) {
        self.sleep.cannot_move(client, why);
        self.answer_move(client);
        self.leave_drained(client);
    }

    /// Limits have room for a client on the GPU to which it is to be moved.
    pub(crate) fn retry_move(&mut self, client: ClientId) {
        self.move_sleeper(client);
        self.take_step(client, Step::Nothing);
    }

    /// A client could not be restored on other GPUs: it comes back where it was.
    pub(super) fn move_back(&mut self, client: ClientId) {
        for back in self.sleep.ways_back(client) {
            self.sleep.misses(client, back.from);
            self.move_attachment(client, back);
        }
        self.cannot_move(client, MoveObstacle::Failed);
    }

    /// Says what became of a move, if that is known by now.
    pub(crate) fn answer_move(&mut self, client: ClientId) {
        let Some((Move { from, to }, why)) = self.sleep.take_answer(client) else { return };
        self.limit_sleeper(client);
        self.effects.command(Command::Migrated { client, from, to, why });
        if why.is_some() && !self.is_absent(client) {
            self.may_run(client);
        }
    }

    /// The GPU is to be empty (`drained`), or is in use again.
    pub(crate) fn drain(&mut self, id: GpuId, drained: bool) {
        let Some(gpu) = self.memory.get_mut(&id) else { return };
        gpu.drained = drained;
        let clients: Vec<ClientId> = gpu.clients.keys().copied().collect();
        clients.into_iter().for_each(|client| self.drain_client(client));
        self.touch(id);
    }

    fn is_drained(&self, id: GpuId) -> bool {
        self.memory.get(&id).is_some_and(|gpu| gpu.drained)
    }

    /// Whether a client has a context on a GPU that is drained, or comes back to one.
    fn has_drained(&self, client: ClientId) -> bool {
        let is_awake = self.sleep.view(client).phase == SleepPhase::Awake;
        let has_context = |id| self.memory_of(client, id).is_some_and(|memory| memory.attached.is_some());
        self.gpus_of(client).into_iter().any(|id| self.is_drained(id) && (!is_awake || has_context(id)))
    }

    /// Has a client leave its GPUs because one of them is drained, or come back because none is any more.
    pub(crate) fn drain_client(&mut self, client: ClientId) {
        let (is_drained, number) = (self.has_drained(client), self.effects.number());
        let step = self.sleep.set_drained(client, is_drained, number);
        self.leave_drained(client);
        self.move_sleeper(client);
        self.take_step(client, step);
    }

    /// Has a client that is to leave a GPU which is drained go to another one, if there is one for it.
    pub(super) fn leave_drained(&mut self, client: ClientId) {
        if !self.sleep.is_drained(client) {
            return;
        }
        for from in self.gpus_of(client) {
            if !self.is_drained(from) {
                continue;
            }
            let candidates = self.places.candidates(client, from).filter(|to| !self.sleep.has_missed(client, *to));
            let moves = candidates.map(|to| Move { from, to });
            let free = moves.filter(|both| self.move_obstacle(client, *both).is_none());
            let clients = |both: &Move| self.memory.get(&both.to).map_or(0, |gpu| gpu.clients.len());
            if let Some(both) = free.min_by_key(clients) {
                self.sleep.want_move(client, both);
                self.limit_sleeper(client);
                return; // one after the other
            }
        }
    }

    /// Moves all that is known of a client that sleeps from one GPU to another. Nothing if that is unknown, or the client is there.
    fn move_attachment(&mut self, client: ClientId, both @ Move { from, to }: Move) {
        if self.memory_of(client, to).is_some() || !self.memory.contains_key(&to) {
            return;
        }
        let now = self.now;
        let (Some(state), Some(gpu)) = (self.clients.get(&client), self.memory.get_mut(&from)) else { return };
        let (tenant, Some(attachment)) = (state.tenant, gpu.take(client)) else { return };
        if let Some(gpu) = self.memory.get_mut(&to) {
            gpu.put(now, client, tenant, attachment);
        }
        let wanted = self.with_quota(|quota, cx, _| quota.move_client(cx, client, from, to));
        let wants = self.lock.wants(client).filter(|wants| wants.contains(&from)).cloned();
        self.lock.move_client(client, from, to);
        self.histories.move_client(client, from, to);
        self.places.move_client(client, from, to);
        self.effects.wake(Wake::Eviction(client, from), None);
        self.effects.wake(Wake::Ahead(client, from), None);
        let (is_drained, number) = (self.has_drained(client), self.effects.number());
        self.sleep.moved(client, both, is_drained, number);
        self.limit_sleeper(client); // in the same step: nobody is promised its place
        self.effects.command(Command::Moved { client, from, to });
        if let Some(mut wants) = wants {
            wants.remove(&from);
            wants.insert(to);
            self.request(client, wants); // keeps its place
        }
        if let Some(bytes) = wanted {
            self.request_limit(client, to, bytes);
        }
        self.lock_changed(client, to);
        self.schedule_verification(from);
        for id in [from, to] {
            self.measure(id);
            self.touch(id);
        }
        self.forget_if_gone(from);
    }
}
