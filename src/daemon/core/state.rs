//! [`Core`]: the scheduler's state machine, the daemon's records of clients and GPUs, and the state of
//! logging.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::convert::Infallible;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nvshare_wire::Secret;
use nvshare_wire::client::{EngineReason, GpuKind};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tracing::{info, warn};

use super::claims::Claims;
use super::event_log::Logged;
use super::gpus::Present;
use super::hours::Hours;
use super::lock_files::LockDirectories;
use super::moves::Reply;
use super::paused::Paused;
use super::pods::Pods;
use super::pressure::Pressure;
use super::refusals::Refusal;
use super::rooms::Room;
use super::saved::Saved;
use super::shared_memory::{Import, SharedMemoryRegistry};
use super::sleep::Checkpoint;
use super::swap_files::{FileUse, SwapFiles};
use super::units::Units;
use super::unproven::Unproven;
use super::usage::Usage;
use super::{bundle, counts, placement, sleep};
use crate::bus;
use crate::config::rules::{EnvLimits, Instance};
use crate::config::{Config, names, units};
use crate::daemon::gpu::accounting::{Accounting, History};
use crate::daemon::gpu::host_memory::{HostAhead, HostMemory};
use crate::daemon::gpu::nvml::{self, DriverVersions, Query, Sample};
use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::daemon::systemd::fd_store::ConnectionName;
use crate::daemon::tenants::{Budgets, Share};
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::session::Session;
use crate::identity::{Identity, Tenant};
use crate::recorder::Recorder;
use crate::scheduler::{ClientId, Event, GpuId, GroupId, Machine, MemoryReport, RoomId, Settings, Time};
use crate::sys::clock::{self, Timer};
use crate::sys::device_file::DeviceFile;

/// Clients count as idle if no client has sent a message for this long. While they are idle, memory is
/// sampled less often.
pub const SAMPLE_QUIET: Duration = Duration::from_secs(2);

/// The scheduler, and all the state that its decisions depend on.
pub struct Core {
    pub config: Config,
    pub(super) machine: Machine,
    pub(super) recorder: Recorder,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) gpus: BTreeMap<GpuId, Gpu>,
    pub(super) shared_memory: SharedMemoryRegistry,
    /// The scheduler's IDs of the groups that rules define.
    pub(super) groups: BTreeMap<Instance, GroupId>,
    pub(super) next_group: u64,
    pub(super) next_gang: u64,
    /// Gangs that have clients, by tenant and name.
    pub(super) gangs: BTreeMap<(Tenant, u64), Gang>,
    pub budgets: Arc<Budgets>,
    /// Time of the last measurement of host memory.
    pub(super) host_sampled: Time,
    /// Names of this node's pods, from Kubernetes.
    pub(super) pods: Pods,
    pub(super) claims: Claims,
    /// Placements that processes have requested for programs that they have not started yet.
    pub(super) pending_placements: Vec<placement::PendingPlacement>,
    pub(super) lock_files: LockDirectories,
    pub(super) next_client: u64,
    pub(super) timer: Rc<Timer>,
    /// The deadline that the timer is set to.
    pub(super) armed: Option<Time>,
    /// Time of the scheduler's last tick.
    pub(super) ticked: Time,
    pub(super) started: Time,
    pub(super) host: HostMemory,
    pub(super) host_ahead: HostAhead,
    pub(super) swap_files: SwapFiles,
    /// Disconnected processes by PID, with the time of the disconnect. The driver frees their GPU memory
    /// shortly afterwards.
    pub(super) departed: BTreeMap<u32, Time>,
    /// Identities of the clients that ended most recently. The recording contains only client IDs.
    pub(super) ended: VecDeque<(ClientId, Arc<Identity>)>,
    /// Processes that were refused memory, newest last. An entry is kept after its process has ended.
    pub(super) refusals: VecDeque<Refusal>,
    /// Programs that were refused for lack of a device file, newest last.
    pub(super) unproven: VecDeque<Unproven>,
    pub(super) stopped: BTreeSet<ClientId>,
    pub(super) log_limit: LogRateLimit,
    pub(super) units: Units,
    pub(super) counts: counts::Counts,
    pub(super) pressure: Pressure,
    pub(super) usage: Usage,
    pub(super) hours: Hours,
    pub(super) nvml: Option<std::sync::mpsc::Sender<Query>>,
    /// Whether NVML answers queries, is released, or fails.
    pub(super) nvml_state: nvml::NvmlState,
    pub(super) driver: DriverVersions,
    /// The log already says that clients' reports cannot be verified.
    pub(super) logged_unverified: bool,
    pub(super) settings: watch::Sender<Settings>,
    /// The error found in the configuration files when they were last read, and the configuration that is
    /// in effect instead.
    configuration_error: Option<String>,
    /// Why metrics are not served on the configured address.
    metrics_error: Option<String>,
    /// Why the GPU time that programs used earlier is unknown.
    usage_error: Option<String>,
    problems: watch::Sender<Vec<String>>,
    pub(super) present: watch::Sender<Present>,
    /// Number of attachments of programs to GPUs. `attached` is true if there are any.
    pub(super) attachments: usize,
    pub(super) attached: watch::Sender<bool>,
    /// True while the host is about to suspend.
    pub(super) suspended: bool,
    /// Sends requests to the checkpoint helpers.
    pub(super) checkpoints: Option<mpsc::UnboundedSender<Checkpoint>>,
    /// Time at which the daemon last found that checkpoints are impossible on this host.
    pub(super) no_checkpoints: Option<Time>,
    pub(super) paused: Paused,
    /// UUIDs of drained GPUs, including GPUs that are absent now.
    pub(super) drained: Saved<String>,
    /// Callers that await the move of a client to another GPU.
    pub(super) migrations: BTreeMap<ClientId, Reply>,
    /// Memory that is kept free at users' requests, and the number of the newest room.
    pub(super) rooms: BTreeMap<RoomId, Room>,
    pub(super) last_room: u64,
    pub signals: Rc<Signals>,
}

