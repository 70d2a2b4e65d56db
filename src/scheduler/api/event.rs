//! Events: what clients report, the daemon measures, and administrators change.

use super::*;
use std::collections::BTreeMap;

/// A client's report of its memory on one GPU, in bytes. See `nvshare_wire::ClientMessage::Memory`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryReport {
    /// The `seq` of the newest [`Command::Allowance`] that was carried out; 0 before the first.
    pub ack: u32,
    /// Bytes that the client needs on the GPU in order to run, pinned bytes included.
    pub demand: u64,
    /// Bytes on the GPU, pinned bytes included.
    pub mapped: u64,
    /// Bytes whose contents are in host memory.
    pub swapped: u64,
    /// Bytes of `mapped` that no engine can move.
    pub pinned: u64,
    /// The `seq` of the newest [`Command::Limit`] that was in effect; 0 before the first.
    pub limit_ack: u32,
}

/// The measured bytes that a client has mapped on a GPU: between `least` and `most`.
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
    /// From the daemon: the time of `Machine::deadline` has come. Wake-ups that are due are handled, as after every
    /// event.
    Tick,
    /// From the daemon, when an administrator changes a setting: replaces all settings. Queues are ordered anew if the
    /// policy or the period changed.
    Configure(Settings),

    /// From the daemon: a GPU of `total` bytes exists, as NVML or the first client that attaches to it says. Repeating
    /// it changes `total` only, and brings back a GPU that was gone.
    GpuFound { gpu: GpuId, total: u64 },
    /// From the daemon: nothing can run on the GPU any more. No program is placed there, and its clients are let
    /// through regardless of holders of the lock and of memory, so that the driver's error reaches all of them. It is
    /// forgotten once its last client has detached.
    GpuGone { gpu: GpuId },
    /// From the daemon: the host is about to suspend (`suspended`), or has resumed. In between, no client runs, and all
    /// memory that can leave the GPUs does; see `Machine::is_evacuated`.
    Suspend { suspended: bool },
    /// From the daemon, once NVML reports it: `rate`, in bytes per second, is the highest rate of copies between the
    /// GPU and the host in each direction.
    GpuLink { gpu: GpuId, rate: u64 },
    /// From the daemon, periodically and after `Command::Measure`: `bytes` of the GPU are in use by anything but
    /// clients' mapped memory, measured no earlier than `begun`. That is other programs, and the contexts of those
    /// clients that had one by then (`Machine::has_context`). `Settings::context` is set aside for each other context.
    /// `others` of these bytes are in use by other programs. Where they grow, more is kept free for them.
    /// Not `complete`: processes were left out that may be clients of the previous scheduler, about to reconnect; until
    /// that is settled, no client is told that there is room for its context.
    GpuOverhead {
        gpu: GpuId,
        begun: Time,
        bytes: u64,
        #[serde(default)]
        others: u64,
        complete: bool,
    },
    /// From the daemon, after `GpuOverhead` of the same measurement: the memory of each client on the GPU without its
    /// context, and the bytes that were free in all (`None`: unknown), measured no earlier than `begun`. Clients that
    /// are missing in `found` could not be measured. Confirms or refutes what clients reported, and answers requests
    /// that were held for a measurement.
    Measured { gpu: GpuId, begun: Time, free: Option<u64>, found: BTreeMap<ClientId, Found> },
    /// From the daemon: the measured size of clients' contexts on a GPU. It counts towards limits; until the size of a
    /// context is known, `Settings::context` does.
    ContextSizes { gpu: GpuId, bytes: BTreeMap<ClientId, u64> },
    /// From the daemon: `bytes` of host memory, over all GPUs, that limits may count on. Unbounded until the first such
    /// event.
    HostMemory { bytes: u64 },
    /// From the daemon: `bytes` of host memory, over all GPUs, that clients may allocate for memory that is still on a
    /// GPU, so that it can leave without delay; 0 until the first such event. `None`: the host lacks memory, and
    /// clients give back host memory that is unused.
    HostAhead { bytes: Option<u64> },

    /// A client connected and was identified. Clients with the same nonzero `gang` are granted and revoked together.
    Connected { client: ClientId, gang: u64, tenant: TenantId },
    /// From the daemon, when a client connects or rules change: these clients are now in that group, or in none. The
    /// limits of a group apply to all of its members.
    Groups { groups: BTreeMap<ClientId, Option<Group>> },
    /// From the client, before it attaches: the limits that its environment sets. Replaces those before.
    EnvLimits { client: ClientId, limits: EnvLimits },
    /// From the daemon: what rules say about the neighbours that these clients may have on a GPU.
    Labels { labels: BTreeMap<ClientId, Labels> },
    /// From the client, before it initialises CUDA: asks on which GPUs it is to run. Answered by `Command::Placed` or
    /// `Command::Unplaced`.
    PlacementRequested { client: ClientId, request: PlacementRequest },
    /// From the daemon: the client is the program for which `from`, which has disconnected, requested a placement
    /// (`PlacementRequest::ahead`). It takes that placement over.
    PlacementTaken { client: ClientId, from: ClientId },
    /// The client's connection closed or its process died. Its lock, its memory and its requests are gone on all GPUs.
    Disconnected { client: ClientId },
    /// From the client: it is about to create its first context on a GPU, which a `GpuFound` has announced, and waits
    /// until it may. Answered by `Command::Attached`, or by `Command::Denied` with 0 bytes. A repetition is answered
    /// again.
    Attached {
        client: ClientId,
        gpu: GpuId,
        #[serde(with = "crate::encoding::Engine")]
        engine: Engine,
    },
    /// From the client: its last context on the GPU is gone, and with it its memory, its lock and its requests there.
    Detached { client: ClientId, gpu: GpuId },

    /// From the client, whenever its memory changes or it has carried out an allowance: replaces the report before it.
    Memory { client: ClientId, gpu: GpuId, report: MemoryReport },
    /// From the client: an allocation needs a limit of `bytes`. Answered by a `Command::Limit` that is at least as high
    /// or by `Command::Denied`, possibly after a measurement or, where a rule says so, after other clients have freed
    /// memory.
    LimitRequested { client: ClientId, gpu: GpuId, bytes: u64 },
    /// From the client: the driver found no room for `bytes` of its own data, such as code or stacks. Answered by
    /// `Command::Reserved` within 2 s.
    ReservationRequested { client: ClientId, gpu: GpuId, bytes: u64 },
    /// From a holder: the part of the time, in thousandths, in which submitted work waited on the GPU. More than 1100:
    /// the client wants no other client beside it.
    Utilization { client: ClientId, gpu: GpuId, permille: u32 },
    /// From the client: it wants the locks of all of `gpus`, which it has attached, at the same time. Replaces a
    /// request that still waits. Answered by `Command::Grant`; until then by `Command::Waiting`.
    Requested { client: ClientId, gpus: GpuSet },
    /// From the client: it no longer wants the lock of these GPUs, for which it waits.
    Cancelled { client: ClientId, gpus: GpuSet },
    /// From a holder: it gives the lock of these GPUs back, and none of its work runs there any more. `busy` is how
    /// long they had work of this client during the turn. Sent in answer to `Command::Revoke`, or because the client is
    /// idle or the driver had no room for its memory.
    Released {
        client: ClientId,
        gpus: GpuSet,
        #[serde(with = "crate::encoding::ReleaseReason")]
        reason: ReleaseReason,
        busy: Duration,
    },
    /// From the client, after the scheduler restarted: it holds the lock of these GPUs, granted by the previous
    /// scheduler. Its turn begins anew.
    Held { client: ClientId, gpus: GpuSet },
    /// From a holder that was revoked and cannot drain now. It keeps the lock and is asked again later. `HostFull`,
    /// `Broken` and `UnseenWork` mean that it cannot evict; `UntrackedWork` only explains pinned memory.
    Stuck {
        client: ClientId,
        gpus: GpuSet,
        #[serde(with = "crate::encoding::StuckReason")]
        reason: StuckReason,
    },
    /// From the daemon: the kernel says that the client's process is stopped (SIGSTOP, a debugger), or runs again.
    /// Answers `Command::Probe`.
    Stopped { client: ClientId, stopped: bool },

    /// From the daemon: whether programs that are not clients use the GPU, or may. Until this event, they do.
    OtherPrograms { gpu: GpuId, present: bool },

    /// From the daemon: `bytes` of the GPU must be vacated immediately, and kept free for programs that are not clients
    /// until `until` or [`Event::RoomClosed`]; memory that such programs take in that time counts. Sent again for the
    /// same room, on the same GPU, it replaces the earlier event. Answered by `Command::RoomReady` or
    /// `Command::RoomRefused` within 10 s.
    RoomRequested { room: RoomId, gpu: GpuId, bytes: u64, until: Time },
    /// From the daemon: the room is not needed any more. One that has ended stays ended.
    RoomClosed { room: RoomId },

    /// From the daemon: the client should leave its GPUs, including its contexts, if it can: until it wants to enter
    /// the driver, or (`paused`) until `Resumed`. It is held off its GPUs until then, even if it cannot sleep.
    SleepWanted { client: ClientId, paused: bool },
    /// From the daemon: the client, which has just connected, reports that an earlier scheduler told it to sleep. The
    /// checkpoint helper determines whether it is off its GPUs. It sleeps on until it wants to enter the driver.
    FoundAsleep { client: ClientId },
    /// From the daemon: the client should run again. A move for which it does not sleep yet is given up.
    Resumed { client: ClientId },
    /// From the daemon: the client should leave one GPU for another of the same kind. It is put to sleep for that,
    /// regardless of its work, and comes back there; a client that already sleeps is moved immediately, and stays
    /// asleep. Answered by `Command::Migrated`, unless the client disconnects.
    Migrate { client: ClientId, from: GpuId, to: GpuId },
    /// From the daemon: the GPU should become empty (`drained`), or is in use again. While it is drained, a client that
    /// asks for a context there waits. A client that has a context there moves to another GPU of the same kind that it
    /// may use, if that has room, as with `Migrate`; otherwise it sleeps until the GPU is in use again. A client that
    /// can do neither keeps running, and is asked again from time to time.
    Drain { gpu: GpuId, drained: bool },
    /// From the daemon: whether the GPU reports errors after which it should not be used. No program is placed there
    /// while there are other GPUs.
    Failing { gpu: GpuId, failing: bool },
    /// From the daemon: clients can be moved between the GPUs of one of these sets. Replaces the earlier sets. Until
    /// the first ones arrive, no program leaves a drained GPU for another.
    Kinds { kinds: Vec<GpuSet> },
    /// From the daemon: the GPUs that these clients may use by their rules and environments; `None`: any.
    Allowed { allowed: BTreeMap<ClientId, Option<GpuSet>> },
    /// From the client: it has evicted its memory, and does not enter the driver until `Command::Awake`. Answers
    /// `Command::PrepareSleep`.
    SleepReady { client: ClientId },
    /// From the client: it stays awake. Answers `Command::PrepareSleep`.
    SleepRefused { client: ClientId, why: SleepObstacle },
    /// From the client: one of its threads waits to enter the driver.
    WakeRequested { client: ClientId },
    /// From the daemon: the state in which the checkpoint helper left the client's process. Answers
    /// `Command::Checkpoint`.
    Checkpointed { client: ClientId, outcome: SleepOutcome },
}
