//! [`Model`]: the scheduler's state machine, and the daemon's records of clients and GPUs. All other
//! parts of [`Core`](super::Core) only read the model.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::SystemTime;

use nvshare_wire::client::{EngineReason, GpuKind};
use nvshare_wire::{SchedulerMessage, Uuid};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tracing::{debug, warn};
use zbus::fdo;

use super::gangs::Gangs;
use super::groups::Groups;
use super::settings;
use crate::bus;
use crate::config::Config;
use crate::config::rules::{EnvLimits, Instance, Rule};
use crate::daemon::gpu::accounting::{Accounting, Claims, Departed, History};
use crate::daemon::gpu::device_files;
use crate::daemon::gpu::nvml::{DriverVersions, NvmlState, Sample};
use crate::daemon::systemd::fd_store::EntryName;
use crate::daemon::tenants::{Budget, Budgets, Share};
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::Session;
use crate::identity::{Identity, printable};
use crate::scheduler::{ClientId, Command, Event, GpuId, GpuSet, Machine, MemoryReport, SleepPhase, Time};
use crate::sys::clock;
use crate::sys::device_file::DeviceFile;

/// The scheduler, and the records that the other components read.
pub struct Model {
    pub config: Config,
    pub(super) machine: Machine,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) gpus: BTreeMap<GpuId, Gpu>,
    pub(super) groups: Groups,
    pub(super) gangs: Gangs,
    pub(super) next_client: u64,
    pub budgets: Arc<Budgets>,
    /// Disconnected processes. The driver frees their GPU memory shortly afterwards.
    pub(super) departed: Departed,
    /// Whether NVML answers queries, is released, or fails. `None` without an NVML thread.
    pub(super) nvml: Option<NvmlState>,
    pub(super) driver: DriverVersions,
    pub(super) started: Time,
}

/// A welcomed client.
pub(super) struct Client {
    pub connection: Rc<Connection>,
    pub session: Session,
    pub identity: Arc<Identity>,
    pub library: String,
    pub connected: SystemTime,
    /// The GPUs that the client has attached.
    pub gpus: BTreeMap<GpuId, ClientGpuStats>,
    /// The client's rule, and the group whose limits the client shares.
    pub rule: Option<Instance>,
    /// The group has used up the `gpu-hours` of its rule.
    pub has_used_up: bool,
    /// Limits from the client's environment.
    pub env_limits: EnvLimits,
    /// The memory limits, in bytes, and the permissions that the daemon has sent to the client, by GPU.
    pub announced_rules: BTreeMap<GpuId, (u64, u32)>,
    /// The client was connected before. An earlier daemon may have sent it other limits.
    pub reconnects: bool,
    /// The device files that the client has shown to be open.
    pub devices: BTreeSet<DeviceFile>,
    /// The client may be asleep, so it need not prove that it may use its GPUs: only the driver can put a
    /// process to sleep and wake it.
    pub is_exempt: bool,
    /// The process's pidfd. `None` if the daemon cannot see the process.
    pub process: Option<Rc<AsyncFd<OwnedFd>>>,
    /// The process is older than this daemon. It may have had memory before it connected.
    pub is_older: bool,
    /// The connection's name in systemd's descriptor store. `None` if the connection is not stored.
    pub stored_as: Option<EntryName>,
    /// The files of a lock acquired over D-Bus. A D-Bus lock uses no memory. `None` for a program with the
    /// library.
    pub lock: Option<Rc<LockFiles>>,
}

/// The file descriptors that let a D-Bus lock outlive the daemon.
#[derive(Debug)]
pub struct LockFiles {
    /// The daemon's end of the socket pair. The caller of `AcquireLock` has the other end.
    pub owner: UnixStream,
    /// A memfd with the state for the next daemon, written by `connections::lock`.
    pub record: File,
}

