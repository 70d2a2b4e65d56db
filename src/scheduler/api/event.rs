//! Events: what clients report, what the daemon measures, and what administrators change.

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
    /// From the daemon: nothing can run on the GPU any more. It is given to no program, and its clients are let through,
    /// whoever holds its lock and whatever memory they have there, so that the driver's error reaches all of them. It is
    /// forgotten once its last client has detached.
    GpuGone { gpu: GpuId },
    /// From the daemon: the machine is about to sleep (`asleep`), or has woken up. Until it has, nobody runs, and all
    /// memory that can leave the GPUs does; see `Machine::is_evacuated`.
    Sleep { asleep: bool },
    /// From the daemon, once NVML tells it: `rate`, in bytes per second, is what copies between the GPU and the host
    /// can reach in each direction.
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
    /// From the daemon: `bytes` of host memory, over all GPUs, that limits may count on. Without such an event there is
    /// no bound.
    HostMemory { bytes: u64 },
    /// From the daemon: `bytes` of host memory, over all GPUs, that clients may allocate for memory that is still on a
    /// GPU, so that it can leave at once; 0 until there was such an event. `None`: the host lacks memory, and clients
    /// give back what holds nothing.
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
    /// From the client: it wants the lock of all of `gpus`, which it has attached, at once. Replaces a request that
    /// still waits. Answered by `Command::Grant`; until then by `Command::Waiting`.
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

    /// From the daemon: whether programs that are no clients use the GPU, or may. They do until this says otherwise.
    OtherPrograms { gpu: GpuId, present: bool },

    /// From the daemon: `bytes` of the GPU are to be vacated at once, and kept free for programs that are no clients until `until` or
    /// [`Event::RoomClosed`]; what such programs take meanwhile counts. Said again of the same room, on the same GPU, it replaces
    /// what was said before. Answered by `Command::RoomReady` or `Command::RoomRefused` within 10 s.
    RoomRequested { room: RoomId, gpu: GpuId, bytes: u64, until: Time },
    /// From the daemon: the room is not needed any more. One that has ended stays ended.
    RoomClosed { room: RoomId },

    /// From the daemon: the client is to leave its GPUs, its contexts included, if it can: until it wants to enter the driver,
    /// or (`paused`) until `Resumed`. It is held off its GPUs until then, even if it cannot sleep.
    SleepWanted { client: ClientId, paused: bool },
    /// From the daemon: the client, which has just connected, says that it has been told to sleep by an earlier scheduler. Whether it
    /// is off its GPUs is found out. It sleeps on until it wants to enter the driver.
    FoundAsleep { client: ClientId },
    /// From the daemon: the client is to run again. A move for which it does not sleep yet is given up.
    Resumed { client: ClientId },
    /// From the daemon: the client is to leave one GPU for another of the same kind. It is put to sleep for that, whatever work it
    /// has, and comes back there; one that sleeps is moved at once, and sleeps on. Answered by `Command::Migrated`, unless the
    /// client disconnects.
    Migrate { client: ClientId, from: GpuId, to: GpuId },
    /// From the daemon: the GPU is to be empty (`drained`), or is in use again. Meanwhile nobody gets a context there: who asks
    /// for one waits. Whoever has one goes to another GPU of the same kind that it may be on, where there is room, as with `Migrate`,
    /// or else sleeps until the GPU is in use again. Those that can do neither go on, and are asked again from time to time.
    Drain { gpu: GpuId, drained: bool },
    /// From the daemon: whether the GPU reports errors after which it should not be used. No program is placed there
    /// while there are other GPUs.
    Failing { gpu: GpuId, failing: bool },
    /// From the daemon: what runs on a GPU of one of these sets can be moved to the others. Replaces the earlier sets.
    /// Until the first ones arrive, no program leaves a drained GPU for another.
    Kinds { kinds: Vec<GpuSet> },
    /// From the daemon: the GPUs on which these clients may be by their rules and environments; `None`: any.
    Allowed { allowed: BTreeMap<ClientId, Option<GpuSet>> },
    /// From the client: it has evicted its memory, and nothing of it enters the driver until `Command::Awake`. Answers
    /// `Command::PrepareSleep`.
    SleepReady { client: ClientId },
    /// From the client: it stays awake. Answers `Command::PrepareSleep`.
    SleepRefused { client: ClientId, why: SleepObstacle },
    /// From the client: a thread of it waits to enter the driver.
    WakeRequested { client: ClientId },
    /// From the daemon: the checkpoint helper has left the client's process so. Answers `Command::Checkpoint`.
    Checkpointed { client: ClientId, outcome: SleepOutcome },
}
