//! A copy of the state for status and metrics. No decision depends on this copy.

use crate::{
    api::*,
    gpu::{Access, Gpu, others::Room},
    model::Model,
    queue::Blocked,
};
use std::{collections::BTreeMap, time::Duration};

/// A turn longer than this counts as unbounded: nothing ends it.
pub(crate) const NO_TURN: Duration = Duration::from_secs(7 * 24 * 3600);

/// One GPU. Amounts are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuView {
    pub gpu: GpuId,
    /// Size of the GPU in bytes.
    pub total: u64,
    /// The GPU can no longer run any work.
    pub gone: bool,
    /// The GPU should become empty: see [`Event::Drain`].
    pub drained: bool,
    /// Bytes that can be charged to clients. Unbounded on a GPU that is gone; 0 while the host is
    /// about to suspend.
    pub capacity: u64,
    /// Bytes beyond the usable memory that one client tries to map. The capacity includes them.
    pub trial: u64,
    /// Bytes set aside for contexts and other programs, excluding the reserve.
    pub overhead: u64,
    /// The largest shortfall of any client: the bytes that the client needs beyond its demand,
    /// because it could not map memory that measurements show as free.
    pub shortfall: u64,
    /// Bytes charged to clients.
    pub charged: u64,
    /// The highest total that the demands of the GPU's clients can reach.
    pub committed: u64,
    /// Holders in the order of their grants.
    pub holders: Vec<HolderView>,
    /// Waiting clients in the order of service. Clients of blocked requests come last.
    pub waiters: Vec<WaiterView>,
    /// When the next turn ends, or the GPU is next checked for another reason. `None`: no check is
    /// due.
    pub next: Option<Time>,
    /// The rate of the link to the host, in bytes per second in each direction. `None`: unknown.
    pub link: Option<u64>,
    /// Bytes of the overhead that are kept free for other programs, either for rooms or in advance
    /// for programs that grow.
    pub kept: u64,
    pub rooms: Vec<RoomView>,
}

/// A room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RoomView {
    pub room: RoomId,
    pub bytes: u64,
    /// When the room ends if it is not requested again.
    pub until: Time,
    /// The room's bytes are free.
    pub is_ready: bool,
}

/// A holder of a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderView {
    pub client: ClientId,
    pub since: Time,
    pub state: LockState,
    /// When the holder's turn ends. `None`: no end is set.
    pub ends: Option<Time>,
}

/// A client that is waiting for a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaiterView {
    pub client: ClientId,
    pub since: Time,
    /// Why the request is in no queue. `None`: the request is queued.
    pub blocked: Option<WaitReason>,
}

/// One client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    pub client: ClientId,
    /// The group whose limits apply to the client. `None`: no rule applies to the client.
    pub group: Option<GroupId>,
    /// The other members of the client's gang.
    pub gang_peers: Vec<ClientId>,
    /// The GPUs on which the client was placed. Empty if the client chose its own GPUs.
    pub placed: Vec<GpuId>,
    pub stopped: bool,
    pub attachments: Vec<AttachmentView>,
}

/// A client on one GPU. Amounts are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachmentView {
    pub gpu: GpuId,
    pub engine: Engine,
    /// Whether the client was told that it may create its context.
    pub attached: bool,
    pub state: LockState,
    /// Bytes that the client needs on the GPU to run.
    pub demand: u64,
    /// The newest limit on the client's demand.
    pub limit: u64,
    /// The limit that one of the client's allocations needs. The allocation waits until other
    /// clients have freed enough memory.
    pub pending_limit: Option<u64>,
    /// The client's highest possible demand now, including messages in flight.
    pub committed: u64,
    /// Bytes that the client may have mapped.
    pub allowance: u64,
    /// The most bytes that the client can have mapped now, including messages in flight.
    pub charge: u64,
    pub mapped: u64,
    pub swapped: u64,
    pub pinned: u64,
    /// Bytes that the client reported as freed and that measurements still show.
    pub unfreed: u64,
    /// Other bytes that the client reported as freed. No measurement has confirmed them yet.
    pub unverified: u64,
    /// The mapped bytes that the client reports, if its mapped or pinned bytes exceed the values
    /// that the scheduler accepts.
    pub disbelieved: Option<u64>,
    /// The number of consecutive grants that ended because the driver had no room for memory that
    /// the client was allowed to map.
    pub failures: u32,
    /// Why the client's memory cannot be evicted. With `EvictionBlock::Unfreed`, only part of the
    /// memory is affected.
    pub eviction_blocked: Option<EvictionBlock>,
    /// The part of the time, in thousandths, in which the client keeps the GPU busy. `None`:
    /// unknown.
    pub utilization: Option<u32>,
    /// The number of grants, and the total times for which the client has held the lock and waited
    /// for it, the current turn or wait included.
    pub grants: u64,
    pub lock_time: Duration,
    pub wait_time: Duration,
}

/// A client's current activity on a GPU. A client is both stalled and running if it waits for
/// memory during its turn, or waits for the lock again before it has released the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// The client waits for the lock, for memory, or for room to return to the GPU, and is not
    /// paused.
    pub is_stalled: bool,
    /// The client holds the lock, and its process is not stopped.
    pub runs: bool,
}

/// A client's turns on one GPU since the client attached the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Turns {
    pub grants: u64,
    /// Total time with the lock, including the current turn.
    pub lock_time: Duration,
    /// Total time of waits that ended with a grant.
    pub wait_time: Duration,
    /// Length of the current wait; 0 if the client does not wait.
    pub waits: Duration,
}

