//! Types for status and metrics. `machine::view` makes them from the state.

use crate::{api::*, model::Model};
use std::time::Duration;

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
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum LockState {
    /// The client neither holds the lock nor waits for it.
    #[default]
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

impl Model<'_> {
    /// A client's state with respect to the lock of a GPU.
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
