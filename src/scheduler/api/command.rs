//! Commands: messages to send, measurements to make, and changes to log.

use super::*;

/// Why a request for memory is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Denial {
    /// Neither the GPU nor host memory has room for the allocation.
    NoRoom,
    /// The group's `memory-max` would be exceeded.
    MemoryMax,
    /// The group's `swap-max` would be exceeded.
    SwapMax,
    /// A limit from the client's own environment would be exceeded.
    EnvLimit,
    /// The client's context and the memory of another client do not fit on the GPU together.
    NoContext,
    /// The driver repeatedly failed to map the client's demand, although no other client has memory
    /// on the GPU.
    Unmappable,
}

/// Why a client's memory cannot be evicted from a GPU at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionBlock {
    /// Host memory has no room for the evicted bytes: the client reported
    /// [`StuckReason::HostFull`].
    HostFull,
    /// The client's contexts no longer work: the client reported [`StuckReason::Broken`].
    Broken,
    /// The client's library did not see all of the client's running work: the client reported
    /// [`StuckReason::UnseenWork`].
    UnseenWork,
    /// The client has made no progress with an eviction for several seconds.
    Late,
    /// The client's process is stopped.
    Stopped,
    /// Another program has locked or checkpointed the client's process.
    Foreign,
    /// The client was revoked and cannot drain.
    Undrainable,
    /// Measurements still show memory that the client reported as freed. The client's other memory
    /// is evictable.
    Unfreed,
}

/// Why a room ([`RoomId`]) cannot be kept free. Amounts are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoomObstacle {
    /// Even if all clients' memory were evicted, at most `most` bytes could be kept free.
    TooLarge { most: u64 },
    /// Unevictable memory occupies `bytes` bytes of the room.
    Unevictable { bytes: u64 },
    /// Memory was not evicted in time.
    Late,
    /// The GPU is gone.
    Gone,
}