/// A client that has sent Hello and is about to be welcomed.
pub struct Arrival {
    pub connection: Rc<Connection>,
    pub identity: Arc<Identity>,
    pub version: u16,
    /// The gang's number as sent by the client. 0 stands for no gang.
    pub gang: u64,
    pub library: String,
    /// The files of a D-Bus lock, as in [`Client::lock`].
    pub lock: Option<Rc<LockFiles>>,
    /// The client was connected before, to this daemon or an earlier one.
    pub reconnects: bool,
    /// An earlier scheduler put the client to sleep.
    pub is_asleep: bool,
    /// The process's pidfd. `None` if the daemon cannot see the process.
    pub process: Option<Rc<AsyncFd<OwnedFd>>>,
}

/// The daemon's own records about a client on one GPU.
pub(super) struct ClientGpuStats {
    /// When the client attached the GPU.
    pub attached: Time,
    /// Bounds on the client's mapped memory in the recent past.
    pub history: History,
    /// The managed memory that the client reports.
    pub claims: Claims,
    /// The client's newest report.
    pub report: Option<MemoryReport>,
    /// Bytes of host memory that the client uses.
    pub host: u64,
    pub listing: Listing,
    pub shown: Use,
}

/// Whether NVML lists a client's process on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Listing {
    /// No measurement has listed the process, and it had no memory.
    Unknown,
    Listed,
    /// The process has memory or was listed before, and the last measurement did not list it.
    Missed,
}

/// The records about a client on one GPU that users see.
#[derive(Debug, Clone, Copy)]
pub struct Use {
    /// Time at which the client last stopped holding or waiting for the lock.
    pub idle_since: Time,
    /// Bytes that the client has in a swap file.
    pub in_file: u64,
    /// The client submits work in ways that bypass the library's gates.
    pub untracked_work: bool,
    /// A device other than a GPU may access the client's memory.
    pub other_device: bool,
    /// Why the client uses its engine.
    pub reason: EngineReason,
}

#[derive(Default)]
pub(super) struct Gpu {
    pub kind: GpuKind,
    pub name: String,
    /// The GPU's memory, in bytes.
    pub total: u64,
    /// NVML's index. `None` if NVML does not list the GPU and only clients have named it.
    pub index: Option<u32>,
    /// NVML no longer lists the GPU, but clients still use it.
    pub gone: bool,
    /// A GPU of another host. Only sleeping clients, which were restored on this host, have named it.
    pub is_foreign: bool,
    /// Minor number of the GPU's device file. A MIG slice has the number of its physical GPU.
    pub minor: Option<u32>,
    /// The GPU's compute capability.
    pub capability: Option<(i32, i32)>,
    pub accounting: Accounting,
    /// NVML's newest measurement.
    pub sample: Option<Sample>,
    /// A display is attached to the GPU.
    pub has_display: bool,
    /// A fabric connects the GPU to GPUs of other hosts.
    pub has_fabric: bool,
    /// Programs without nvshare use the GPU, or may use it.
    pub has_others: bool,
    /// Bytes in use, at the newest measurement, that the driver gives to plain allocations.
    pub evicted: u64,
    /// The GPU's charge against the budget of the tenant whose client named it. `None` if NVML lists or
    /// has listed the GPU.
    pub named_by: Option<Share>,
}

impl Gpu {
    /// A GPU with only these known properties.
    pub fn new(kind: GpuKind, name: String, total: u64) -> Self {
        Self { kind, name, total, has_others: true, ..Self::default() }
    }

    pub fn label(&self, gpu: GpuId) -> String {
        bus::gpu_name(self.kind, gpu)
    }

    pub fn is_slice(&self) -> bool {
        self.kind == GpuKind::Mig
    }
}

/// A client's request for memory on a GPU: its total, in bytes.
pub type Wanted = (ClientId, GpuId, u64);

/// A GPU that a caller named.
#[derive(Debug, Clone)]
pub struct NamedGpu {
    pub uuid: Uuid,
    pub kind: GpuKind,
    /// The GPU's memory, in bytes.
    pub total: u64,
    /// Minor number of the GPU's device file.
    pub minor: Option<u32>,
    /// The name as `nvidia-smi -L` shows it.
    pub label: String,
    /// The name for users: index and model if known.
    pub title: String,
}

