//! What is to be done, and told.

use super::*;

/// Why a request is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Denial {
    /// There is no memory for it, on the GPU or in the host.
    NoRoom,
    /// The group's `memory-max` would be exceeded.
    MemoryMax,
    /// The group's `swap-max` would be exceeded.
    SwapMax,
    /// A limit from the client's own environment would be exceeded.
    EnvLimit,
    /// Its context and the memory that another client needs do not fit on the GPU together.
    NoContext,
    /// It needs more than the driver can map, although no other client has memory on the GPU.
    Unmappable,
}

/// Why none of a client's memory can leave a GPU now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionBlock {
    /// The host has no room for it.
    HostFull,
    /// Its contexts do not work any more.
    Broken,
    /// It has not answered an eviction for a long time.
    Late,
    /// Its process is stopped.
    Stopped,
    /// It was revoked and cannot drain.
    Undrainable,
    /// Measurements show memory that the client says it has freed. Its other memory can leave.
    Unfreed,
}

/// What the daemon is to send to a client, to measure, or to log.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Command {
    /// The client is to run on these GPUs, and to see them in this order.
    Placed {
        client: ClientId,
        gpus: Vec<GpuId>,
    },
    /// There is no GPU that the client may run on.
    Unplaced {
        client: ClientId,
        why: PlacementError,
    },
    /// Room for the client's context is made.
    Attached {
        client: ClientId,
        gpu: GpuId,
    },
    /// The most this client's demand can be. `seq` counts up from 1 for each client and GPU; `most` is what the limit can be
    /// at most, `spare` what it may keep of host memory that holds nothing, `max` what its group may have, or itself.
    Limit {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
        seq: u32,
        most: u64,
        spare: u64,
        max: Option<u64>,
    },
    /// The limit that it requested is denied; with 0 bytes: a context is.
    Denied {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
        why: Denial,
    },
    /// This many bytes are free, and reserved for the client for a moment.
    Reserved {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
    },
    /// How many bytes the client may have mapped. Fewer than before: it has to evict. `seq` counts up from 1 for each client and GPU.
    Allowance {
        client: ClientId,
        gpu: GpuId,
        seq: u32,
        bytes: u64,
    },
    Grant {
        client: ClientId,
        gpus: GpuSet,
    },
    Revoke {
        client: ClientId,
        gpus: GpuSet,
    },
    /// To a holder: this many of its bytes will probably have to leave when its turn is over.
    Prepare {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
    },
    /// To a holder: so many clients wait; release the lock when idle for `grace`. With 0 waiters: no client waits any more.
    Contended {
        client: ClientId,
        gpus: GpuSet,
        waiters: u32,
        grace: Duration,
    },
    Waiting {
        client: ClientId,
        gpus: GpuSet,
        #[serde(with = "crate::encoding::WaitReason")]
        why: WaitReason,
    },
    /// A client has not answered a revoke or an eviction in time: find out whether its process is stopped (the answer is
    /// [`Event::Stopped`]).
    Probe {
        client: ClientId,
    },
    /// For the log: what is in use on that GPU is to be measured (answer with `Event::GpuOverhead`, then `Event::Measured`),
    /// because a decision depends on bytes that a client reports to have freed or to have, or because a mapping failed.
    Measure {
        gpu: GpuId,
    },
    /// To nobody, for people: from now on memory of it cannot leave that GPU, and others are asked for theirs.
    EvictionBlocked {
        client: ClientId,
        gpu: GpuId,
        why: EvictionBlock,
    },
    /// To nobody, for people: from now on those who run on that GPU at the same moment push each other's memory off it
    /// (`begins`), or do so no longer. They need `demand` bytes together.
    Thrashing {
        gpu: GpuId,
        begins: bool,
        demand: u64,
    },
    /// To no client, for people: a client that was granted the GPU gave it back because the driver had no room for
    /// `bytes` that it was allowed; for the `failures`-th time in a row.
    MappingFailed {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
        failures: u32,
    },
    /// To nobody, for people: from now on these GPUs are scheduled around this holder, which cannot drain.
    Undrainable {
        client: ClientId,
        gpus: GpuSet,
    },
}
