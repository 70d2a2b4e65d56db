//! Copies of the state for status and metrics. No decision depends on them.

use super::Machine;
use crate::{
    api::*,
    explain::Explanation,
    gpu::{Access, Gpu, others::Room},
    queue::Blocked,
    view::{Activity, AttachmentView, ClientView, GpuView, HolderView, NO_TURN, RoomView, Turns, WaiterView},
};
use std::{collections::BTreeMap, time::Duration};

impl Machine {
    /// Explains what a client waits for on each of its GPUs. Returns an iterator, because each
    /// explanation takes time proportional to the queue. `now` must not be before the newest event.
    pub fn explain(&self, client: ClientId, now: Time) -> impl Iterator<Item = Explanation> {
        self.model().explain(client, now)
    }

    /// Estimates the time until each of the next `most` requests in the queue of a GPU runs, the
    /// next one first. Stops at the first request whose start cannot be estimated.
    pub fn expected_starts(&self, id: GpuId, most: usize, now: Time) -> Vec<(ClientId, Duration)> {
        self.model().expected_starts(id, most, now)
    }

    /// Views of all known GPUs.
    pub fn gpus(&self) -> Vec<GpuView> {
        self.gpus.ids().filter_map(|id| self.gpu(id)).collect()
    }

    /// Returns the bytes of host memory that limits may rely on (`None`: unbounded), and the bytes
    /// that they rely on now.
    pub fn host(&self) -> (Option<u64>, u64) {
        self.quota.host()
    }

    /// Bytes in host memory over all GPUs, as clients report them.
    pub fn swapped(&self) -> u64 {
        let accounts = self.gpus.iter().flat_map(|(_, gpu)| gpu.accounts());
        accounts.fold(0, |sum, account| sum.saturating_add(account.report.swapped))
    }

    /// Whether the GPU was found and has not been forgotten.
    pub fn is_known(&self, id: GpuId) -> bool {
        self.gpus.contains(id)
    }

    /// Views of all connected clients.
    pub fn clients(&self) -> Vec<ClientView> {
        self.clients.keys().filter_map(|id| self.client(*id)).collect()
    }

    /// The tenants of all connected clients.
    pub fn tenants(&self) -> BTreeMap<ClientId, TenantId> {
        self.clients.iter().map(|(id, client)| (*id, client.tenant)).collect()
    }

    /// The view of one GPU. `None`: the GPU is unknown.
    pub fn gpu(&self, id: GpuId) -> Option<GpuView> {
        let (gpu, model) = (self.gpus.get(id)?, self.model());
        let holders = self.gpus.holds_on(id).map(|(client, hold)| HolderView {
            client,
            since: hold.since,
            state: model.state(client, id),
            ends: hold.ends.filter(|ends| ends.saturating_sub(self.now) < NO_TURN),
        });
        let blocked = self.queues.requests().filter(|(_, r)| r.blocked.is_some()).map(|(entity, _)| entity);
        let entities = model.whole_queue(id).into_iter().chain(blocked);
        let mut waiters = Vec::new();
        for request in entities.filter_map(|entity| self.queues.request(entity)) {
            let blocked = request.blocked.map(|why| match why {
                Blocked::Pinned(_) => WaitReason::Pinned,
                Blocked::Undrained => WaitReason::HolderStuck,
                Blocked::Until(_) | Blocked::Absent | Blocked::Behind(_) => WaitReason::Queue,
            });
            for (client, _) in request.wants.iter().filter(|(_, gpus)| gpus.contains(&id)) {
                let since = request.since.get(client).copied().unwrap_or_default();
                waiters.push(WaiterView { client: *client, since, blocked });
            }
        }
        Some(GpuView {
            gpu: id,
            total: gpu.total,
            gone: gpu.access == Access::Gone,
            drained: gpu.drained,
            capacity: gpu.capacity(&self.settings),
            trial: gpu.trial.map_or(0, |trial| trial.beyond),
            overhead: gpu.overhead(&self.settings),
            shortfall: gpu
                .attachments
                .iter()
                .map(|(client, attachment)| gpu.shortfall(model.gpu_context(), *client, attachment))
                .max()
                .unwrap_or(0),
            charged: gpu.ledger.charged(),
            committed: self.quota.committed(id),
            holders: holders.collect(),
            waiters,
            link: gpu.rates.link(),
            kept: gpu.others.kept(),
            rooms: gpu
                .others
                .rooms()
                .map(|(room, Room { bytes, until, is_ready, .. })| RoomView { room, bytes, until, is_ready })
                .collect(),
        })
    }

