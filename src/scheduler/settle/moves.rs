//! Clients that are moved from one GPU to another of the same kind (`Event::Migrate`): each sleeps,
//! is moved, and is restored there.
//!
//! A sleeping client has nothing on a GPU except the scheduler's records. So a move takes these
//! records, including a waiting request, out of one GPU's maps and puts them into the maps of the
//! other GPU, whatever state the client is in. The client wakes there as it would have on its old
//! GPU: room is made and measured in the same way. `sleep` knows where the process was and where
//! the client is attached now, so it also knows where to restore the process. The client is
//! notified when it is awake again.
//!
//! A drained GPU (`Event::Drain`) defers all contexts. Its clients are moved to another GPU of the
//! same kind (`Event::Kinds`) that they may use (`Event::Allowed`). If the first such GPU has no
//! room, or the restore there fails, the next one is tried. Clients that cannot be moved are put to
//! sleep, like paused clients. Clients keep running between attempts if they can neither be moved
//! nor sleep, because otherwise their work would never end.

use crate::{
    api::*,
    gpu::Access,
    machine::Machine,
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

    /// Why a client cannot be moved. Obstacles to its sleep are not considered.
    fn move_obstacle(&self, client: ClientId, both @ Move { from, to }: Move) -> Option<MoveObstacle> {
        let total = |id| self.gpus.get(id).filter(|gpu| gpu.access != Access::Gone).map(|gpu| gpu.total);
        // Only GPUs with clients show whether clients can be measured. On `from` they can be
        // measured, because otherwise the client would not sleep. So `to` needs only a measured
        // overhead.
        let is_measured = self.gpus.get(to).is_some_and(|gpu| gpu.measured.is_some());
        let is_gang = self.queues.gang_peers(client).next().is_some();
        let is_like_it = total(to).is_some() && total(to) == self.gpus.get(from).map(|gpu| gpu.total);
        let obstacles = [
            (self.gpus.attachment(client, from).is_none(), MoveObstacle::NotThere),
            (self.gpus.attachment(client, to).is_some() || self.is_way_back(client, both), MoveObstacle::Attached),
            (!is_like_it, MoveObstacle::NoGpu),
            (self.is_drained(to), MoveObstacle::Drained),
            (is_gang, MoveObstacle::Sleep(SleepObstacle::Gang)),
            (!is_measured, MoveObstacle::Sleep(SleepObstacle::Unmeasured)),
        ];
        let first = obstacles.into_iter().find(|(is_so, _)| *is_so).map(|(_, why)| why);
        first.or_else(|| (self.room_for(client, both) == RoomToMove::None).then_some(MoveObstacle::NoRoom))
    }

    /// Whether the client's attachment of a third GPU may have to be moved back to `to`.
    fn is_way_back(&self, client: ClientId, Move { from, to }: Move) -> bool {
        self.sleep.ways_back(client).into_iter().any(|back| back.to == to && back.from != from)
    }

    /// Bytes that a client's context will need on a GPU other than `from`.
    pub(super) fn context_elsewhere(&self, client: ClientId, from: GpuId) -> u64 {
        let away = self.gpus.get(from).and_then(|gpu| gpu.away.get(&client).copied());
        away.unwrap_or_else(|| self.context_of(client, from))
    }

    /// Whether another GPU has room for a client. The client's context and demand must fit beside
    /// unevictable memory, and the context must fit beside the need of any other client on that
    /// GPU. Also checks whether the bytes promised to the client can be promised on that GPU.
    fn room_for(&self, client: ClientId, both @ Move { from, to }: Move) -> RoomToMove {
        let (Some(account), Some(gpu)) = (self.gpus.account(client, from), self.gpus.get(to)) else {
            return RoomToMove::None;
        };
        let here = gpu.promisable(&self.settings);
        let context = self.context_elsewhere(client, from);
        let room = here.saturating_sub(context);
        let runs_all_at_once = |id: &ClientId| gpu.attachments.get(id).is_some_and(|it| it.engine != Engine::Managed);
        // Ignores clients whose needs do not fit anyway.
        let most = gpu.ledger.needs_up_to(here).find(|(_, id)| runs_all_at_once(id)).map_or(0, |(need, _)| need);
        let need = account.report.demand.saturating_add(gpu.ledger.unevictable());
        if need.max(most) > room {
            return RoomToMove::None;
        }
        let is_away = self.sleep.is_away(client);
        // If the client's process may have to return to a GPU, the client's bytes stay promised there.
        let keeps = self.sleep.ways_back(client).iter().all(|back| back.from != from);
        self.model()
            .ask_quota(|quota, cx| quota.room_to_move(cx, client, Expected { to: both, context }, keeps, is_away))
    }

    /// Makes the pending move of a sleeping client.
    pub(super) fn move_sleeper(&mut self, client: ClientId) {
        while let Some(to) = self.sleep.due_move(client) {
            let why = match self.move_obstacle(client, to) {
                Some(why) => why,
                None if self.room_for(client, to) == RoomToMove::Now => return self.move_attachment(client, to),
                // Other clients have to acknowledge lower limits first.
                None if self.sleep.waits_for_room(self.now, client) => return,
                None => MoveObstacle::NoRoom,
            };
            self.cannot_move(client, why);
        }
    }

    /// Cancels the move of a sleeping client. If the client has to leave a drained GPU, plans a
    /// move to the next GPU.
    fn cannot_move(&mut self, client: ClientId, why: MoveObstacle) {
        self.sleep.cannot_move(client, why);
        self.answer_move(client);
        self.leave_drained(client);
    }

    /// Retries a client's move after limits have made room for it on the target GPU.
    pub(crate) fn retry_move(&mut self, client: ClientId) {
        self.move_sleeper(client);
        self.take_step(client, Step::Nothing);
    }

    /// Moves a client back to its old GPUs because it could not be restored on the new ones.
    pub(super) fn move_back(&mut self, client: ClientId) {
        for back in self.sleep.ways_back(client) {
            self.sleep.misses(client, back.from);
            self.move_attachment(client, back);
        }
        self.cannot_move(client, MoveObstacle::Failed);
    }

    /// Reports the outcome of a move, if it is known.
    pub(crate) fn answer_move(&mut self, client: ClientId) {
        let Some((Move { from, to }, why)) = self.sleep.take_answer(client) else { return };
        self.limit_sleeper(client);
        self.effects.command(Command::Migrated { client, from, to, why });
        if why.is_some() && !self.model().is_absent(client) {
            self.may_run(client);
        }
    }

    /// Starts to empty the GPU (`drained`), or puts it back into use.
    pub(crate) fn drain(&mut self, id: GpuId, drained: bool) {
        let Some(gpu) = self.gpus.get_mut(id) else { return };
        gpu.drained = drained;
        let clients: Vec<ClientId> = gpu.attachments.keys().copied().collect();
        clients.into_iter().for_each(|client| self.drain_client(client));
        self.touch(id);
    }

    fn is_drained(&self, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.drained)
    }

    /// Whether a client has a context on a drained GPU, or would be restored on one.
    fn has_drained(&self, client: ClientId) -> bool {
        let is_awake = self.sleep.view(client).phase == SleepPhase::Awake;
        let has_context = |id| self.gpus.attachment(client, id).is_some_and(|attachment| attachment.attached.is_some());
        self.gpus.of_client(client).into_iter().any(|id| self.is_drained(id) && (!is_awake || has_context(id)))
    }

    /// Takes a client off its GPUs if one of them is drained. Restores the client if none is
    /// drained.
    pub(crate) fn drain_client(&mut self, client: ClientId) {
        let (is_drained, number) = (self.has_drained(client), self.effects.number());
        let step = self.sleep.set_drained(client, is_drained, number);
        self.leave_drained(client);
        self.move_sleeper(client);
        self.take_step(client, step);
    }

    /// Plans the move of a client off a drained GPU, if another GPU has room for the client.
    pub(super) fn leave_drained(&mut self, client: ClientId) {
        if !self.sleep.is_drained(client) {
            return;
        }
        for from in self.gpus.of_client(client) {
            if !self.is_drained(from) {
                continue;
            }
            let candidates = self.places.candidates(client, from).filter(|to| !self.sleep.has_missed(client, *to));
            let moves = candidates.map(|to| Move { from, to });
            let free = moves.filter(|both| self.move_obstacle(client, *both).is_none());
            let clients = |both: &Move| self.gpus.get(both.to).map_or(0, |gpu| gpu.attachments.len());
            if let Some(both) = free.min_by_key(clients) {
                self.sleep.want_move(client, both);
                self.limit_sleeper(client);
                return; // one move at a time
            }
        }
    }

    /// Moves the attachment of a sleeping client from one GPU to another, together with its limit
    /// and its request. Does nothing if the target is unknown or the client has already attached
    /// it.
    fn move_attachment(&mut self, client: ClientId, both @ Move { from, to }: Move) {
        if !self.gpus.move_client(self.now, client, both) {
            return;
        }
        let wanted = self.with_quota(|quota, cx, _| quota.move_client(cx, client, from, to));
        let wants = self.queues.wants(client).filter(|wants| wants.contains(&from)).cloned();
        self.places.move_client(client, from, to);
        self.effects.wake(Wake::Eviction(client, from), None);
        self.effects.wake(Wake::Ahead(client, from), None);
        let (is_drained, number) = (self.has_drained(client), self.effects.number());
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
        self.lock_changed(client, to);
        self.with_gpu(from, |gpu, _, fx| gpu.schedule_verification(fx));
        for id in [from, to] {
            self.measure(id);
            self.touch(id);
        }
        self.forget_if_gone(from);
    }
}
