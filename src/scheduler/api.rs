//! The vocabulary of the machine: ids and time, what happens ([`Event`]), what is to be done ([`Command`]), and the
//! settings an administrator changes ([`Settings`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub use nvshare_wire::Uuid;
pub use nvshare_wire::client::{Engine, ReleaseReason, StuckReason};
pub use nvshare_wire::scheduler::WaitReason;

pub use crate::placement::{Labels, Placement, PlacementError, PlacementRequest};

/// Time since an arbitrary start; the daemon passes `CLOCK_MONOTONIC`.
pub type Time = Duration;

/// A GPU or a MIG slice, by its UUID. Never by an index: indexes differ between processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuId(pub Uuid);

/// A client, for as long as its process lives. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct ClientId(pub u64);

/// Whose client it is. Users take turns, whatever the number of their clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct UserId(pub u32);

/// A set of GPUs. Ordered, so that the machine is deterministic.
pub type GpuSet = BTreeSet<GpuId>;

/// Whether holders of one GPU exclude each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AntiThrash {
    /// One holder at a time, each for the full time quantum.
    On,
    /// Turns are short while nothing must move, and last the time quantum when memory must.
    #[default]
    Auto,
    /// Holders exclude each other only where their bytes do not fit together.
    Off,
}

/// Who runs when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PolicyName {
    /// First come, first served; users take turns.
    #[default]
    Fcfs,
    /// Who has had least goes first, so that on average jobs end soon.
    Adaptive,
}

/// What an administrator can change while everything runs.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Settings {
    /// How long a holder keeps the GPU lock while somebody waits who cannot be admitted beside it.
    pub time_quantum: Duration,
    /// Quanta are shortened, in [`AntiThrash::Auto`], so that nobody waits longer for a turn; 0: never.
    pub max_wait: Duration,
    pub anti_thrash: AntiThrash,
    pub policy: PolicyName,
    /// Bytes of each GPU that are never promised to anybody.
    pub reserve: u64,
    /// Bytes put aside for a context until its size has been measured.
    pub context: u64,
    /// How far back it is looked when a part of the time is a group's.
    pub time_period: Duration,
    /// Where programs go that choose no GPU.
    pub placement: Placement,
}

impl Settings {
    /// What a group gets at a time of what it is to have at least.
    pub(crate) fn slice(&self) -> Duration {
        self.time_period / 40
    }
}

/// Clients that a rule counts together: all programs of a unit, a container or a user.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
pub struct GroupId(pub u64);

/// A group, with what it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Group {
    pub id: GroupId,
    pub limits: RuleLimits,
}

/// What a rule says of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct RuleLimits {
    pub memory_max: Amount,
    /// So much of each GPU is taken from it only where nobody else has any to give.
    pub memory_low: Option<Amount>,
    /// Bytes that its memory may come to where it is not on a GPU, over all GPUs.
    pub swap_max: Option<u64>,
    pub on_memory_full: OnMemoryFull,
    /// None: its clients take turns as their users' others do.
    pub share: Option<Share>,
    /// Its clients are one gang, whatever they say.
    pub gang: bool,
}

/// What a program says of itself, by its environment: it holds for this client alone, beside what a rule says of its group,
/// and only where it is tighter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct EnvLimits {
    pub memory_max: Amount,
    /// Of what a rule has kept on the GPU for its group, so much of its memory.
    pub memory_low: Option<Amount>,
    pub swap_max: Option<u64>,
    /// Whether its allocations wait where they cannot be had: the program's own affair.
    pub waits: Option<bool>,
    /// 0: what nobody else wants.
    pub weight: Option<u16>,
    /// Percent of the last `Settings::time_period`.
    pub time_max: u8,
    pub priority: Option<i8>,
    /// It is not interactive, whatever its rule says.
    pub batch: bool,
}