/// Wakes the periodic jobs.
#[derive(Debug, Default)]
pub struct Signals {
    /// A client's process is stopped. The job then checks the process until it continues.
    pub stopped: Notify,
    /// Clients connected or left, or a lock changed hands. Updates systemd's status line.
    pub turns: Notify,
    /// Clients connected or left, or a lock changed hands. Updates the D-Bus property `Holders`.
    pub holders: Notify,
    /// Clients connected or left. Triggers the signals on D-Bus.
    pub arrivals: Notify,
    /// A new GPU was found. Limits on that GPU must be sent to the clients.
    pub limits: Notify,
    /// A client sent a message after at least [`SAMPLE_QUIET`] without messages.
    pub activity: Notify,
    pub last_activity: Cell<Time>,
    /// Number of clients.
    pub clients: Cell<usize>,
}

/// Memory that the daemon asks a client to adopt.
#[derive(Default)]
pub(super) struct Adoptions {
    /// Memory that the client has not been asked to adopt yet.
    pub waiting: VecDeque<Import>,
    /// Number of requests to adopt memory that the client has not answered.
    pub asked: usize,
}

/// Clients whose kernels wait for each other, so that they must run together.
pub(super) struct Gang {
    /// The scheduler's number of this gang.
    pub number: u64,
    pub members: BTreeSet<ClientId>,
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
    /// The gang's number as sent by the client, and the scheduler's number for the gang. 0 stands for no
    /// gang.
    pub gang: (u64, u64),
    /// The client's rule, and the group whose limits the client shares.
    pub rule: Option<Instance>,
    /// The group has used up the `gpu-hours` of its rule.
    pub has_used_up: bool,
    /// Limits from the client's environment.
    pub env_limits: EnvLimits,
    /// Memory limits from rules that the daemon has sent to the client, in bytes by GPU.
    pub announced_limits: BTreeMap<GpuId, u64>,
    pub adoptions: Adoptions,
    /// The unknown exporter whose memory the client requested last, and the time of the first such
    /// request.
    pub asked_for: Option<(Secret, Time)>,
    /// The client was connected before. An earlier daemon may have sent it other limits.
    pub reconnects: bool,
    pub file_use: FileUse,
    /// The device files that the client has shown to be open.
    pub devices: BTreeSet<DeviceFile>,
    /// The client may be asleep, so it need not prove that it may use its GPUs: only the driver can put a
    /// process to sleep and wake it.
    pub is_exempt: bool,
    /// The process's pidfd. `None` if the daemon cannot see the process.
    pub process: Option<Rc<AsyncFd<OwnedFd>>>,
    /// The newest request to the checkpoint helper. Dropping it with the client cancels the request.
    pub checkpoint: Option<oneshot::Receiver<Infallible>>,
    /// The connection's name in systemd's descriptor store. `None` if the connection is not stored.
    pub stored_as: Option<ConnectionName>,
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
    /// Time at which the client last stopped holding or waiting for the lock.
    pub idle_since: Time,
    /// Bounds on the client's mapped memory in the recent past.
    pub history: History,
    pub logged: Logged,
    /// The client's newest report.
    pub report: Option<MemoryReport>,
    /// Bytes of host memory that the client uses.
    pub host: u64,
    /// Bytes that the client has in a swap file.
    pub in_file: u64,
    /// The client submits work in ways that bypass the library's gates.
    pub untracked_work: bool,
    /// Why the client uses its engine.
    pub reason: EngineReason,
}

