//! Events: reports from clients, measurements by the daemon, and changes by administrators.

use super::*;
use std::collections::BTreeMap;

/// A client's report of its memory on one GPU, in bytes. See `nvshare_wire::ClientMessage::Memory`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryReport {
    /// The `seq` of the newest [`Command::Allowance`] that the client carried out; 0 before the
    /// first.
    pub ack: u32,
    /// Bytes that the client needs on the GPU to run, including pinned bytes.
    pub demand: u64,
    /// Bytes on the GPU, including pinned bytes.
    pub mapped: u64,
    /// Bytes whose contents are in host memory.
    pub swapped: u64,
    /// Bytes of `mapped` that no engine can move.
    pub pinned: u64,
    /// The `seq` of the newest [`Command::Limit`] that the client applied; 0 before the first.
    pub limit_ack: u32,
}

/// The measured range of the bytes that a client has mapped on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Found {
    pub least: u64,
    pub most: u64,
}

/// An input of the machine: from the daemon itself, from a measurement, or from a client's message
/// (`nvshare_wire::ClientMessage`).
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Event {
    /// From the daemon: the time of `Machine::deadline` has come. Every event handles due wake-ups;
    /// `Tick` does nothing else.
    Tick,
    /// From the daemon, when an administrator changes a setting. Replaces all settings, and
    /// reorders the queues if the policy or the period changed.
    Configure(Settings),

    /// From the daemon: NVML or the first client that attaches the GPU reports that the GPU exists
    /// and has `total` bytes. If the GPU is already known, only `total` changes. A GPU that was
    /// gone is available again.
    GpuFound { gpu: GpuId, total: u64 },
    /// From the daemon: the GPU can no longer run any work. No program is placed on the GPU. Its
    /// clients no longer wait for lock holders or memory, so that the driver's error reaches all of
    /// them. The GPU is forgotten once its last client has detached.
    GpuGone { gpu: GpuId },
    /// From the daemon: the host is about to suspend (`suspended`) or has resumed. Between the two
    /// events no client runs, and all evictable memory is evicted; see `Machine::is_evacuated`.
    Suspend { suspended: bool },
    /// From the daemon, once NVML reports the GPU's link: `rate`, in bytes per second, is the
    /// highest copy rate between the GPU and the host in each direction.
    GpuLink { gpu: GpuId, rate: u64 },
    /// From the daemon, periodically and after `Command::Measure`. `bytes` is the GPU memory in use
    /// apart from clients' mapped memory, measured no earlier than `begun`. `bytes` includes the
    /// memory of other programs, and the contexts of clients that had a context by then
    /// (`Machine::has_context`). `Settings::context` is set aside for every other context. `others`
    /// is the part of `bytes` in use by other programs. If `others` grows, more memory is kept free
    /// for those programs. `complete` is false if the measurement left out processes that may be
    /// clients of the previous scheduler and about to reconnect. Until a complete measurement
    /// arrives, no client is told that there is room for its context.
    GpuOverhead { gpu: GpuId, begun: Time, bytes: u64, others: u64, complete: bool },
    /// From the daemon, after `GpuOverhead` of the same measurement. `found` lists the memory of
    /// each client on the GPU without its context; clients missing from `found` could not be
    /// measured. `free` is the GPU's free memory in bytes, or `None` if unknown. `evicted` is the
    /// number of bytes in use that the driver gives to plain allocations: managed memory that clients
    /// have evicted. Restores do not count on these bytes. All were measured no earlier than `begun`.
    /// The measurement confirms or refutes clients' reports, and answers requests that were waiting
    /// for a measurement.
    Measured { gpu: GpuId, begun: Time, free: Option<u64>, evicted: u64, found: BTreeMap<ClientId, Found> },
    /// From the daemon: the measured sizes of clients' contexts on a GPU. A context's measured size
    /// counts towards limits. Until a size is measured, `Settings::context` counts instead.
    ContextSizes { gpu: GpuId, bytes: BTreeMap<ClientId, u64> },
    /// From the daemon: the limits on all GPUs together may rely on `bytes` of host memory. Before
    /// the first such event, host memory counts as unbounded.
    HostMemory { bytes: u64 },
    /// From the daemon: all clients together may allocate `bytes` of host memory ahead, for memory
    /// that is still on a GPU. An eviction of that memory then starts without delay. Before the
    /// first such event, clients allocate nothing ahead. `None`: the host is short of memory, and
    /// clients return unused host memory.
    HostAhead { bytes: Option<u64> },

    /// A client connected and was identified. Clients with the same nonzero `gang` are granted and
    /// revoked together.
    Connected { client: ClientId, gang: u64, tenant: TenantId },
    /// From the daemon: the client belongs to another gang from now on, or to none (0). Members of
    /// the gang of a rule stay in that gang.
    GangChanged { client: ClientId, gang: u64 },
    /// From the daemon, when a client connects or rules change: the group of each of these clients,
    /// or `None`. A group's limits apply to all of its members.
    Groups { groups: BTreeMap<ClientId, Option<Group>> },
    /// From the client, before it attaches: the limits that its environment sets. Replaces earlier
    /// limits.
    EnvLimits { client: ClientId, limits: EnvLimits },
    /// From the daemon: these clients' labels, which restrict their neighbours on a GPU.
    Labels { labels: BTreeMap<ClientId, Labels> },
    /// From the client, before it initialises CUDA: asks which GPUs to run on. Answered by
    /// `Command::Placed` or `Command::Unplaced`.
    PlacementRequested { client: ClientId, request: PlacementRequest },
    /// From the daemon: `client` takes over the placement that `from` requested for it
    /// (`PlacementRequest::ahead`). `from` has disconnected.
    PlacementTaken { client: ClientId, from: ClientId },
    /// The client's connection closed or its process died. The client loses its locks, memory and
    /// requests on all GPUs.
    Disconnected { client: ClientId },
    /// From the client: it is about to create its first context on a GPU that an earlier `GpuFound`
    /// announced, and waits for permission. Answered by `Command::Attached`, or by
    /// `Command::Denied` with 0 bytes. A repeated request is answered again.
    Attached { client: ClientId, gpu: GpuId, engine: Engine },
    /// From the client: its last context on the GPU is gone. The client loses its memory, lock and
    /// requests on that GPU.
    Detached { client: ClientId, gpu: GpuId },

    /// From the client, whenever its memory changes or it has carried out an allowance. Replaces
    /// the client's previous report.
    Memory { client: ClientId, gpu: GpuId, report: MemoryReport },
    /// From the client: an allocation needs a limit of `bytes`. Answered by a `Command::Limit` of
    /// at least `bytes`, or by `Command::Denied`. The answer may wait for a measurement. If a rule
    /// says so, the answer may also wait until other clients have freed memory.
    LimitRequested { client: ClientId, gpu: GpuId, bytes: u64 },
    /// From the client: the driver found no room for `bytes` of its own data, such as code or
    /// stacks. Answered by `Command::Reserved` within 2 s.
    ReservationRequested { client: ClientId, gpu: GpuId, bytes: u64 },
    /// From a holder: the part of the time, in thousandths, in which the GPU had not completed all
    /// of the client's submitted work. A value above 1100 means that the client wants no other
    /// client beside it.
    Utilization { client: ClientId, gpu: GpuId, permille: u32 },
    /// From the client: it wants the locks of all of `gpus` at the same time. The client has
    /// attached all of `gpus`. Replaces a request that is still waiting. Answered by
    /// `Command::Grant`; `Command::Waiting` is sent until then.
    Requested { client: ClientId, gpus: GpuSet },
    /// From the client, which is waiting for the lock of these GPUs: it no longer wants that lock.
    Cancelled { client: ClientId, gpus: GpuSet },
    /// From a holder: it releases the lock of these GPUs, and none of its work runs there any more.
    /// `busy` is the time in which the GPUs had work of this client during the turn. Sent in answer
    /// to `Command::Revoke`, or because the client is idle or the driver had no room for
    /// the client's memory.
    Released { client: ClientId, gpus: GpuSet, reason: ReleaseReason, busy: Duration },
    /// From the client, after the scheduler restarted: it holds the lock of these GPUs, which the
    /// previous scheduler granted. The client's turn starts anew.
    Held { client: ClientId, gpus: GpuSet },
    /// From a revoked holder that cannot drain yet. The holder keeps the lock and is asked again
    /// later. `HostFull`, `Broken` and `UnseenWork` mean that the holder cannot evict;
    /// `UntrackedWork` and `OtherDevice` only explain pinned memory.
    Stuck { client: ClientId, gpus: GpuSet, reason: StuckReason },
    /// From the daemon: the kernel reports that the client's process is stopped (SIGSTOP, a
    /// debugger) or runs again. Answers `Command::Probe`.
    Stopped { client: ClientId, stopped: bool },

    /// From the daemon: whether programs that are not clients use the GPU, or may be using it.
    /// Until the first such event, the scheduler assumes that they do.
    OtherPrograms { gpu: GpuId, present: bool },

    /// From the daemon: `bytes` of the GPU must be freed immediately, and kept free for programs
    /// that are not clients. The room lasts until `until` or [`Event::RoomClosed`]. Memory that
    /// these programs allocate during the room counts towards `bytes`. A repeated event for the
    /// same room and GPU replaces the earlier event. Answered by `Command::RoomReady` or
    /// `Command::RoomRefused` within 10 s.
    RoomRequested { room: RoomId, gpu: GpuId, bytes: u64, until: Time },
    /// From the daemon: the room is no longer needed. No effect on a room that has already ended.
    RoomClosed { room: RoomId },

    /// From the daemon: the client should leave its GPUs, contexts included, if it can. The client
    /// stays off its GPUs until one of its threads calls the driver, or, if `paused`, until
    /// `Resumed`. A paused client does not run even if it cannot sleep.
    SleepWanted { client: ClientId, paused: bool },
    /// From the daemon: a client that has just connected reports that an earlier scheduler told it
    /// to sleep. The checkpoint helper determines whether the client is off its GPUs. The client
    /// stays asleep until one of its threads calls the driver.
    FoundAsleep { client: ClientId },
    /// From the daemon: the client should run again. A move is abandoned if the client is not yet
    /// asleep for it.
    Resumed { client: ClientId },
    /// From the daemon: the client should move from one GPU to another of the same kind. The client
    /// is put to sleep, regardless of its work, and wakes on the other GPU. A client that already
    /// sleeps is moved immediately and stays asleep. Answered by `Command::Migrated` unless the
    /// client disconnects.
    Migrate { client: ClientId, from: GpuId, to: GpuId },
    /// From the daemon: the GPU should become empty (`drained`), or its drain ends. While the GPU
    /// is drained, clients that request a context there wait. A client that has a context there
    /// moves, as with `Migrate`, to another permitted GPU of the same kind with enough room. If no
    /// such GPU exists, the client sleeps until the drain ends. If neither a move nor sleep is
    /// possible, the client keeps running, and is asked again from time to time.
    Drain { gpu: GpuId, drained: bool },
    /// From the daemon: whether the GPU reports errors after which it should not be used. Programs
    /// are placed on a failing GPU only if too few other GPUs are permitted.
    Failing { gpu: GpuId, failing: bool },
    /// From the daemon: the sets of GPUs within which clients can be moved. Replaces the earlier
    /// sets. Until the first such event, no program moves off a drained GPU.
    Kinds { kinds: Vec<GpuSet> },
    /// From the daemon: the GPUs that rules and environments permit for these clients. `None`: all
    /// GPUs.
    Allowed { allowed: BTreeMap<ClientId, Option<GpuSet>> },
    /// From the client: it has evicted its memory, and does not enter the driver until
    /// `Command::Awake`. Answers `Command::PrepareSleep`.
    SleepReady { client: ClientId },
    /// From the client: it refuses to sleep. Answers `Command::PrepareSleep`.
    SleepRefused { client: ClientId, why: SleepObstacle },
    /// From the client: one of its threads is waiting to enter the driver.
    WakeRequested { client: ClientId },
    /// From the daemon: the state in which the checkpoint helper left the client's process. Answers
    /// `Command::Checkpoint`.
    Checkpointed { client: ClientId, outcome: SleepOutcome },
    /// From the daemon: the present state of the client's process, which a program other than the
    /// checkpoint helper may have changed. Has no effect while the helper has the process. A pending
    /// [`Event::RestoreRequested`] ends.
    ForeignCheckpoint { client: ClientId, state: ForeignState },
    /// From the daemon: a program that runs under the library waits for permission to restore the
    /// client's process. Answered by `Command::RestoreAllowed`, as soon as the client's GPUs have
    /// room.
    RestoreRequested { client: ClientId },
}

impl Event {
    /// The client whose message this event is. The message proves that the client's process runs.
    pub fn sender(&self) -> Option<ClientId> {
        match self {
            Self::Attached { client, .. }
            | Self::Detached { client, .. }
            | Self::Memory { client, .. }
            | Self::LimitRequested { client, .. }
            | Self::ReservationRequested { client, .. }
            | Self::Utilization { client, .. }
            | Self::Requested { client, .. }
            | Self::Cancelled { client, .. }
            | Self::Released { client, .. }
            | Self::Held { client, .. }
            | Self::Stuck { client, .. }
            | Self::SleepReady { client }
            | Self::SleepRefused { client, .. }
            | Self::WakeRequested { client } => Some(*client),
            _ => None,
        }
    }
}
