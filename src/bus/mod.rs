//! The D-Bus interface `org.nvshare.Scheduler1` as types: names, dictionaries and the proxy. The
//! daemon serves the interface, and `nvsharectl` calls it. `dbus/org.nvshare.Scheduler1.xml`
//! documents it.
//!
//! A key added after version 0.1.0 must be an `Option`. After an upgrade, an older scheduler keeps
//! running until it is restarted, and does not send the new key. `nvsharectl` rejects a dictionary
//! that lacks a key of any other type.

use nvshare_wire::client::{EngineReason, GpuKind};
use std::collections::HashMap;
use zbus::{DeserializeDict, OwnedVariant, SerializeDict, Type, Variant};

use crate::scheduler::{Engine, EvictionBlock, GpuId, LockState, MoveObstacle, SleepObstacle, SleepPhase, WakeReason};

pub mod logind;
pub mod rules;
pub mod status;

pub const NAME: &str = "org.nvshare.Scheduler1";
pub const PATH: &str = "/org/nvshare/Scheduler1";

/// Represents a lock or a place in the lock's queue. Closing the descriptor releases the lock or
/// leaves the queue.
pub use zbus::OwnedFd as LockFd;

/// Represents a room of GPU memory. The room ends when the descriptor is closed or the room's time
/// is over. Writing any data renews the room.
pub use zbus::OwnedFd as RoomFd;

/// An in-memory file with a debug bundle or a timeline.
pub use zbus::OwnedFd as BundleFd;

/// A GPU or a MIG slice.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Gpu {
    pub uuid: String,
    pub kind: String,
    pub name: String,
    pub index: Option<u32>,
    pub total: u64,
    pub capacity: u64,
    pub overhead: Option<u64>,
    pub accounting: String,
    pub shortfall: u64,
    pub demand: u64,
    pub resident: u64,
    pub swapped: u64,
    pub clients: u32,
    pub holders: Vec<u64>,
    pub queue: Vec<u64>,
    pub gone: bool,
    pub drained: bool,
    pub contexts: Option<u64>,
    /// Seconds until the turn of each client ends, by client id.
    pub turn_ends: Option<HashMap<u64, f64>>,
    pub expected_starts: Option<HashMap<u64, f64>>,
    pub swapped_in_bytes: Option<u64>,
    pub swapped_out_bytes: Option<u64>,
    pub link_rate: Option<u64>,
    pub kept: Option<u64>,
    pub rooms: Option<Vec<Room>>,
    pub unproven: Option<Vec<Unproven>>,
    /// Process IDs.
    pub others: Option<Vec<u32>>,
}

/// A program that has not shown that it may use the GPU. It runs as without nvshare.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Unproven {
    pub pid: u32,
    pub uid: u32,
    pub name: String,
}

/// Memory of a GPU that is kept free for programs that do not use nvshare. Older schedulers do not
/// support rooms.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Room {
    pub who: String,
    pub pid: u32,
    pub uid: u32,
    pub bytes: u64,
    pub ready: bool,
    /// Seconds until the room ends.
    pub ends_in: f64,
}

/// Time for which a group of clients was stalled on a GPU. The averages are percentages of the last
/// 10, 60 and 300 seconds. The totals are seconds since the scheduler first saw the group.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Pressure {
    pub kind: String,
    pub name: String,
    pub some_avg10: f64,
    pub some_avg60: f64,
    pub some_avg300: f64,
    pub some_total: f64,
    pub full_avg10: f64,
    pub full_avg60: f64,
    pub full_avg300: f64,
    pub full_total: f64,
}

/// A program that was saved to disk.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Image {
    pub name: String,
    pub uid: u32,
    pub program: String,
    /// When the program was saved, in seconds since 1970.
    pub saved: u64,
    pub bytes: u64,
    /// The estimated size of an image that is being saved. Missing if the image is complete.
    pub expected_bytes: Option<u64>,
    /// The process that was restored from the image and still runs, or that is being saved to it, or 0.
    pub runs_as: u32,
    /// Why the image cannot be used, or empty.
    pub damage: String,
    /// Where the program is: `saving`, `saved`, `running`, `ended`, `sent` or `unfinished`.
    pub state: Option<String>,
    /// The host that got a copy of the image.
    pub sent_to: Option<String>,
}