    /// The due share of a GPU's time, in thousandths, of each client that holds the GPU or waits
    /// for it. Assumes that all these clients always have work. Time is divided among owners by
    /// weight, and equally among the requests of one owner.
    pub fn shares_due(&self, id: GpuId) -> BTreeMap<ClientId, u32> {
        self.model().shares().due(id)
    }

    /// Whether another program has locked or checkpointed a client's process.
    pub fn is_foreign(&self, id: ClientId) -> bool {
        self.sleep.is_foreign(id)
    }

    /// Whether a signal or a debugger has stopped a client's process.
    pub fn is_stopped(&self, id: ClientId) -> bool {
        self.clients.get(&id).is_some_and(|client| client.signalled)
    }

    /// The view of one client. `None`: the client is not connected.
    pub fn client(&self, id: ClientId) -> Option<ClientView> {
        let (client, model) = (self.clients.get(&id)?, self.model());
        let attachments = self.gpus.locks_of(id).filter_map(|(gpu, _)| {
            let (attachment, account) = (self.gpus.attachment(id, gpu)?, self.gpus.account(id, gpu)?);
            let (limit, history) = (self.quota.limit(id, gpu)?, self.gpus.history(id, gpu)?);
            let present = account.frees.present();
            let turns = self.turns(id, gpu, self.now)?;
            Some(AttachmentView {
                gpu,
                engine: attachment.engine,
                attached: attachment.attached.is_some(),
                state: model.state(id, gpu),
                demand: account.report.demand,
                limit: limit.limit,
                pending_limit: limit.wanted.filter(|request| request.held.is_some()).map(|request| request.bytes),
                committed: limit.committed(),
                allowance: account.allowance,
                charge: account.charge.saturating_add(present),
                mapped: account.report.mapped.saturating_add(present),
                swapped: account.report.swapped,
                pinned: account.report.pinned.saturating_add(present),
                unfreed: present,
                unverified: account.unverified(),
                disbelieved: account.is_disbelieved().then(|| account.claimed()),
                failures: attachment.failures.in_a_row,
                eviction_blocked: model.eviction_block(id, gpu).or((present > 0).then_some(EvictionBlock::Unfreed)),
                utilization: history.utilization.permille(),
                grants: turns.grants,
                lock_time: turns.lock_time,
                wait_time: turns.wait_time + turns.waits,
            })
        });
        Some(ClientView {
            client: id,
            group: self.rules.group(id),
            gang_peers: self.queues.gang_peers(id).collect(),
            placed: self.places.of(id),
            stopped: client.signalled,
            attachments: attachments.collect(),
        })
    }

    /// The engine that moves a client's memory on a GPU. `None`: the client has not attached the
    /// GPU.
    pub fn engine(&self, id: ClientId, gpu: GpuId) -> Option<Engine> {
        Some(self.gpus.attachment(id, gpu)?.engine)
    }

    /// The fewest and the most bytes that a client can have mapped on a GPU now. `None`: the client
    /// has not attached the GPU.
    pub fn extent(&self, id: ClientId, gpu: GpuId) -> Option<(u64, u64)> {
        let ignored = self.gpus.get(gpu).map_or(0, Gpu::ignored_unverified);
        Some(self.gpus.account(id, gpu)?.extent(ignored))
    }

    /// The bytes of a GPU that are charged to a client. 0 if the client has not attached the GPU.
    pub fn charge(&self, id: ClientId, gpu: GpuId) -> u64 {
        self.gpus.account(id, gpu).map_or(0, |account| account.charge)
    }

    /// The bytes that a client has on a GPU, and in host memory. `None`: the client has not
    /// attached the GPU.
    pub fn resident_and_swapped(&self, id: ClientId, gpu: GpuId) -> Option<(u64, u64)> {
        let account = self.gpus.account(id, gpu)?;
        Some((account.report.mapped.saturating_add(account.frees.present()), account.report.swapped))
    }

    /// The highest demand, in bytes, that a client can reach on a GPU under its unacknowledged
    /// limits, or the limit that it has requested if that is higher.
    pub fn committed_or_requested(&self, id: ClientId, gpu: GpuId) -> u64 {
        let Some(limit) = self.quota.limit(id, gpu) else { return 0 };
        limit.committed().max(limit.wanted.map_or(0, |wanted| wanted.bytes))
    }

    /// Whether all clients have stopped running and all evictable memory has been evicted, after
    /// [`Event::Suspend`].
    pub fn is_evacuated(&self) -> bool {
        let mut present = self.gpus.iter().filter(|(_, gpu)| gpu.access != Access::Gone);
        present.all(|(_, gpu)| gpu.is_evacuated(self.model().gpu_context()))
    }

