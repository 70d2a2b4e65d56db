//! Which clients can sleep, and which client sleeps next.

use super::Model;
use crate::{api::*, gpu::Access, queue::Entity};

impl Model<'_> {
    /// The next client to put to sleep on a GPU, and when. Clients are put to sleep one at a time:
    /// the memory of one may be enough, and the GPU is measured first.
    pub fn next_sleeper(&self, id: GpuId) -> Option<(ClientId, Time)> {
        let gpu = self.gpus.get(id).filter(|gpu| gpu.has_only_clients && !gpu.measurement_requested)?;
        let lacks_contexts = self.lacks_contexts(id);
        let demand = |client: &ClientId| match self.sleep.is_away(*client) {
            true => 0,
            false => gpu.account(*client).map_or(0, |account| account.report.demand),
        };
        let usable = gpu.usable(self.settings);
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
        let can = |client: &ClientId| !self.is_absent(*client) && self.obstacle(*client).is_none();
        let due = |client: &ClientId| {
            let after = self.rules.sleep_after(*client, self.settings)?;
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
    pub fn lacks_contexts(&self, id: GpuId) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.lacks_contexts(self.gpu_context()))
    }

    /// Why a client cannot sleep, as far as the scheduler knows without asking the client.
    pub fn obstacle(&self, client: ClientId) -> Option<SleepObstacle> {
        let waits = self.queues.waiting(client).is_some() && !self.sleep.is_ordered(client);
        let is_busy = self.gpus.holds_any(client) || waits;
        is_busy.then_some(SleepObstacle::Busy).or_else(|| self.lasting_obstacle(client))
    }

    /// Like `obstacle`, but ignores the client's work.
    pub fn lasting_obstacle(&self, client: ClientId) -> Option<SleepObstacle> {
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

    /// Bytes that a restore needs for a client's context on a GPU.
    pub fn context_of(&self, client: ClientId, id: GpuId) -> u64 {
        self.gpus.get(id).map_or(0, |gpu| gpu.context_of(self.gpu_context(), client))
    }

    /// Whether a waking client fits on all of its GPUs beside memory that cannot be evicted.
    pub fn fits_to_return(&self, client: ClientId) -> bool {
        let fits = |id| self.gpus.get(id).is_none_or(|gpu| gpu.lacks_to_return(self.gpu_context(), client) == 0);
        self.gpus.of_client(client).into_iter().all(fits)
    }

    /// A client that waits for room on a GPU, where no room is set aside for it.
    pub fn waits_to_return(&self, id: GpuId) -> Option<ClientId> {
        let gpu = self.gpus.get(id)?;
        gpu.away.keys().copied().find(|client| self.sleep.is_waking(*client) && !gpu.is_set_aside(*client))
    }

    /// Whether all GPUs of a waking client have room for it.
    pub fn has_room_to_return(&self, client: ClientId) -> bool {
        let returning = |id| self.gpus.get(id).and_then(|gpu| gpu.returning);
        let is_ready = |id| returning(id).is_some_and(|returning| returning.client == client && returning.is_measured);
        self.gpus.of_client(client).into_iter().all(is_ready)
    }

    /// Why a client that was asked to prepare cannot sleep after all. The client may have requested
    /// a lock or attached another GPU in the meantime.
    pub fn obstacle_when_ready(&self, client: ClientId) -> Option<SleepObstacle> {
        let is_there = |id: &GpuId| self.gpus.account(client, *id).is_some_and(|account| account.charge > 0);
        let is_any_there = self.gpus.of_client(client).iter().any(is_there);
        is_any_there.then_some(SleepObstacle::Immovable).or_else(|| self.obstacle(client))
    }
}