pub(super) struct Gpu {
    /// The GPU reports errors.
    pub failing: bool,
    pub kind: GpuKind,
    pub name: String,
    /// The GPU's memory, in bytes.
    pub total: u64,
    /// NVML's index. `None` if NVML does not list the GPU and only clients have named it.
    pub index: Option<u32>,
    /// NVML no longer lists the GPU, but clients still use it.
    pub gone: bool,
    /// Minor number of the GPU's device file. A MIG slice has the number of its physical GPU.
    pub minor: Option<u32>,
    /// The GPU's compute capability.
    pub capability: Option<(i32, i32)>,
    pub accounting: Accounting,
    /// NVML's newest measurement.
    pub sample: Option<Sample>,
    /// A display is attached to the GPU.
    pub has_display: bool,
    /// Programs without nvshare use the GPU, or may use it.
    pub has_others: bool,
    /// The GPU's charge against the budget of the tenant whose client named it. `None` if NVML lists or
    /// has listed the GPU.
    pub named_by: Option<Share>,
}

impl Gpu {
    pub fn label(&self, gpu: GpuId) -> String {
        bus::gpu_name(self.kind, gpu)
    }

    pub fn is_slice(&self) -> bool {
        self.kind == GpuKind::Mig
    }
}

impl Core {
    /// Creates the state. `record`: the file for the scheduler's recording.
    ///
    /// # Errors
    /// The process has no file descriptors left, or the record cannot be written.
    pub fn new(config: Config, record: Option<File>, settings: watch::Sender<Settings>) -> std::io::Result<Self> {
        let machine = Machine::new(sleep::settings(&config, None));
        let mut recorder = Recorder::new(&machine);
        if let Some(file) = record {
            let header = bundle::header(clock::now(), DriverVersions::default(), true);
            recorder.write_to(file, &header, &machine)?;
        }
        settings.send_if_modified(|known| {
            known.clone_from(machine.settings());
            false
        });
        let budgets = Arc::new(Budgets::new(config.max_clients_per_tenant));
        Ok(Self {
            recorder,
            machine,
            config,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            shared_memory: SharedMemoryRegistry::new(clock::now()),
            groups: BTreeMap::new(),
            next_group: 1,
            next_gang: 0,
            gangs: BTreeMap::new(),
            budgets,
            host_sampled: Time::ZERO,
            pods: Pods::default(),
            claims: Claims::default(),
            pending_placements: Vec::new(),
            lock_files: LockDirectories::default(),
            next_client: 1,
            timer: Rc::new(Timer::new()?),
            armed: None,
            ticked: Time::ZERO,
            started: clock::now(),
            host: HostMemory::default(),
            host_ahead: HostAhead::default(),
            swap_files: SwapFiles::default(),
            departed: BTreeMap::new(),
            ended: VecDeque::new(),
            refusals: VecDeque::new(),
            unproven: VecDeque::new(),
            stopped: BTreeSet::new(),
            log_limit: LogRateLimit::default(),
            units: Units::default(),
            counts: counts::Counts::default(),
            pressure: Pressure::default(),
            usage: Usage::default(),
            hours: Hours::default(),
            nvml: None,
            nvml_state: nvml::NvmlState::Usable,
            driver: DriverVersions::default(),
            logged_unverified: false,
            settings,
            configuration_error: None,
            metrics_error: None,
            usage_error: None,
            problems: watch::Sender::default(),
            present: watch::Sender::default(),
            attachments: 0,
            attached: watch::Sender::default(),
            suspended: false,
            checkpoints: None,
            no_checkpoints: None,
            paused: Paused::default(),
            drained: Saved::default(),
            migrations: BTreeMap::new(),
            rooms: BTreeMap::new(),
            last_room: 0,
            signals: Rc::default(),
        })
    }

    /// Expires at the scheduler's next deadline.
    pub fn timer(&self) -> Rc<Timer> {
        self.timer.clone()
    }

    pub fn use_nvml(&mut self, queries: std::sync::mpsc::Sender<Query>) {
        self.nvml = Some(queries);
    }

    pub fn query_nvml(&self, query: Query) {
        if let Some(nvml) = &self.nvml {
            let _ = nvml.send(query);
        }
    }

    pub(super) fn stats(&mut self, client: ClientId, gpu: GpuId) -> Option<&mut ClientGpuStats> {
        self.clients.get_mut(&client)?.gpus.get_mut(&gpu)
    }

    pub(super) fn mark_active(&self) {
        let now = clock::now();
        let before = self.signals.last_activity.replace(now);
        if now.saturating_sub(before) > SAMPLE_QUIET {
            self.signals.activity.notify_one();
        }
    }