/// A command to the daemon. The daemon sends most commands to `client` as messages of the wire
/// protocol. The daemon itself carries out `Probe`, `Measure` and `Checkpoint`. Some commands only
/// record a change for the log.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Command {
    /// Answers [`Event::PlacementRequested`]: the client must run on these GPUs, and see them in
    /// this order.
    Placed { client: ClientId, gpus: Vec<GpuId> },
    /// Answers [`Event::PlacementRequested`]: the client may run on no GPU.
    Unplaced { client: ClientId, why: PlacementError },
    /// Answers [`Event::Attached`]: the client may create its context now, because there is room
    /// for it. A `Limit` follows.
    Attached { client: ClientId, gpu: GpuId },
    /// `bytes` is the highest demand that the client may reach on this GPU. Sent after `Attached`,
    /// whenever the limit changes, and in answer to [`Event::LimitRequested`]. The client
    /// acknowledges the limit by `limit_ack` of a later report. Until then, the scheduler counts a
    /// lowered limit at its old value. `seq` counts up from 1 for each client and GPU. `most` is
    /// the highest value that the limit could reach if unmeasured contexts took no memory. `spare`
    /// is the number of bytes of empty host memory that the client may keep. `max` is the lowest
    /// limit that rules and the client's environment set.
    Limit { client: ClientId, gpu: GpuId, bytes: u64, seq: u32, most: u64, spare: u64, max: Option<u64> },
    /// Denies the limit of [`Event::LimitRequested`]. With 0 bytes, denies the context of
    /// [`Event::Attached`]. With [`Denial::Unmappable`], denies the demand that the driver
    /// repeatedly failed to map. The waiting calls in the client fail.
    Denied { client: ClientId, gpu: GpuId, bytes: u64, why: Denial },
    /// Answers [`Event::ReservationRequested`]: `bytes` are free and are kept for the client for
    /// 500 ms. `bytes` may be less than requested.
    Reserved { client: ClientId, gpu: GpuId, bytes: u64 },
    /// The number of bytes that the client may have mapped on this GPU from now on. Sent whenever
    /// the number changes. A client with more mapped memory evicts the excess, then acknowledges
    /// `seq` by `ack` of a report. `seq` counts up from 1 for each client and GPU.
    Allowance { client: ClientId, gpu: GpuId, seq: u32, bytes: u64 },
    /// The client holds the lock of these GPUs from now on. Answers [`Event::Requested`] as soon as
    /// all of these GPUs admit the client and the client's allowances cover its memory there.
    Grant { client: ClientId, gpus: GpuSet },
    /// The holder must drain and release these GPUs. The holder answers with [`Event::Released`]. A
    /// holder that answers with [`Event::Stuck`] is asked again later.
    Revoke { client: ClientId, gpus: GpuSet },
    /// About `bytes` of the client's memory must be evicted after its turn, or may have to be
    /// evicted when another client arrives. The client may allocate host memory for these bytes
    /// now.
    Prepare { client: ClientId, gpu: GpuId, bytes: u64 },
    /// Sent to a holder: `waiters` requests wait for these GPUs. A holder that has been idle for
    /// `grace` must release the lock. With 0 waiters, no request waits any more, and the holder may
    /// stay idle.
    Contended { client: ClientId, gpus: GpuSet, waiters: u32, grace: Duration },
    /// The reason why the client still waits for these GPUs, for the client's debug log. Sent when
    /// the reason changes.
    Waiting { client: ClientId, gpus: GpuSet, why: WaitReason },
    /// The client has not answered a revoke or an eviction in time. The daemon must determine
    /// whether the client's process is stopped, and answer with [`Event::Stopped`].
    Probe { client: ClientId },
    /// The daemon must measure the memory in use on the GPU, and answer with
    /// [`Event::GpuOverhead`], then [`Event::Measured`]. Sent when a decision depends on memory
    /// that a client reports as mapped or freed, or when a mapping failed.
    Measure { gpu: GpuId },
    /// For the log: from now on the client's memory on the GPU is not evictable, so other clients
    /// must evict memory instead.
    EvictionBlocked { client: ClientId, gpu: GpuId, why: EvictionBlock },
    /// For the log: a client released the GPU because the driver had no room for `bytes` that the
    /// client was allowed to map. This was failure number `failures` in a row.
    MappingFailed { client: ClientId, gpu: GpuId, bytes: u64, failures: u32 },
    /// For the log: this holder cannot drain. From now on other clients are admitted beside it.
    Undrainable { client: ClientId, gpus: GpuSet },

    /// The client must evict all memory, and not enter the driver again until `Awake`. The client
    /// answers with [`Event::SleepReady`] or [`Event::SleepRefused`]. If `paused`, the client must
    /// not refuse because threads are waiting.
    PrepareSleep { client: ClientId, paused: bool },
    /// The client has returned to its GPUs, or never left them. `moved` lists the client's moves,
    /// each from the GPU that the client knows to the current GPU.
    Awake { client: ClientId, moved: Vec<Move> },
    /// The daemon must have the checkpoint helper perform `operation` on the client's process, and
    /// answer with [`Event::Checkpointed`] in bounded time, even if the helper fails. If the
    /// process wakes on other GPUs than before, `moves` lists the old and the new GPUs.
    Checkpoint { client: ClientId, operation: SleepOperation, moves: Vec<Move> },
    /// Answers [`Event::RestoreRequested`]: the room for the restore of the client's process is free,
    /// and stays free until the next [`Event::ForeignCheckpoint`] of the client.
    RestoreAllowed { client: ClientId },
    /// All records of the client on GPU `from`, including its requests, are on GPU `to` from now
    /// on. This and all later commands and events refer to `to`. The client is asleep; `Awake` will
    /// tell the client about the new GPU.
    Moved { client: ClientId, from: GpuId, to: GpuId },
    /// Answers [`Event::Migrate`], or reports the outcome of a move off a drained GPU. Without
    /// `why`, the client is on the other GPU; with `why`, it is not moved. A client that stays
    /// asleep may later prove unable to run on the other GPU. It then returns to the original GPU.
    Migrated { client: ClientId, from: GpuId, to: GpuId, why: Option<MoveObstacle> },
    /// Answers [`Event::RoomRequested`]: the bytes are free and stay free.
    RoomReady { room: RoomId, gpu: GpuId },
    /// Answers [`Event::RoomRequested`]: the room is impossible. If the room already existed, it
    /// has ended.
    RoomRefused { room: RoomId, gpu: GpuId, why: RoomObstacle },
    /// A room that was ready has expired, or its GPU is gone.
    RoomEnded { room: RoomId, gpu: GpuId },
}

impl Command {
    /// The client that the command concerns.
    pub fn client(&self) -> Option<ClientId> {
        match self {
            Self::Placed { client, .. }
            | Self::Unplaced { client, .. }
            | Self::Attached { client, .. }
            | Self::Limit { client, .. }
            | Self::Denied { client, .. }
            | Self::Reserved { client, .. }
            | Self::Allowance { client, .. }
            | Self::Grant { client, .. }
            | Self::Revoke { client, .. }
            | Self::Prepare { client, .. }
            | Self::Contended { client, .. }
            | Self::Waiting { client, .. }
            | Self::Probe { client, .. }
            | Self::EvictionBlocked { client, .. }
            | Self::MappingFailed { client, .. }
            | Self::Undrainable { client, .. }
            | Self::PrepareSleep { client, .. }
            | Self::Awake { client, .. }
            | Self::Checkpoint { client, .. }
            | Self::RestoreAllowed { client }
            | Self::Moved { client, .. }
            | Self::Migrated { client, .. } => Some(*client),
            Self::Measure { .. } | Self::RoomReady { .. } | Self::RoomRefused { .. } | Self::RoomEnded { .. } => None,
        }
    }
}