/// IDs of the clients that hold the lock of each GPU, by the GPU's UUID.
pub type Holders = HashMap<String, Vec<u64>>;

/// A number for the state of each GPU, by the GPU's UUID. Equal numbers mean equal states.
pub type GpuStates = BTreeMap<String, u64>;

/// The process ID of each client, by client ID.
pub type ClientPids = BTreeMap<u64, u32>;

/// The name of a client, as users see it.
pub(super) fn client_name(client: ClientId, identity: Option<&Identity>) -> String {
    let name = identity.map_or("a program".into(), |identity| printable(identity.label()));
    match identity.map_or(0, |identity| identity.pid) {
        pid if pid > 0 => format!("{name} (process {pid})"),
        _ => format!("{name} (client {})", client.0),
    }
}

/// The name of a GPU, as users see it: its index, or its UUID if it is a MIG slice or its index is
/// unknown.
pub(super) fn gpu_name(gpu: GpuId, kind: GpuKind, index: Option<u32>) -> String {
    match index.filter(|_| kind != GpuKind::Mig) {
        Some(index) => format!("GPU {index}"),
        None => bus::gpu_name(kind, gpu),
    }
}

impl Model {
    pub fn new(config: Config) -> Self {
        Self {
            machine: Machine::new(settings::in_effect(&config, None)),
            budgets: Arc::new(Budgets::new(config.max_clients_per_tenant)),
            config,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            groups: Groups::default(),
            gangs: Gangs::default(),
            next_client: 1,
            departed: Departed::default(),
            nvml: None,
            driver: DriverVersions::default(),
            started: clock::now(),
        }
    }

    pub(super) fn identity(&self, client: ClientId) -> Option<&Arc<Identity>> {
        self.clients.get(&client).map(|entry| &entry.identity)
    }

    pub(super) fn budget(&self, client: ClientId) -> Option<&Arc<Budget>> {
        Some(self.clients.get(&client)?.connection.budget())
    }

    pub(super) fn rule_of(&self, client: ClientId) -> Option<&Rule> {
        self.config.rules.get(self.clients.get(&client)?.rule.as_ref()?.rule)
    }

    pub(super) fn stats(&mut self, client: ClientId, gpu: GpuId) -> Option<&mut ClientGpuStats> {
        self.clients.get_mut(&client)?.gpus.get_mut(&gpu)
    }

    pub(super) fn is_attached(&self, client: ClientId, gpu: GpuId) -> bool {
        self.clients.get(&client).is_some_and(|entry| entry.gpus.contains_key(&gpu))
    }

    /// The clients that have attached a GPU.
    pub(super) fn users_of_gpu(&self, gpu: GpuId) -> impl Iterator<Item = ClientId> {
        self.clients.iter().filter(move |(_, entry)| entry.gpus.contains_key(&gpu)).map(|(client, _)| *client)
    }

    pub(super) fn send(&self, client: ClientId, message: SchedulerMessage) {
        if let Some(entry) = self.clients.get(&client) {
            entry.connection.send(message);
        }
    }

    /// Sends a client the message about a command, if the command has one.
    pub(super) fn tell(&self, command: &Command) {
        let Some(entry) = command.client().and_then(|client| self.clients.get(&client)) else { return };
        if let Some(message) = entry.session.message(command) {
            entry.connection.send(message);
        }
    }

    pub(super) fn label(&self, gpu: GpuId) -> Option<String> {
        self.gpus.get(&gpu).map(|entry| entry.label(gpu))
    }

