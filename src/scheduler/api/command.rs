//! Commands: messages to send, measurements to make, and changes to log.

use super::*;

/// Why a request for memory is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Denial {
    /// Neither the GPU nor host memory has room for it.
    NoRoom,
    /// The group's `memory-max` would be exceeded.
    MemoryMax,
    /// The group's `swap-max` would be exceeded.
    SwapMax,
    /// A limit from the client's own environment would be exceeded.
    EnvLimit,
    /// The client's context and the memory of another client do not fit on the GPU together.
    NoContext,
    /// The driver repeatedly failed to map the client's demand, although no other client has memory on the GPU.
    Unmappable,
}

/// Why a client's memory cannot be evicted from a GPU at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionBlock {
    /// Host memory has no room for it: the client reported [`StuckReason::HostFull`].
    HostFull,
    /// The client's contexts no longer work: it reported [`StuckReason::Broken`].
    Broken,
    /// Work runs that the client has not seen: it reported [`StuckReason::UnseenWork`].
    UnseenWork,
    /// The client has made no progress with an eviction for several seconds.
    Late,
    /// The client's process is stopped.
    Stopped,
    /// The client was revoked and cannot drain.
    Undrainable,
    /// Measurements still show memory that the client reported as freed. The client's other memory can be evicted.
    Unfreed,
}

/// Why a room is impossible. Amounts are bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RoomObstacle {
    /// At most `most` bytes could be kept free, even if all memory of clients were evicted.
    TooLarge { most: u64 },
    /// Unevictable memory takes `bytes` bytes of the room.
    Unevictable { bytes: u64 },
    /// Memory that was to be evicted has not been evicted in time.
    Late,
    /// The GPU is gone.
    Gone,
}

