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

use super::Model;
use crate::{
    api::*,
    gpu::Access,
    quota::{Expected, RoomToMove},
};

impl Model<'_> {
    /// Why a client cannot be moved now, even if it first has to sleep.
    pub fn obstacle_to_move(&self, client: ClientId, to: Move) -> Option<MoveObstacle> {
        let is_away = self.sleep.is_away(client);
        let asleep = || self.lasting_obstacle(client).filter(|_| !is_away).map(MoveObstacle::Sleep);
        self.move_obstacle(client, to).or_else(asleep)
    }

    /// Why a client cannot be moved. Obstacles to its sleep are not considered.
    pub fn move_obstacle(&self, client: ClientId, both @ Move { from, to }: Move) -> Option<MoveObstacle> {
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
        first.or_else(|| match self.room_for(client, both) {
            RoomToMove::None => Some(self.unevictable_neighbour(client, both).unwrap_or(MoveObstacle::NoRoom)),
            RoomToMove::Unanswered => Some(MoveObstacle::Unacknowledged),
            RoomToMove::Later | RoomToMove::Now => None,
        })
    }

    /// The client on `to` with the most memory that cannot be evicted although it is not pinned. `None`: there
    /// would be too little room even without such memory.
    fn unevictable_neighbour(&self, client: ClientId, both @ Move { to, .. }: Move) -> Option<MoveObstacle> {
        let gpu = self.gpus.get(to)?;
        let blocked = gpu.attachments.iter().filter_map(|(id, attachment)| {
            let why = self.eviction_block(*id, to)?;
            Some((gpu.unevictable_of(*id).saturating_sub(attachment.account().report.pinned), *id, why))
        });
        let blocked: Vec<_> = blocked.collect();
        let bytes = blocked.iter().fold(0, |sum: u64, (bytes, ..)| sum.saturating_add(*bytes));
        let rest = gpu.ledger.unevictable().saturating_sub(bytes);
        let (_, other, why) = blocked.into_iter().max_by_key(|(bytes, ..)| *bytes)?;
        let would_fit = self.room_beside(client, both, rest) != RoomToMove::None;
        would_fit.then_some(MoveObstacle::Unevictable(other, why))
    }

    /// Whether the client's attachment of a third GPU may have to be moved back to `to`.
    pub fn is_way_back(&self, client: ClientId, Move { from, to }: Move) -> bool {
        self.sleep.ways_back(client).into_iter().any(|back| back.to == to && back.from != from)
    }

    /// Bytes that a client's context will need on a GPU other than `from`.
    pub fn context_elsewhere(&self, client: ClientId, from: GpuId) -> u64 {
        let away = self.gpus.get(from).and_then(|gpu| gpu.away.get(&client).copied());
        away.unwrap_or_else(|| self.context_of(client, from))
    }

    /// Whether another GPU has room for a client. The client's context and demand must fit beside
    /// unevictable memory, and the context must fit beside the need of any other client on that
    /// GPU. Also checks whether the bytes promised to the client can be promised on that GPU.
    pub fn room_for(&self, client: ClientId, both: Move) -> RoomToMove {
        let unevictable = self.gpus.get(both.to).map_or(0, |gpu| gpu.ledger.unevictable());
        self.room_beside(client, both, unevictable)
    }

    /// Like `room_for`, beside this number of unevictable bytes.
    fn room_beside(&self, client: ClientId, both @ Move { from, to }: Move, unevictable: u64) -> RoomToMove {
        let (Some(account), Some(gpu)) = (self.gpus.account(client, from), self.gpus.get(to)) else {
            return RoomToMove::None;
        };
        let here = gpu.promisable(self.settings);
        let context = self.context_elsewhere(client, from);
        let room = here.saturating_sub(context);
        let runs_all_at_once = |id: &ClientId| gpu.attachments.get(id).is_some_and(|it| it.engine != Engine::Managed);
        // Ignores clients whose needs do not fit anyway.
        let most = gpu.ledger.needs_up_to(here).find(|(_, id)| runs_all_at_once(id)).map_or(0, |(need, _)| need);
        let need = account.report.demand.saturating_add(unevictable);
        if need.max(most) > room {
            return RoomToMove::None;
        }
        let is_away = self.sleep.is_away(client);
        // If the client's process may have to return to a GPU, the client's bytes stay promised there.
        let keeps = self.sleep.ways_back(client).iter().all(|back| back.from != from);
        self.ask_quota(|quota, cx| quota.room_to_move(cx, client, Expected { to: both, context }, keeps, is_away))
    }

    pub fn is_drained(&self, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.drained)
    }

    /// Whether a client has a context on a drained GPU, or would be restored on one.
    pub fn has_drained(&self, client: ClientId) -> bool {
        let is_awake = self.sleep.view(client).phase == SleepPhase::Awake;
        let has_context = |id| self.gpus.attachment(client, id).is_some_and(|attachment| attachment.attached.is_some());
        self.gpus.of_client(client).into_iter().any(|id| self.is_drained(id) && (!is_awake || has_context(id)))
    }

    /// The move that takes a client off a drained GPU, to the GPU with the fewest clients that has
    /// room for the client. One GPU at a time.
    pub fn way_out(&self, client: ClientId) -> Option<Move> {
        self.gpus.of_client(client).into_iter().filter(|from| self.is_drained(*from)).find_map(|from| {
            let candidates = self.places.candidates(client, from).filter(|to| !self.sleep.has_missed(client, *to));
            let moves = candidates.map(|to| Move { from, to });
            let free = moves.filter(|both| self.move_obstacle(client, *both).is_none());
            free.min_by_key(|both| self.gpus.get(both.to).map_or(0, |gpu| gpu.attachments.len()))
        })
    }

    /// The room that a client's move needs, and the room that its way back needs.
    pub fn expected(&self, client: ClientId) -> (Vec<Expected>, Vec<Expected>) {
        let place = |to: Move| Expected { to, context: self.context_elsewhere(client, to.from) };
        let goes = self.sleep.coming(client).into_iter().map(place).collect();
        (goes, self.sleep.ways_back(client).into_iter().map(place).collect())
    }
}
