//! The D-Bus interface `org.nvshare.Scheduler1` as types: names, dictionaries and the proxy. The daemon serves them and
//! `nvsharectl` reads them; `dbus/org.nvshare.Scheduler1.xml` says what they mean.

use nvshare_wire::client::GpuKind;
use zbus::{DeserializeDict, SerializeDict, Type};

use crate::scheduler::{AntiThrash, Engine, GpuId, LockState};

pub const NAME: &str = "org.nvshare.Scheduler1";
pub const PATH: &str = "/org/nvshare/Scheduler1";

/// Where the control socket is: D-Bus without a bus, for hosts that have none. Its directory is never mounted into a
/// container.
pub const CONTROL_SOCKET: &str = "/run/nvshare-control/control.sock";

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
    pub demand: u64,
    pub resident: u64,
    pub swapped: u64,
    pub clients: u32,
    pub holders: Vec<u64>,
    pub queue: Vec<u64>,
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
    pub unit: String,
    pub slice: String,
    pub container: String,
    pub library: String,
    pub connected_since: u64,
    pub stopped: bool,
    pub gpus: Vec<GpuUse>,
}

/// What a client does on one GPU.
#[derive(Debug, Clone, Default, PartialEq, SerializeDict, DeserializeDict, Type)]
#[zbus(signature = "a{sv}", rename_all = "kebab-case")]
pub struct GpuUse {
    pub uuid: String,
    pub state: String,
    pub since: f64,
    pub engine: String,
    pub demand: u64,
    pub resident: u64,
    pub swapped: u64,
    pub pinned: u64,
    pub allowance: u64,
    pub limit: Option<u64>,
    pub lock_time: f64,
    pub wait_time: f64,
    pub grants: u64,
}

/// The scheduler, for a program that talks to it.
#[zbus::proxy(
    interface = "org.nvshare.Scheduler1",
    default_service = "org.nvshare.Scheduler1",
    default_path = "/org/nvshare/Scheduler1"
)]
pub trait Scheduler {
    fn list_gpus(&self) -> zbus::Result<Vec<Gpu>>;
    fn list_clients(&self) -> zbus::Result<Vec<Client>>;
    fn reload(&self) -> zbus::Result<()>;

    #[zbus(property)]
    fn time_quantum(&self) -> zbus::Result<u32>;
    #[zbus(property)]
    fn set_time_quantum(&self, seconds: u32) -> zbus::Result<()>;
    #[zbus(property)]
    fn anti_thrash(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn set_anti_thrash(&self, mode: &str) -> zbus::Result<()>;
    #[zbus(property(emits_changed_signal = "const"))]
    fn version(&self) -> zbus::Result<String>;
}

/// The errors of the interface, as `org.nvshare.Scheduler1.Error.*`.
#[derive(Debug, zbus::DBusError)]
#[zbus(prefix = "org.nvshare.Scheduler1.Error")]
pub enum Error {
    /// The value is not one that is allowed; the message says which are.
    InvalidArgument(String),
    /// The caller may not do this.
    NotAuthorized(String),
    /// The configuration file is wrong; what was in effect stays so.
    InvalidConfiguration(String),
    /// The scheduler is stopping.
    Stopping(String),
}

/// The name of a GPU as `nvidia-smi -L` writes it.
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

/// What a client is to the lock of a GPU; before it was let in, nothing yet.
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

pub fn anti_thrash_name(mode: AntiThrash) -> &'static str {
    match mode {
        AntiThrash::On => "on",
        AntiThrash::Auto => "auto",
        AntiThrash::Off => "off",
    }
}

/// Reads what [`anti_thrash_name`] writes.
pub fn parse_anti_thrash(text: &str) -> Result<AntiThrash, String> {
    let modes = [AntiThrash::Auto, AntiThrash::On, AntiThrash::Off];
    let mode = modes.into_iter().find(|mode| anti_thrash_name(*mode) == text);
    mode.ok_or_else(|| format!("anti-thrash cannot be {text:?}: \"auto\", \"on\" or \"off\" are allowed"))
}