/// A client's state with respect to one GPU's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// The client neither holds the lock nor waits for it.
    Idle,
    Waiting,
    Holding,
    /// The client was revoked and has not released the lock yet.
    Revoking,
    /// The client was revoked and reported that it cannot drain.
    Stuck,
    /// The client has not drained for so long that other clients are admitted beside it.
    Undrainable,
    /// The client was revoked, and its process is stopped. The client does not count as a holder.
    Suspended,
}

impl<'a> Model<'a> {
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

    /// Whether host memory is too small to back a whole GPU's memory for every client.
    pub fn is_host_scarce(&self) -> bool {
        self.quota.is_host_scarce()
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

    /// The view of one GPU. `None`: the GPU is unknown. `next`: see [`GpuView::next`].
    pub fn gpu(&self, id: GpuId, next: Option<Time>) -> Option<GpuView> {
        let gpu = self.gpus.get(id)?;
        let holders = self.gpus.holds_on(id).map(|(client, hold)| HolderView {
            client,
            since: hold.since,
            state: self.state(client, id),
            ends: hold.ends.filter(|ends| ends.saturating_sub(self.now) < NO_TURN),
        });
        let blocked = self.queues.requests().filter(|(_, r)| r.blocked.is_some()).map(|(entity, _)| entity);
        let entities = self.whole_queue(id).into_iter().chain(blocked);
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
            capacity: gpu.capacity(self.settings),
            trial: gpu.trial.map_or(0, |trial| trial.beyond),
            overhead: gpu.overhead(self.settings),
            shortfall: gpu
                .attachments
                .keys()
                .map(|client| gpu.shortfall(self.gpu_context(), *client))
                .max()
                .unwrap_or(0),
            charged: gpu.ledger.charged(),
            committed: self.quota.committed(id),
            holders: holders.collect(),
            waiters,
            next,
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
        self.shares().due(id)
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
        let client = self.clients.get(&id)?;
        let waiting = self.queues.waiting(id).and_then(|entity| self.queues.request(entity));
        let attachments = self.gpus.locks_of(id).filter_map(|(gpu, lock)| {
            let (attachment, account) = (self.gpus.attachment(id, gpu)?, self.gpus.account(id, gpu)?);
            let (limit, history) = (self.quota.limit(id, gpu)?, self.gpus.history(id, gpu)?);
            let present = account.frees.present();
            let wants = waiting.and_then(|r| r.wants.get(&id)).is_some_and(|gpus| gpus.contains(&gpu));
            let since = waiting.and_then(|r| r.since.get(&id)).copied().unwrap_or(self.now);
            let waits = if wants { self.now.saturating_sub(since) } else { Duration::ZERO };
            let holds = lock.hold.as_ref().map_or(Duration::ZERO, |h| self.now.saturating_sub(h.since));
            Some(AttachmentView {
                gpu,
                engine: attachment.engine,
                attached: attachment.attached.is_some(),
                state: self.state(id, gpu),
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
                eviction_blocked: self.eviction_block(id, gpu).or((present > 0).then_some(EvictionBlock::Unfreed)),
                utilization: history.utilization.permille(),
                grants: lock.grants,
                lock_time: lock.lock_time + holds,
                wait_time: lock.wait_time + waits,
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
        present.all(|(_, gpu)| gpu.is_evacuated(self.gpu_context()))
    }

    /// Bytes of a GPU that limits may rely on.
    pub fn offer(&self, gpu: GpuId) -> u64 {
        self.gpus.get(gpu).map_or(0, |gpu| gpu.promisable(self.settings))
    }

    /// A client's activity on each of its GPUs.
    pub fn activities(self, id: ClientId) -> impl Iterator<Item = (GpuId, Activity)> {
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
    pub fn kinds(&self) -> &'a [GpuSet] {
        self.places.kinds()
    }

    /// The GPUs that a client may use, as reported by the daemon. `None`: any GPU.
    pub fn allowed(&self, client: ClientId) -> Option<&'a GpuSet> {
        self.places.allowed(client)
    }

    /// Bytes that a client's group may allocate on a GPU. `None`: the client is in no group, or the
    /// group is unlimited.
    pub fn memory_max(&self, client: ClientId, id: GpuId) -> Option<u64> {
        self.rules.memory_max(client, self.gpus.get(id)?.total)
    }

    /// The measured or estimated size of the contexts of a client's group on a GPU, in bytes.
    pub fn contexts_of_group(&self, client: ClientId, id: GpuId) -> u64 {
        self.ask_quota(|quota, cx| quota.contexts_of_group(cx, client, id))
    }

    /// The measured or estimated size of a client's own context on a GPU, in bytes.
    pub fn counted_context(&self, client: ClientId, id: GpuId) -> u64 {
        self.ask_quota(|quota, cx| quota.context(cx, client, id))
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

    pub fn state(&self, client: ClientId, id: GpuId) -> LockState {
        match self.gpus.hold(client, id) {
            Some(hold) if hold.suspended => LockState::Suspended,
            Some(hold) if hold.revoked.is_none() => LockState::Holding,
            Some(hold) if hold.undrainable => LockState::Undrainable,
            Some(hold) if hold.stuck => LockState::Stuck,
            Some(_) => LockState::Revoking,
            None if self.queues.waits_for(client, id) => LockState::Waiting,
            None => LockState::Idle,
        }
    }
}
