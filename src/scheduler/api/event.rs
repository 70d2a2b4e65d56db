//! What happens: what clients say, what is measured, what administrators change.

use super::*;
use std::collections::BTreeMap;

/// A client's report of its memory on one GPU, in bytes; see `nvshare_wire::ClientMessage::Memory`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MemoryReport {
    pub ack: u32,
    pub demand: u64,
    pub mapped: u64,
    pub swapped: u64,
    pub pinned: u64,
    pub limit_ack: u32,
}

/// What a client was measured to have mapped on a GPU: between these.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Found {
    pub least: u64,
    pub most: u64,
}

/// What was seen to move between a GPU and the host; `None` where it could not be seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Traffic {
    /// Bytes a second.
    pub to_gpu: Option<u64>,
    pub from_gpu: Option<u64>,
    /// Page faults a second that the driver serviced for that GPU.
    pub faults: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Event {
    /// Time has passed; see `Machine::deadline`.
    Tick,
    Configure(Settings),

    /// A GPU exists (from NVML, or from the first client that attaches to it). Repeating it changes `total` only.
    GpuFound {
        gpu: GpuId,
        total: u64,
    },
    /// Bytes per second that copies between a GPU and the host can reach.
    GpuLink {
        gpu: GpuId,
        rate: u64,
    },
    /// Bytes in use on a GPU by anything that is not a client's mapped memory, as measured at a moment that was not before
    /// `begun`: strangers, and the contexts of those clients that had theirs then (`Machine::has_context`). For each of the
    /// others, `Settings::context` is put aside. Not `complete`: processes were left out that may be clients of the scheduler
    /// before this one, on their way back; until that is known nobody else is told that there is room for it.
    GpuOverhead {
        gpu: GpuId,
        begun: Time,
        bytes: u64,
        complete: bool,
    },
    /// What clients were found to have on a GPU, their contexts left out, and how many bytes were free there in all, at a
    /// moment that was not before `begun`. A client that is not named could not be measured. The answer to
    /// `Command::Measure`, after `GpuOverhead` of the same measurement; and unasked.
    Measured {
        gpu: GpuId,
        begun: Time,
        free: Option<u64>,
        found: BTreeMap<ClientId, Found>,
    },
    /// How large contexts of clients on a GPU were measured to be. It counts for their groups' limits; until it is known
    /// of one, `Settings::context` does.
    ContextSizes {
        gpu: GpuId,
        bytes: BTreeMap<ClientId, u64>,
    },
    /// What moves between a GPU and the host at this moment; see `Machine::watched`.
    Traffic {
        gpu: GpuId,
        traffic: Traffic,
    },
    /// Bytes of host memory that promises to clients may count on, over all GPUs. Until the first such event there is no
    /// bound.
    HostMemory {
        bytes: u64,
    },

    /// `gang`: clients with the same key that is not 0 are granted and revoked together.
    Connected {
        client: ClientId,
        gang: u64,
        user: UserId,
    },
    /// From now on these clients are each in that group, or in none. What it says of a group holds for all of its members.
    Groups {
        groups: BTreeMap<ClientId, Option<Group>>,
    },
    /// What the client says itself that it may have, from now on.
    EnvLimits {
        client: ClientId,
        limits: EnvLimits,
    },
    /// What rules say of the neighbours of these clients, from now on.
    Labels {
        labels: BTreeMap<ClientId, Labels>,
    },
    /// Asks on which GPUs it is to run, before it sees any. Answered by `Command::Placed` or `Command::Unplaced`.
    PlacementRequested {
        client: ClientId,
        request: PlacementRequest,
    },
    /// The client is the program for which another one, which is gone, had asked for a place.
    PlacementTaken {
        client: ClientId,
        from: ClientId,
    },
    /// The client is gone (its connection closed or its process died): nothing of it is left on any GPU.
    Disconnected {
        client: ClientId,
    },
    /// The client wants to create a context on a GPU. The GPU is known: `GpuFound` came before.
    Attached {
        client: ClientId,
        gpu: GpuId,
        #[serde(with = "crate::encoding::Engine")]
        engine: Engine,
    },
    Detached {
        client: ClientId,
        gpu: GpuId,
    },

    Memory {
        client: ClientId,
        gpu: GpuId,
        report: MemoryReport,
    },
    /// Needs a limit of so many bytes. Answered by a limit that is as high, or by `Command::Denied`.
    LimitRequested {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
    },
    /// The driver found no memory for something of its own. Answered by `Command::Reserved`.
    ReservationRequested {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
    },
    /// How full it keeps a GPU that it holds, in thousandths: the share of the time in which submitted work waits there.
    /// More than 1100: it wants nobody beside it.
    Utilization {
        client: ClientId,
        gpu: GpuId,
        permille: u32,
    },
    /// Wants the lock of all of `gpus`, which it has attached, at once.
    Requested {
        client: ClientId,
        gpus: GpuSet,
    },
    Cancelled {
        client: ClientId,
        gpus: GpuSet,
    },
    Released {
        client: ClientId,
        gpus: GpuSet,
        #[serde(with = "crate::encoding::ReleaseReason")]
        reason: ReleaseReason,
        busy: Duration,
    },
    /// Has had the lock of those GPUs since before this machine was there: granted by the one before it.
    Held {
        client: ClientId,
        gpus: GpuSet,
    },
    /// Was asked to release and cannot now.
    Stuck {
        client: ClientId,
        gpus: GpuSet,
        #[serde(with = "crate::encoding::StuckReason")]
        reason: StuckReason,
    },
    /// The client's process was stopped (SIGSTOP, a debugger) or runs again, as the kernel says.
    Stopped {
        client: ClientId,
        stopped: bool,
    },
}