    /// Bytes of a GPU that limits may rely on.
    pub fn offer(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.promisable(&self.settings))
    }

    /// A client's activity on each of its GPUs.
    pub fn activities(&self, id: ClientId) -> impl Iterator<Item = (GpuId, Activity)> {
        let sleep = self.sleep.view(id);
        let is_returning = matches!(sleep.phase, SleepPhase::Waking | SleepPhase::Restoring);
        self.gpus.locks_of(id).map(move |(gpu, lock)| {
            let waits_for_context =
                self.gpus.attachment(id, gpu).is_some_and(|attachment| attachment.attached.is_none());
            let waits_for_memory = self.quota.limit(id, gpu).is_some_and(|limit| limit.wanted.is_some());
            let waits = self.queues.waits_for(id, gpu) || is_returning || waits_for_context || waits_for_memory;
            let runs = lock.hold.as_ref().is_some_and(|hold| !hold.suspended);
            (gpu, Activity { is_stalled: waits && !sleep.paused, runs })
        })
    }

    /// A client's turns up to `now`. `now` must not be before the newest event.
    pub fn turns(&self, id: ClientId, gpu: GpuId, now: Time) -> Option<Turns> {
        let lock = self.gpus.lock(id, gpu)?;
        let request = self.queues.waiting(id).and_then(|entity| self.queues.request(entity));
        let request = request.filter(|r| r.wants.get(&id).is_some_and(|gpus| gpus.contains(&gpu)));
        let since = request.and_then(|r| r.since.get(&id));
        let until_now = |since: Time| now.saturating_sub(since);
        Some(Turns {
            grants: lock.grants,
            lock_time: lock.lock_time + lock.hold.as_ref().map_or(Duration::ZERO, |hold| until_now(hold.since)),
            wait_time: lock.wait_time,
            waits: since.map_or(Duration::ZERO, |since| until_now(*since)),
        })
    }

    /// Bytes of a GPU that are charged to clients.
    pub fn charged(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.ledger.charged())
    }

    /// Whether any client holds the lock of a GPU.
    pub fn is_held(&self, gpu: GpuId) -> bool {
        self.gpus.holders(gpu).next().is_some()
    }

    /// Whether a GPU reports errors.
    pub fn is_failing(&self, gpu: GpuId) -> bool {
        self.gpus.get(gpu).is_some_and(|gpu| gpu.failing)
    }

    /// The sets of GPUs between which clients can be moved, as reported by the daemon.
    pub fn kinds(&self) -> &[GpuSet] {
        self.places.kinds()
    }

    /// The GPUs that a client may use, as reported by the daemon. `None`: any GPU.
    pub fn allowed(&self, client: ClientId) -> Option<&GpuSet> {
        self.places.allowed(client)
    }

    /// Bytes that a client's group may allocate on a GPU. `None`: the client is in no group, or the
    /// group is unlimited.
    pub fn memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.memory_max(client, self.gpus.get(id)?.total)
    }

    /// The measured or estimated size of the contexts of a client's group on a GPU, in bytes.
    pub fn contexts_of_group(&self, client: ClientId, id: GpuId) -> u64 {
        self.model().ask_quota(|quota, cx| quota.contexts_of_group(cx, client, id))
    }

    /// The measured or estimated size of a client's own context on a GPU, in bytes.
    pub fn counted_context(&self, client: ClientId, id: GpuId) -> u64 {
        self.model().ask_quota(|quota, cx| quota.context(cx, client, id))
    }

    /// The lowest of all limits on a client's memory on a GPU, even if the client does not use that
    /// GPU. `None`: unlimited.
    pub fn lowest_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.lowest_max(client, self.gpus.get(id)?.total)
    }

    /// Bytes that a client's environment allows it to allocate on a GPU, including its context.
    /// `None`: no limit.
    pub fn env_memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.env_memory_max(client, self.gpus.get(id)?.total)
    }

    /// Whether clients may have allocated host memory ahead. The daemon then has to watch the
    /// host's memory.
    pub fn is_ahead(&self) -> bool {
        self.quota.asked_ahead() > 0
    }

    /// Whether the client's context was complete at the time `begun`.
    pub fn has_context(&self, client: ClientId, id: GpuId, begun: Time) -> bool {
        self.gpus.get(id).is_some_and(|gpu| gpu.has_context(client, begun))
    }

    /// The known state of a client's sleep.
    pub fn sleep_of(&self, client: ClientId) -> SleepView {
        self.sleep.view(client)
    }
}