    /// Applies a configuration. `by`: the author of the change, for the log.
    pub fn configure(&mut self, config: Config, by: &str) {
        let before = std::mem::replace(&mut self.config, config);
        self.config.rules.put_last(self.claims.rules(), self.pods.rules());
        self.budgets.set_clients(self.config.max_clients_per_tenant);
        if before.rules != self.config.rules {
            self.reapply_rules(&before.rules);
        }
        if before.swap_file != self.config.swap_file {
            self.offer_swap_files();
        }
        if before.keep_usage != self.config.keep_usage {
            self.usage.keep(self.config.keep_usage);
        }
        if before.metrics != self.config.metrics {
            warn!("[metrics] listen changed; restart the scheduler to apply it");
        }
        let settings = sleep::settings(&self.config, self.driver.driver.as_deref());
        if *self.settings.borrow() != settings {
            let changes = changes(&self.settings.borrow(), &settings);
            info!(
                name: "settings-changed",
                time_quantum = settings.time_quantum.as_secs(),
                max_wait = settings.max_wait.as_secs(),
                anti_thrash = names::anti_thrash_name(settings.anti_thrash),
                policy = names::policy_name(settings.policy),
                by,
                "settings were changed by {by}: {changes}"
            );
            self.apply(Event::Configure(settings.clone()));
            self.settings.send_replace(settings);
        }
        self.sample_host();
    }

    pub fn set_configuration_error(&mut self, error: Option<String>) {
        self.configuration_error = error;
        self.publish_problems();
    }

    pub fn set_metrics_error(&mut self, error: Option<String>) {
        self.metrics_error = error;
        self.publish_problems();
    }

    /// Sentences about why the scheduler does not work as configured.
    pub fn problems(&self) -> watch::Receiver<Vec<String>> {
        self.problems.subscribe()
    }

    pub(super) fn driver_problem(&self) -> Option<String> {
        match &self.nvml_state {
            nvml::NvmlState::Failed(e) => Some(format!("the NVIDIA driver cannot be used: {e}")),
            nvml::NvmlState::Usable | nvml::NvmlState::Released => None,
        }
    }

    pub(super) fn set_usage_error(&mut self, error: String) {
        self.usage_error = Some(error);
        self.publish_problems();
    }

    /// Publishes the problems after a change.
    pub(super) fn publish_problems(&self) {
        let configuration = self.configuration_error.as_ref();
        let configuration = configuration.map(|error| format!("the configuration has an error: {error}"));
        let others = [self.metrics_error.clone(), self.usage_error.clone(), self.driver_problem()];
        let problems: Vec<String> = configuration.into_iter().chain(others.into_iter().flatten()).collect();
        if *self.problems.borrow() != problems {
            self.problems.send_replace(problems);
            self.signals.turns.notify_one(); // updates the status line
        }
    }

    /// Prepares the daemon's exit: closes the connections that systemd does not store. Stored
    /// connections stay open, and systemd closes them if no daemon takes them over.
    pub fn stop(&mut self) {
        for client in self.clients.values().filter(|client| client.stored_as.is_none()) {
            client.connection.close();
        }
    }
}

/// Describes the differences between settings, such as `time-quantum from 30s to 45s`. Leaves out
/// values that are formatted the same.
fn changes(before: &Settings, now: &Settings) -> String {
    let texts = |settings: &Settings| {
        let Settings {
            time_quantum,
            max_wait,
            time_period,
            anti_thrash,
            policy,
            placement,
            reserve,
            context,
            sleep_after,
        } = settings;
        [
            ("time-quantum", units::duration(*time_quantum)),
            ("max-wait", units::duration(*max_wait)),
            ("time-period", units::duration(*time_period)),
            ("anti-thrash", names::anti_thrash_name(*anti_thrash).to_owned()),
            ("policy", names::policy_name(*policy).to_owned()),
            ("placement", format!("{placement:?}").to_lowercase()),
            ("memory.reserve", units::size(*reserve)),
            ("memory.context", units::size(*context)),
            ("sleep-after", sleep_after.map_or_else(|| "never".to_owned(), units::duration)),
        ]
    };
    let both = texts(before).into_iter().zip(texts(now));
    let changed = both.filter(|((_, before), (_, now))| before != now);
    let changed = changed.map(|((name, before), (_, now))| format!("{name} from {before} to {now}"));
    changed.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_name_the_old_and_the_new_value() {
        let before = Config::default().settings;
        let now = Settings { time_quantum: Duration::from_secs(45), sleep_after: None, ..before.clone() };
        assert_eq!(changes(&before, &before), "");
        assert!(changes(&before, &now).starts_with("time-quantum from 30s to 45s, sleep-after from "));
    }
}