/// A command to the daemon. The daemon sends most of them to `client` as messages of the wire protocol; `Probe`,
/// `Measure` and `Checkpoint` ask the daemon itself; some only record a change for the log.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Command {
    /// Answers [`Event::PlacementRequested`]: the client is to run on these GPUs, and to see them in this order.
    Placed { client: ClientId, gpus: Vec<GpuId> },
    /// Answers [`Event::PlacementRequested`]: the client may run on no GPU.
    Unplaced { client: ClientId, why: PlacementError },
    /// Answers [`Event::Attached`]: there is room for the client's context, and it may be created now. A `Limit`
    /// follows.
    Attached { client: ClientId, gpu: GpuId },
    /// The highest demand that the client may reach on this GPU, `bytes`: sent after `Attached`, whenever the limit
    /// changes, and in answer to [`Event::LimitRequested`]. The client acknowledges it by `limit_ack` of a later
    /// report; until then a lowered limit counts as before. `seq` counts up from 1 for each client and GPU. `most` is
    /// the highest value that the limit can take once all contexts are measured, `spare` the bytes of empty host memory
    /// that the client may keep, and `max` the lowest limit that rules and the client's environment set.
    Limit { client: ClientId, gpu: GpuId, bytes: u64, seq: u32, most: u64, spare: u64, max: Option<u64> },
    /// Denies the limit of [`Event::LimitRequested`]; with 0 bytes, the context of [`Event::Attached`]; with
    /// [`Denial::Unmappable`], the demand that the driver repeatedly failed to map. Whatever waits for it in the client
    /// fails.
    Denied { client: ClientId, gpu: GpuId, bytes: u64, why: Denial },
    /// Answers [`Event::ReservationRequested`]: `bytes` are free and kept for the client for 500 ms. They may be fewer
    /// than it asked for.
    Reserved { client: ClientId, gpu: GpuId, bytes: u64 },
    /// The bytes that the client may have mapped on this GPU from now on. Sent whenever that number changes. A client
    /// with more mapped memory evicts the excess, then acknowledges `seq` by `ack` of a report. `seq` counts up from 1
    /// for each client and GPU.
    Allowance { client: ClientId, gpu: GpuId, seq: u32, bytes: u64 },
    /// The client holds the lock of these GPUs from now on. Answers [`Event::Requested`], once all of them are free for
    /// it and its memory is allowed there.
    Grant { client: ClientId, gpus: GpuSet },
    /// The holder is to drain and release these GPUs. It answers with [`Event::Released`], or with [`Event::Stuck`] and
    /// is then asked again later.
    Revoke { client: ClientId, gpus: GpuSet },
    /// About `bytes` of the client's memory will have to be evicted when its turn is over, or may have to be when
    /// another client arrives. It may allocate host memory for them now.
    Prepare { client: ClientId, gpu: GpuId, bytes: u64 },
    /// To a holder: `waiters` requests wait for these GPUs, so it is to release the lock once it has been idle for
    /// `grace`. 0 waiters: no request is waiting any more, and the holder may stay idle.
    Contended { client: ClientId, gpus: GpuSet, waiters: u32, grace: Duration },
    /// The reason why the client still waits for these GPUs, for its debug log. Sent when the reason changes.
    Waiting {
        client: ClientId,
        gpus: GpuSet,
        #[serde(with = "crate::encoding::WaitReason")]
        why: WaitReason,
    },
    /// The client has not answered a revoke or an eviction in time: the daemon is to determine whether its process is
    /// stopped, and to answer with [`Event::Stopped`].
    Probe { client: ClientId },
    /// The daemon is to measure memory in use on the GPU and to answer with [`Event::GpuOverhead`], then
    /// [`Event::Measured`]. Sent when a decision depends on memory that a client reports to have or to have freed, or
    /// when a mapping failed.
    Measure { gpu: GpuId },
    /// For the log: the client's memory cannot be evicted from the GPU from now on, so other clients are asked for
    /// theirs.
    EvictionBlocked { client: ClientId, gpu: GpuId, why: EvictionBlock },
    /// For the log: a client released the GPU because the driver had no room for `bytes` that it was allowed to map,
    /// for the `failures`-th time in a row.
    MappingFailed { client: ClientId, gpu: GpuId, bytes: u64, failures: u32 },
    /// For the log: this holder cannot drain. From now on other clients are admitted beside it.
    Undrainable { client: ClientId, gpus: GpuSet },

    /// The client is to evict all memory, and to enter the driver no more until `Awake`. It answers with
    /// [`Event::SleepReady`] or [`Event::SleepRefused`].
    /// `paused`: threads of it that wait are no reason to refuse.
    PrepareSleep { client: ClientId, paused: bool },
    /// The client is on its GPUs, or stays there. `moved`: for each GPU that has changed, the GPU that the client knows
    /// and the present GPU.
    Awake { client: ClientId, moved: Vec<Move> },
    /// The daemon must have the checkpoint helper do this with the client's process, and answer with
    /// [`Event::Checkpointed`] in bounded time, even if the helper fails.
    /// `moves`: if a wake is on other GPUs than before, the old and the new GPU of each.
    Checkpoint { client: ClientId, operation: SleepOperation, moves: Vec<Move> },
    /// All records of the client on GPU `from`, including its requests, are on GPU `to` from now on: this and all later
    /// commands and events mean `to`. The client is asleep; `Awake` will notify it.
    Moved { client: ClientId, from: GpuId, to: GpuId },
    /// Answers [`Event::Migrate`], or reports the outcome of a move off a drained GPU: the client is on the other GPU,
    /// or (`why`) is not moved there. A client that stays asleep may still turn out to be unable to run there; it then
    /// comes back where it was.
    Migrated { client: ClientId, from: GpuId, to: GpuId, why: Option<MoveObstacle> },
    /// Answers [`Event::RoomRequested`]: the bytes are free, and stay so.
    RoomReady { room: RoomId, gpu: GpuId },
    /// Answers [`Event::RoomRequested`]: the room cannot be made. If it existed before, it has ended.
    RoomRefused { room: RoomId, gpu: GpuId, why: RoomObstacle },
    /// The time of a room that was ready is over, or its GPU is gone.
    RoomEnded { room: RoomId, gpu: GpuId },
}