impl Default for EnvLimits {
    fn default() -> Self {
        Self {
            memory_max: Amount::Infinity,
            memory_low: None,
            swap_max: None,
            waits: None,
            weight: None,
            time_max: 100,
            priority: None,
            batch: false,
        }
    }
}

/// How much of each GPU's time a group has, and how soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Share {
    /// Of what is divided among those who want it, compared with others. 0: what nobody else wants.
    pub weight: u16,
    /// Percent of the last `Settings::time_period`: at least, if it wants so much, and at most.
    pub min: u8,
    pub max: u8,
    /// Who has a higher one waits for nobody who has a lower one.
    pub priority: i8,
    /// Waits for nobody's turn to end, as long as it has had no more than its share.
    pub interactive: bool,
}

impl Default for Share {
    fn default() -> Self {
        Self { weight: 100, min: 0, max: 100, priority: 0, interactive: false }
    }
}

/// What becomes of an allocation for which a group's limit, or the host, has no room now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnMemoryFull {
    #[default]
    Fail,
    /// It waits until others have freed enough.
    Wait(WaitOrder),
}

/// Which of the allocations of a group that wait gets what is freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WaitOrder {
    /// The first, and nobody before it.
    #[default]
    Fifo,
    /// The largest that fits.
    BestFit,
    /// The last to come that fits.
    MostRecent,
    /// Any that fits.
    Random,
}

/// So much of each GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Amount {
    #[default]
    Infinity,
    Bytes(u64),
    /// Of the whole GPU.
    Percent(u8),
}

impl Amount {
    /// On a GPU of that size; `None`: there is no bound.
    pub fn on(self, total: u64) -> Option<u64> {
        match self {
            Self::Infinity => None,
            Self::Bytes(bytes) => Some(bytes),
            Self::Percent(percent) => Some((u128::from(total) * u128::from(percent.min(100)) / 100) as u64),
        }
    }
}

/// Why a higher limit cannot be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Denial {
    /// There is no memory for it, on the GPU or in the host.
    NoRoom,
    /// Its group would have more than it may.
    MemoryMax,
    /// It could have more memory that has to leave GPUs than it may.
    SwapMax,
    /// It would have more than it says itself that it may.
    EnvLimit,
    /// Its context, with the memory that another client needs, would not fit on the GPU.
    NoContext,
    /// It needs more already than the driver can map, though no other client has anything on the GPU.
    Unmappable,
}

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

/// Why none of a client's memory can leave a GPU now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EvictionBlock {
    /// The host has no room for it.
    HostFull,
    /// Its contexts do not work any more.
    Broken,
    /// It was asked for memory and has not answered for long.
    Late,
    /// Its process is stopped.
    Stopped,
    /// It was asked for the lock and cannot give it.
    Undrainable,
    /// It was measured to be there, though the client says that it has left. Its other memory can leave.
    Unfreed,
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

/// What the daemon is to tell a client, or others.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "kebab-case")]
pub enum Command {
    /// It is to run on these GPUs, and to see them in this order.
    Placed {
        client: ClientId,
        gpus: Vec<GpuId>,
    },
    /// There is no GPU that it may run on.
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
    /// The limit that it wished for cannot be had; with 0 bytes: nor can a context.
    Denied {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
        why: Denial,
    },
    /// So much is free, and kept for the client for a moment.
    Reserved {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
    },
    /// How many bytes the client may have mapped; less than before means evict. `seq` counts up from 1 for each client and GPU.
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
    /// To a holder: so many bytes of it are likely to be asked for when its turn is over.
    Prepare {
        client: ClientId,
        gpu: GpuId,
        bytes: u64,
    },
    /// To a holder: that many wait; release when idle for `grace`. With 0 waiters: nobody waits any more.
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
    /// A holder has not answered a Revoke (or an Evict) in time: see whether its process is stopped (answer with
    /// `Event::Stopped`).
    Probe {
        client: ClientId,
    },
    /// To no client: what is in use on that GPU is to be measured (answer with `Event::GpuOverhead`, then `Event::Measured`),
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
