//! A copy of the state for status and metrics. No decision reads it.

use crate::{api::*, lock::Blocked, machine::Machine, memory::GpuMemory};
use std::time::Duration;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuView {
    pub gpu: GpuId,
    pub total: u64,
    /// Bytes that can be promised to clients.
    pub capacity: u64,
    /// Those of them that do not seem to be there: one client tries to map them.
    pub trial: u64,
    /// Bytes that are put aside: contexts and strangers; without the reserve.
    pub overhead: u64,
    /// The most that a client needs beyond its demand, since it could not map what measurements show as free.
    pub shortfall: u64,
    /// Bytes that are promised to clients.
    pub charged: u64,
    /// Bytes that the demands of its clients can come to.
    pub committed: u64,
    /// In the order of their grants.
    pub holders: Vec<HolderView>,
    /// In the order in which they will be served; those that are put off come last.
    pub waiters: Vec<WaiterView>,
    /// When the turn of a holder ends, if somebody waits for it.
    pub next: Option<Time>,
    /// Those who run at the same moment push each other's memory off it.
    pub thrashes: bool,
    /// They did, and take turns for a while, whoever they are.
    pub serialized: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HolderView {
    pub client: ClientId,
    pub since: Time,
    pub state: LockState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaiterView {
    pub client: ClientId,
    pub since: Time,
    /// Why it is not in line, where that is so.
    pub blocked: Option<WaitReason>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientView {
    pub client: ClientId,
    /// The others of its gang.
    pub gang_peers: Vec<ClientId>,
    /// GPUs that it was given, where it did not choose.
    pub placed: Vec<GpuId>,
    pub stopped: bool,
    pub attachments: Vec<AttachmentView>,
}

/// A client on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttachmentView {
    pub gpu: GpuId,
    pub engine: Engine,
    /// Whether it was told that it may create its context.
    pub attached: bool,
    pub state: LockState,
    pub demand: u64,
    /// The newest limit of its demand.
    pub limit: u64,
    /// The limit that an allocation of it waits for, until others have freed enough.
    pub pending_limit: Option<u64>,
    /// The most that its demand can be now, messages under way included.
    pub committed: u64,
    /// Bytes that it may have mapped.
    pub allowance: u64,
    /// The most that it can have mapped now, messages under way included.
    pub charge: u64,
    pub mapped: u64,
    pub swapped: u64,
    pub pinned: u64,
    /// Bytes of those that it says have left, and that were measured to be there.
    pub unfreed: u64,
    /// Bytes besides that it says have left, and that may be there.
    pub unverified: u64,
    /// What it reports to have mapped, or pinned, if that is more than is believed.
    pub disbelieved: Option<u64>,
    /// Grants in a row that ended because the driver had no room for what it was allowed.
    pub failures: u32,
    /// Why nothing of it can leave; `EvictionBlock::Unfreed`: not all of it.
    pub eviction_blocked: Option<EvictionBlock>,
    /// How full it keeps the GPU, in thousandths, if that is known.
    pub utilization: Option<u32>,
    /// How often it was granted the lock, how long it held it and waited for it in all, the present included.
    pub grants: u64,
    pub lock_time: Duration,
    pub wait_time: Duration,
}

/// How a client has fared with the lock of one GPU, for as long as it has been attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Turns {
    pub grants: u64,
    /// The present turn included.
    pub lock_time: Duration,
    /// Of waits that ended with a grant.
    pub wait_time: Duration,
    /// For how long it has been waiting, if it is.
    pub waits: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    Idle,
    Waiting,
    Holding,
    /// Was asked for the lock and has not released it yet.
    Revoking,
    /// The same, and it said that it cannot.
    Stuck,
    /// The same for so long that others are admitted beside it.
    Undrainable,
    /// Was asked for the lock, and its process is stopped: it is counted as no holder.
    Suspended,
}

impl Machine {
    /// Bytes of host memory that promises may count on, if that is bounded; and what they count on.
    pub fn host(&self) -> (Option<u64>, u64) {
        self.quota.host()
    }

    /// Whether there is too little of it to promise everybody a whole GPU.
    pub fn is_host_scarce(&self) -> bool {
        self.quota.is_host_scarce()
    }

    pub fn gpus(&self) -> Vec<GpuView> {
        self.memory.keys().filter_map(|id| self.gpu(*id)).collect()
    }

    pub fn clients(&self) -> Vec<ClientView> {
        self.clients.keys().filter_map(|id| self.client(*id)).collect()
    }

    pub fn gpu(&self, id: GpuId) -> Option<GpuView> {
        let gpu = self.memory.get(&id)?;
        let holders = self.lock.holds_on(id).map(|(client, hold)| HolderView {
            client,
            since: hold.since,
            state: self.state(client, id),
        });
        let blocked = self.lock.requests().filter(|(_, r)| r.blocked.is_some()).map(|(entity, _)| entity);
        let entities = self.lock.queue(id).map(|(_, entity)| entity).chain(blocked);
        let mut waiters = Vec::new();
        for request in entities.filter_map(|entity| self.lock.request(entity)) {
            let blocked = request.blocked.map(|why| match why {
                Blocked::Pinned(_) => WaitReason::Pinned,
                Blocked::Undrained => WaitReason::HolderStuck,
                Blocked::Until(_) | Blocked::Stopped | Blocked::Behind(_) => WaitReason::Queue,
            });
            for (client, _) in request.wants.iter().filter(|(_, gpus)| gpus.contains(&id)) {
                let since = request.since.get(client).copied().unwrap_or_default();
                waiters.push(WaiterView { client: *client, since, blocked });
            }
        }
        Some(GpuView {
            gpu: id,
            total: gpu.total,
            capacity: gpu.capacity(&self.settings),
            trial: gpu.trial.map_or(0, |trial| trial.beyond),
            overhead: gpu.overhead(&self.settings),
            shortfall: gpu.clients.keys().map(|client| self.shortfall(*client, id)).max().unwrap_or(0),
            charged: gpu.ledger.charged(),
            committed: self.quota.committed(id),
            holders: holders.collect(),
            waiters,
            next: self.effects.wakes_at(crate::timers::Wake::Gpu(id)),
            thrashes: self.thrashes(id),
            serialized: self.settings.anti_thrash == AntiThrash::Auto && self.keeps_apart(id),
        })
    }

    pub fn client(&self, id: ClientId) -> Option<ClientView> {
        let client = self.clients.get(&id)?;
        let waiting = self.lock.waiting(id).and_then(|entity| self.lock.request(entity));
        let attachments = self.lock.all_of(id).filter_map(|(gpu, lock)| {
            let (memory, account) = (self.memory_of(id, gpu)?, self.account(id, gpu)?);
            let (limit, history) = (self.quota.limit(id, gpu)?, self.histories.of(id, gpu)?);
            let present = account.frees.present();
            let wants = waiting.and_then(|r| r.wants.get(&id)).is_some_and(|gpus| gpus.contains(&gpu));
            let since = waiting.and_then(|r| r.since.get(&id)).copied().unwrap_or(self.now);
            let waits = if wants { self.now.saturating_sub(since) } else { Duration::ZERO };
            let holds = lock.hold.as_ref().map_or(Duration::ZERO, |h| self.now.saturating_sub(h.since));
            Some(AttachmentView {
                gpu,
                engine: memory.engine,
                attached: memory.attached.is_some(),
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
                failures: memory.failures.in_a_row,
                eviction_blocked: self.eviction_block(id, gpu).or((present > 0).then_some(EvictionBlock::Unfreed)),
                utilization: history.utilization.permille(),
                grants: lock.grants,
                lock_time: lock.lock_time + holds,
                wait_time: lock.wait_time + waits,
            })
        });
        Some(ClientView {
            client: id,
            gang_peers: self.lock.gang_peers(id).collect(),
            placed: self.places.of(id),
            stopped: client.stopped,
            attachments: attachments.collect(),
        })
    }

    /// How a client's memory can leave a GPU that it has attached.
    pub fn engine(&self, id: ClientId, gpu: GpuId) -> Option<Engine> {
        Some(self.memory_of(id, gpu)?.engine)
    }

    /// The fewest and the most bytes that a client can have mapped on a GPU at this moment.
    pub fn extent(&self, id: ClientId, gpu: GpuId) -> Option<(u64, u64)> {
        let ignored = self.memory.get(&gpu).map_or(0, GpuMemory::ignored_unverified);
        Some(self.account(id, gpu)?.extent(ignored))
    }

    /// At a time that is not before the newest event's.
    pub fn turns(&self, id: ClientId, gpu: GpuId, now: Time) -> Option<Turns> {
        let lock = self.lock.of(id, gpu)?;
        let request = self.lock.waiting(id).and_then(|entity| self.lock.request(entity));
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

    /// Whether anybody has the lock of a GPU.
    pub fn is_held(&self, gpu: GpuId) -> bool {
        self.lock.is_held(gpu)
    }

    fn state(&self, client: ClientId, id: GpuId) -> LockState {
        match self.lock.hold(client, id) {
            Some(hold) if hold.suspended => LockState::Suspended,
            Some(hold) if hold.revoked.is_none() => LockState::Holding,
            Some(hold) if hold.undrainable => LockState::Undrainable,
            Some(hold) if hold.stuck => LockState::Stuck,
            Some(_) => LockState::Revoking,
            None if self.lock.waits_for(client, id) => LockState::Waiting,
            None => LockState::Idle,
        }
    }
}