/// GPU usage. The query's grouping decides which optional fields are present: the GPU, the tenant,
/// the unit, the container, and the hour or day. An hour or day is given by its beginning and its
/// length in seconds. The figures are sums over the columns that the query does not group by.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Usage {
    pub begins: Option<u64>,
    pub lasts: Option<u64>,
    pub gpu: Option<String>,
    pub tenant: Option<String>,
    pub unit: Option<String>,
    pub container: Option<String>,
    pub lock_seconds: f64,
    pub grants: u64,
    pub wait_seconds: f64,
    pub resident_byte_seconds: f64,
    pub swapped_byte_seconds: f64,
    pub swapped_in_bytes: u64,
    pub swapped_out_bytes: u64,
}

/// A client.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Client {
    pub id: u64,
    pub pid: u32,
    pub uid: u32,
    pub name: String,
    pub command: Option<String>,
    pub why: String,
    pub unit: String,
    pub slice: String,
    pub container: String,
    pub tenant: String,
    pub pod: String,
    pub pod_namespace: String,
    pub pod_name: String,
    pub pod_container: String,
    pub library: String,
    pub rule: String,
    pub rule_origin: String,
    pub share: String,
    /// Clients with the same number share the limits of their rule.
    pub rule_group: Option<u64>,
    pub environment: String,
    pub environment_ignored: Vec<String>,
    pub gang: Vec<u64>,
    pub placed: Vec<String>,
    /// Time of the connection, in seconds since 1970.
    pub connected_since: f64,
    pub stopped: bool,
    pub sleep: String,
    pub paused: bool,
    pub moving: String,
    pub sleep_obstacle: String,
    pub woken_by: String,
    /// Duration of the client's last wake, in seconds.
    pub wake_time: Option<f64>,
    pub gpus: Vec<GpuUse>,
}

/// A pod of Kubernetes, as the agent reports it.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Pod {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// The name of each container, by its id.
    pub containers: HashMap<String, String>,
    /// Keys of the rule that applies to this pod if no other rule does. May be empty.
    pub rule: HashMap<String, OwnedVariant>,
    /// The keys of `rule` that come from the agent's configuration rather than from the pod. `None`
    /// if an older agent sent the pod.
    pub defaults: Option<Vec<String>>,
}

/// A ResourceClaim of Kubernetes that is prepared on this node, as the device plugin reports it.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct Claim {
    pub uid: String,
    pub namespace: String,
    pub name: String,
    /// Keys of the rule that applies to the claim's programs if no other rule does.
    pub rule: HashMap<String, OwnedVariant>,
}

/// The state of a client on one GPU.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct GpuUse {
    pub uuid: String,
    pub state: String,
    pub since: f64,
    pub engine: String,
    pub engine_reason: String,
    pub demand: u64,
    pub resident: u64,
    pub swapped: u64,
    /// Bytes in swap files. `None` if the client has no bytes there.
    pub in_file: Option<u64>,
    pub pinned: u64,
    pub allowance: u64,
    pub limit: Option<u64>,
    pub memory_max: Option<u64>,
    pub environment_memory_max: Option<u64>,
    pub pending_limit: Option<u64>,
    pub unverified: Option<u64>,
    pub mapping_failures: u32,
    pub untracked_work: bool,
    pub eviction_blocked: String,
    pub utilization: Option<u32>,
    pub lock_time: f64,
    pub wait_time: f64,
    pub grants: u64,
    pub share_due: Option<u32>,
}