    /// The labels of several GPUs.
    pub(super) fn labels<'a>(&self, gpus: impl IntoIterator<Item = &'a GpuId>) -> String {
        let labels: Vec<String> = gpus.into_iter().filter_map(|id| self.label(*id)).collect();
        labels.join(" ")
    }

    /// The size of a GPU's memory in bytes. 0 if the GPU is unknown.
    pub(super) fn total(&self, gpu: GpuId) -> u64 {
        self.gpus.get(&gpu).map_or(0, |gpu| gpu.total)
    }

    /// A measurement by a client's report of the free bytes. `None`: NVML lists the GPU, and measures it.
    pub(super) fn reported_sample(&self, gpu: GpuId, free: u64, now: Time) -> Option<Sample> {
        let is_listed = self.gpus.get(&gpu).is_some_and(|entry| entry.index.is_some());
        let used = self.total(gpu).saturating_sub(free);
        (!is_listed).then_some(Sample {
            gpu,
            begun: now,
            steady: true,
            used,
            reserved: 0,
            graphics: 0,
            processes: None,
        })
    }

    /// Closes the connection of a client that broke the protocol.
    pub(super) fn close_connection(&self, client: ClientId, why: &impl std::fmt::Display) {
        if let Some(entry) = self.clients.get(&client) {
            warn!("disconnected {}: {why}", entry.identity.label());
            entry.connection.close();
        }
    }

    /// Keeps the latest measurement of a GPU.
    pub(super) fn keep_sample(&mut self, sample: Sample) {
        if let Some(entry) = self.gpus.get_mut(&sample.gpu) {
            entry.sample = Some(sample);
        }
    }

    pub(super) fn is_nvml_usable(&self) -> bool {
        self.nvml == Some(NvmlState::Usable)
    }

    /// True if the host has the GPU, as far as the daemon can tell: NVML lists or has listed the GPU, or
    /// does not answer.
    ///
    /// A client can invent a GPU. While NVML answers, a GPU that it does not list matters only to the
    /// clients that named it: such a GPU is in no list, sum or default, and has no lock files.
    pub(super) fn is_known(&self, gpu: GpuId) -> bool {
        self.gpus.get(&gpu).is_some_and(|gpu| gpu.named_by.is_none() || !self.is_nvml_usable())
    }

    /// The GPUs that the host has.
    pub(super) fn known_gpus(&self) -> impl Iterator<Item = (&GpuId, &Gpu)> {
        self.gpus.iter().filter(|(id, _)| self.is_known(**id))
    }

    /// True if NVML measures the memory in use on a GPU.
    pub(super) fn is_measured(&self, gpu: &Gpu) -> bool {
        self.is_nvml_usable() && gpu.index.is_some()
    }

    pub(super) fn driver_problem(&self) -> Option<String> {
        match self.nvml.as_ref()? {
            NvmlState::Failed(e) => Some(format!("the NVIDIA driver cannot be used: {e}")),
            NvmlState::Usable | NvmlState::Released => None,
        }
    }

    /// A sentence about why the daemon does not know any GPU.
    pub(super) fn no_gpu(&self) -> String {
        let why = self.driver_problem().map_or(String::new(), |problem| format!(": {problem}"));
        format!("the scheduler knows no GPU{why}")
    }

    /// Finds a GPU by its UUID or index. An empty name denotes the only GPU.
    ///
    /// # Errors
    /// `InvalidArgs` with a sentence that lists the known GPUs.
    pub fn find_gpu(&self, name: &str) -> fdo::Result<NamedGpu> {
        let here = || self.known_gpus().filter(|(_, gpu)| !gpu.gone);
        let known = || here().map(|(id, gpu)| gpu.label(*id)).collect::<Vec<_>>().join(", ");
        let is_meant = |(id, gpu): &(&GpuId, &Gpu)| {
            gpu.label(**id).eq_ignore_ascii_case(name) || gpu.index.is_some_and(|index| index.to_string() == name)
        };
        let (found, why) = match name {
            _ if here().next().is_none() => (None, self.no_gpu()),
            "" => (
                here().next().filter(|_| here().count() == 1),
                format!("the host has several GPUs. Name one of them: {}", known()),
            ),
            _ => (here().find(is_meant), format!("unknown GPU {name:?}. The GPUs are {}", known())),
        };
        let (id, gpu) = found.ok_or(fdo::Error::InvalidArgs(why))?;
        let label = gpu.label(*id);
        let title = match gpu.index {
            Some(index) if gpu.is_slice() => format!("{label} on GPU {index} ({})", gpu.name),
            Some(index) => format!("GPU {index} ({})", gpu.name),
            None => label.clone(),
        };
        Ok(NamedGpu { uuid: id.0, kind: gpu.kind, total: gpu.total, minor: gpu.minor, label, title })
    }

    /// The clients of a process. A process has several clients if it has loaded the library several times.
    ///
    /// # Errors
    /// `InvalidArgs` if the process has no clients.
    pub(super) fn program(&self, pid: u32) -> fdo::Result<Vec<ClientId>> {
        let is_meant = |client: &Client| client.lock.is_none() && i64::from(client.identity.pid) == i64::from(pid);
        let found = self.clients.iter().filter(|(_, client)| pid > 0 && is_meant(client)).map(|(id, _)| *id);
        let found: Vec<ClientId> = found.collect();
        let no_program = || fdo::Error::InvalidArgs(format!("no program under nvshare has process ID {pid}"));
        (!found.is_empty()).then_some(found).ok_or_else(no_program)
    }

    /// The users accountable for a process's clients. There are several if the process connected under several
    /// user ids.
    ///
    /// # Errors
    /// `InvalidArgs` if the process has no clients.
    pub fn users_of(&self, pid: u32) -> fdo::Result<BTreeSet<u32>> {
        Ok(self.program(pid)?.into_iter().filter_map(|client| Some(self.identity(client)?.accountable())).collect())
    }

    /// The clients of a process that a caller may control. `users`: the users whose programs the caller may
    /// control.
    ///
    /// # Errors
    /// `InvalidArgs` if the process has no clients, or the process ID now belongs to another user's process.
    pub(super) fn program_of(&self, pid: u32, users: &BTreeSet<u32>) -> fdo::Result<Vec<ClientId>> {
        if !self.users_of(pid)?.is_subset(users) {
            return Err(fdo::Error::InvalidArgs(format!("process {pid} has just ended")));
        }
        self.program(pid)
    }

    /// True if a client has proven that it may use a GPU, or need not prove it. No proof is needed
    /// for a GPU that NVML does not list, because its device file is unknown, nor for a lock
    /// acquired over D-Bus, which was checked when it was requested.
    pub(super) fn may_use(&self, client: ClientId, gpu: GpuId) -> bool {
        let Some((entry, found)) = self.clients.get(&client).zip(self.gpus.get(&gpu)) else { return true };
        let is_free = entry.lock.is_some() || entry.is_exempt || found.index.is_none();
        is_free
            || match found.minor {
                Some(minor) => entry.devices.contains(&device_files::of_gpu(minor)),
                None => entry.devices.iter().any(|file| device_files::is_of_gpu(*file)),
            }
    }

    /// True if any program has a GPU attached. D-Bus locks do not count.
    pub fn has_attachments(&self) -> bool {
        self.clients.values().any(|entry| entry.lock.is_none() && !entry.gpus.is_empty())
    }

    /// Ends a D-Bus lock by closing its connection. The task that owns the lock notices the end of the
    /// connection.
    ///
    /// # Errors
    /// `InvalidArgs` if the client is no lock.
    pub fn end_lock(&self, client: ClientId) -> fdo::Result<()> {
        let entry = self.clients.get(&client).filter(|entry| entry.lock.is_some());
        let no_lock =
            || fdo::Error::InvalidArgs(format!("client {} does not hold a lock acquired with AcquireLock", client.0));
        entry.map(|entry| entry.connection.close()).ok_or_else(no_lock)
    }

    /// Prepares the daemon's exit: closes the connections that systemd does not store. Stored
    /// connections stay open, and systemd closes them if no daemon takes them over.
    pub fn close_connections(&self) {
        for client in self.clients.values().filter(|client| client.stored_as.is_none()) {
            client.connection.close();
        }
    }

    /// The holders of each GPU's lock.
    pub fn holders(&self) -> Holders {
        let view = |seen: crate::scheduler::GpuView| {
            Some((self.label(seen.gpu)?, seen.holders.iter().map(|holder| holder.client.0).collect()))
        };
        self.machine.gpus().into_iter().filter_map(view).collect()
    }

    /// A number for the state of each GPU, which changes whenever the GPU, its programs or its queue
    /// change as users see them. Times that pass are no change.
    pub fn gpu_states(&self) -> GpuStates {
        let mut states: BTreeMap<GpuId, DefaultHasher> = BTreeMap::new();
        for seen in self.machine.gpus() {
            let state = states.entry(seen.gpu).or_default();
            (seen.gone, seen.drained, seen.capacity, seen.overhead, seen.kept).hash(state);
            seen.holders.iter().for_each(|holder| (holder.client.0, holder.ends).hash(state));
            seen.waiters.iter().for_each(|waiter| waiter.client.0.hash(state));
        }
        for client in self.machine.clients() {
            let sleep = self.machine.sleep_of(client.client);
            for attachment in &client.attachments {
                let Some(state) = states.get_mut(&attachment.gpu) else { continue };
                (client.client.0, client.stopped, sleep.paused, sleep.moving.is_some()).hash(state);
                (attachment.demand, attachment.mapped, attachment.swapped, attachment.pinned).hash(state);
                (attachment.attached, attachment.pending_limit, attachment.grants).hash(state);
                std::mem::discriminant(&attachment.state).hash(state);
                std::mem::discriminant(&sleep.phase).hash(state);
            }
        }
        states.into_iter().filter_map(|(gpu, state)| Some((self.label(gpu)?, state.finish()))).collect()
    }

    pub fn client_pids(&self) -> ClientPids {
        let pid = |client: &Client| u32::try_from(client.identity.pid).unwrap_or(0);
        self.clients.iter().map(|(id, client)| (id.0, pid(client))).collect()
    }

    /// The programs that a release of the driver affects.
    pub fn programs(&self) -> Vec<u64> {
        self.clients.iter().filter(|(_, client)| client.lock.is_none()).map(|(id, _)| id.0).collect()
    }

    /// True if a client is waiting to be restored to its GPUs.
    pub fn is_to_wake(&self, client: ClientId) -> bool {
        self.machine.sleep_of(client).phase == SleepPhase::Waking
    }

    /// True if clients may allocate host memory in advance.
    pub fn allocates_ahead(&self) -> bool {
        self.machine.is_ahead()
    }

    /// The client of a process that another client names: a program of the same tenant.
    pub(super) fn neighbour(&self, client: ClientId, pid: i32) -> Option<ClientId> {
        let own = self.identity(client)?;
        let mut programs = self.clients.iter().filter(|(_, entry)| entry.lock.is_none());
        programs.find(|(_, entry)| own.is_neighbour(&entry.identity, pid)).map(|(id, _)| *id)
    }

    /// The event that tells the scheduler whether a client's process is stopped.
    pub(super) fn probe(&self, client: ClientId) -> Option<Event> {
        let pid = self.identity(client)?.pid;
        let stopped = peer::is_stopped(pid);
        if stopped {
            debug!(client = client.0, pid, "the process is stopped");
        }
        Some(Event::Stopped { client, stopped })
    }

    /// The events about the stopped processes that have continued, and whether any process is still stopped.
    pub(super) fn continued(&self) -> (Vec<Event>, bool) {
        let stopped = self.clients.iter().filter(|(client, _)| self.machine.is_stopped(**client));
        let (stopped, running): (Vec<_>, Vec<_>) = stopped.partition(|(_, entry)| peer::is_stopped(entry.identity.pid));
        let event = |(client, _): (&ClientId, _)| {
            debug!(client = client.0, "the process runs again");
            Event::Stopped { client: *client, stopped: false }
        };
        (running.into_iter().map(event).collect(), !stopped.is_empty())
    }

    pub fn has_clients(&self) -> bool {
        !self.clients.is_empty()
    }

    pub(super) fn all_clients(&self) -> Vec<ClientId> {
        self.clients.keys().copied().collect()
    }

    /// The GPUs that a client has attached.
    pub(super) fn gpus_of(&self, client: ClientId) -> GpuSet {
        self.clients.get(&client).into_iter().flat_map(|entry| entry.gpus.keys().copied()).collect()
    }
}