/// The client side of the interface.
#[zbus::proxy(
    interface = "org.nvshare.Scheduler1",
    default_service = "org.nvshare.Scheduler1",
    default_path = "/org/nvshare/Scheduler1"
)]
pub trait Scheduler {
    fn list_gpus(&self) -> zbus::Result<Vec<Gpu>>;
    fn list_clients(&self) -> zbus::Result<Vec<Client>>;
    fn list_pressure(&self) -> zbus::Result<Vec<Pressure>>;
    fn describe(&self, options: HashMap<&str, Variant<'_>>) -> zbus::Result<String>;
    fn describe_timeline(&self, options: HashMap<&str, Variant<'_>>) -> zbus::Result<String>;
    fn list_permissions(&self) -> zbus::Result<HashMap<String, bool>>;
    fn explain(&self, pid: u32) -> zbus::Result<Vec<String>>;
    fn list_usage(&self, since: f64, by: &[&str]) -> zbus::Result<Vec<Usage>>;
    fn acquire_lock(
        &self,
        gpu: &str,
        who: &str,
        why: &str,
        options: HashMap<&str, Variant<'_>>,
    ) -> zbus::Result<LockFd>;
    fn make_room(&self, gpu: &str, bytes: u64, options: HashMap<&str, Variant<'_>>) -> zbus::Result<RoomFd>;
    fn terminate_lock(&self, client: u64) -> zbus::Result<()>;
    fn pause(&self, pid: u32) -> zbus::Result<()>;
    fn resume(&self, pid: u32) -> zbus::Result<()>;
    fn migrate(&self, pid: u32, gpu: &str) -> zbus::Result<()>;
    fn hibernate(&self, pid: u32, options: HashMap<&str, Variant<'_>>) -> zbus::Result<String>;
    fn restore(&self, image: &str) -> zbus::Result<u32>;
    fn list_hibernated(&self) -> zbus::Result<Vec<Image>>;
    fn check_hibernated(&self, image: &str) -> zbus::Result<Vec<String>>;
    fn delete_hibernated(&self, image: &str) -> zbus::Result<()>;
    fn drain(&self, gpu: &str) -> zbus::Result<()>;
    fn undrain(&self, gpu: &str) -> zbus::Result<()>;
    fn list_rules(&self) -> zbus::Result<Vec<HashMap<String, OwnedVariant>>>;
    fn set_rule(&self, name: &str, rule: HashMap<&str, Variant<'_>>) -> zbus::Result<()>;
    fn set_pods(&self, pods: Vec<Pod>) -> zbus::Result<HashMap<String, String>>;
    fn set_claims(&self, claims: Vec<Claim>) -> zbus::Result<HashMap<String, String>>;
    fn create_debug_bundle(&self, options: HashMap<&str, Variant<'_>>) -> zbus::Result<BundleFd>;
    fn create_timeline(&self) -> zbus::Result<BundleFd>;
    fn release_driver(&self, seconds: u32) -> zbus::Result<Vec<u64>>;
    fn reload(&self) -> zbus::Result<()>;
    fn reset(&self) -> zbus::Result<()>;

    #[zbus(signal)]
    fn client_added(&self, id: u64, pid: u32) -> zbus::Result<()>;
    #[zbus(signal)]
    fn client_removed(&self, id: u64, pid: u32) -> zbus::Result<()>;
    #[zbus(signal)]
    fn gpu_added(&self, gpu: String) -> zbus::Result<()>;
    #[zbus(signal)]
    fn gpu_changed(&self, gpu: String) -> zbus::Result<()>;
    #[zbus(signal)]
    fn gpu_removed(&self, gpu: String) -> zbus::Result<()>;

    #[zbus(property)]
    fn time_quantum(&self) -> zbus::Result<u32>;
    #[zbus(property)]
    fn set_time_quantum(&self, seconds: u32) -> zbus::Result<()>;
    #[zbus(property)]
    fn max_wait(&self) -> zbus::Result<u32>;
    #[zbus(property)]
    fn set_max_wait(&self, seconds: u32) -> zbus::Result<()>;
    #[zbus(property)]
    fn anti_thrash(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn set_anti_thrash(&self, mode: &str) -> zbus::Result<()>;
    #[zbus(property)]
    fn policy(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn set_policy(&self, name: &str) -> zbus::Result<()>;
    #[zbus(property(emits_changed_signal = "invalidates"))]
    fn holders(&self) -> zbus::Result<HashMap<String, Vec<u64>>>;
    #[zbus(property)]
    fn problems(&self) -> zbus::Result<Vec<String>>;
    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> zbus::Result<String>;
}

/// Errors of `org.nvshare.Scheduler1.Error.*`, for which D-Bus has no standard name. All other
/// errors are `org.freedesktop.DBus.Error.*`.
#[derive(Debug, zbus::DBusError)]
#[zbus(prefix = "org.nvshare.Scheduler1.Error")]
pub enum Error {
    /// The configuration file is invalid, so the previous configuration stays in effect.
    InvalidConfiguration(String),
    /// The scheduler is stopping.
    Stopping(String),
}

impl From<Error> for zbus::BoxDBusError {
    fn from(error: Error) -> Self {
        Box::new(error)
    }
}

/// The beginning of the sentence in which `Explain` estimates when a waiting program will run.
pub const EXPECTED: &str = "It is expected to run ";
/// The sentence of `Explain` if the start cannot be estimated.
pub const UNKNOWN_START: &str = "Its start cannot be estimated.";

/// Returns the name of a GPU as `nvidia-smi -L` prints it.
pub fn gpu_name(kind: GpuKind, gpu: GpuId) -> String {
    match kind {
        GpuKind::Gpu => format!("GPU-{}", gpu.0),
        GpuKind::Mig => format!("MIG-{}", gpu.0),
    }
}

pub fn kind_name(kind: GpuKind) -> &'static str {
    match kind {
        GpuKind::Gpu => "gpu",
        GpuKind::Mig => "mig",
    }
}

pub fn engine_name(engine: Engine) -> &'static str {
    match engine {
        Engine::Swap => "swap",
        Engine::Managed => "managed",
        Engine::None => "none",
    }
}

/// Describes why a client's library chose its memory engine.
pub fn engine_reason(reason: EngineReason) -> &'static str {
    match reason {
        EngineReason::Best => "the default",
        EngineReason::Asked => "NVSHARE_ENGINE asks for it",
        EngineReason::Oversubscription => "NVSHARE_ENABLE_SINGLE_OVERSUB allows it to exceed GPU memory",
        EngineReason::NoVmm => "this GPU or its driver has no virtual memory management",
        EngineReason::NoManaged => "NVSHARE_ENGINE asks for managed, but this GPU cannot migrate managed memory",
        EngineReason::Sanitizer => "compute-sanitizer checks the program, which needs the driver's own allocations",
        EngineReason::Neither => {
            "this GPU or its driver supports neither virtual memory management nor migration of managed memory"
        }
    }
}

/// Returns the name of a client's state on a GPU, which is "attaching" until the client is
/// attached.
pub fn state_name(state: LockState, attached: bool) -> &'static str {
    match state {
        LockState::Idle if !attached => "attaching",
        LockState::Idle => "idle",
        LockState::Waiting => "waiting",
        LockState::Holding => "holding",
        LockState::Revoking => "revoking",
        LockState::Stuck => "stuck",
        LockState::Undrainable => "undrainable",
        LockState::Suspended => "suspended",
    }
}

/// Why none of a client's memory can be evicted if a device other than a GPU may access it.
pub const OTHER_DEVICE: &str = "another device, such as an RDMA network card, may access it. If only NCCL uses that \
    card, NCCL_IB_DISABLE=1 lets the memory move. NCCL_NET_GDR_LEVEL=LOC alone does not, because nvshare cannot see \
    that NCCL then opens the card without using it for GPU memory";

/// Describes why a client's memory cannot be evicted from a GPU.
pub fn eviction_block_name(block: EvictionBlock) -> &'static str {
    match block {
        EvictionBlock::HostFull => "host memory is full",
        EvictionBlock::Broken => "its CUDA contexts are broken",
        EvictionBlock::UnseenWork => "the driver is running work that the library has not seen",
        EvictionBlock::Late => "it does not answer",
        EvictionBlock::Stopped => "it is stopped",
        EvictionBlock::Foreign => "another program has locked or checkpointed it",
        EvictionBlock::Undrainable => "its work does not end",
        EvictionBlock::Unfreed => "NVML still shows memory that the program reported as freed",
    }
}

/// Returns the name of a client's phase of falling asleep, sleeping or waking.
pub fn sleep_phase_name(phase: SleepPhase) -> &'static str {
    match phase {
        SleepPhase::Awake => "awake",
        SleepPhase::Preparing => "preparing",
        SleepPhase::Checkpointing => "checkpointing",
        SleepPhase::Asleep => "sleeping",
        SleepPhase::Waking => "waking",
        SleepPhase::Restoring => "restoring",
        SleepPhase::Settling => "settling",
        SleepPhase::Lost => "lost",
        SleepPhase::Locked => "locked",
        SleepPhase::Checkpointed => "checkpointed",
        SleepPhase::Lent => "lent",
    }
}

/// Describes why a client cannot sleep.
pub fn sleep_obstacle_name(obstacle: SleepObstacle) -> &'static str {
    match obstacle {
        SleepObstacle::Busy => "it has unfinished work, or a thread may be in a driver call",
        SleepObstacle::Managed => "it has managed memory",
        SleepObstacle::Ipc => "it shares memory with other processes",
        SleepObstacle::Peers => "its GPUs can access each other's memory",
        SleepObstacle::Immovable => "it has memory that cannot leave the GPU",
        SleepObstacle::Rdma => "other devices may access its memory",
        SleepObstacle::UnseenWork => "it uses driver functions that the library does not intercept",
        SleepObstacle::Capture => "it is capturing a stream",
        SleepObstacle::Gang => "it is in a gang",
        SleepObstacle::NoContext => "it has no CUDA context",
        SleepObstacle::Unreachable => "its process is not visible to the scheduler",
        SleepObstacle::Unsupported => "this host's driver or nvshare-checkpoint does not support it",
        SleepObstacle::Unmeasured => "NVML does not measure its GPU",
        SleepObstacle::Silent => "it does not answer",
        SleepObstacle::Foreign => "another program has locked or checkpointed its process",
        SleepObstacle::Failed => "the driver could not take it off the GPU",
    }
}

/// Describes why a client is not moved to another GPU.
pub fn move_obstacle_name(obstacle: MoveObstacle) -> &'static str {
    match obstacle {
        MoveObstacle::NotThere => "it does not use that GPU any more",
        MoveObstacle::NoGpu => "that GPU is gone or has another memory size",
        MoveObstacle::Attached => "it also uses that GPU",
        MoveObstacle::NoRoom => "that GPU has too little memory for it and the programs already there",
        MoveObstacle::Unevictable(..) => "memory of a program on that GPU cannot be evicted",
        MoveObstacle::Unacknowledged => {
            "other programs have not confirmed lower memory limits. Try again when they are not stopped or busy"
        }
        MoveObstacle::Drained => "that GPU is drained",
        MoveObstacle::Moving => "it is being moved already",
        MoveObstacle::Sleep(why) => sleep_obstacle_name(why),
        MoveObstacle::Resumed => "it was resumed before it had left its GPU",
        MoveObstacle::Failed => "the driver could not restore it on that GPU, so it returns to its previous GPU",
    }
}

/// Describes why a client was woken.
pub fn wake_reason_name(reason: WakeReason) -> &'static str {
    match reason {
        WakeReason::Call => "call",
        WakeReason::Resumed => "resume",
    }
}

/// The maximum number of pods per node. The limit is ten times the largest number known from any
/// node.
pub const MAX_PODS: usize = 5_000;
/// The maximum number of claims per node. Each claim needs a socket of the scheduler.
pub const MAX_CLAIMS: usize = 5_000;
/// Maximum length of a name in Kubernetes, in bytes.
const MAX_POD_NAME: usize = 253;

/// Returns true if the text has the form of the UID of a pod or claim.
pub fn is_pod_uid(text: &str) -> bool {
    (32..=36).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-')
}

/// Returns true if the text is a valid name in Kubernetes.
pub fn is_pod_name(text: &str) -> bool {
    let is_of_a_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-._".contains(&byte);
    !text.is_empty() && text.len() <= MAX_POD_NAME && text.bytes().all(is_of_a_name)
}
