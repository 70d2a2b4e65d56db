//! [`Core`]: the machine, its clients and GPUs, and the state of the log.

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

/// Clients are idle when no message has come from any of them for this long: memory is then sampled less often.
pub const SAMPLE_QUIET: Duration = Duration::from_secs(2);

/// The machine and all that it decides about.
pub struct Core {
    pub config: Config,
    pub(super) machine: Machine,
    pub(super) recorder: Recorder,
    pub(super) clients: BTreeMap<ClientId, Client>,
    pub(super) gpus: BTreeMap<GpuId, Gpu>,
    pub(super) shared_memory: SharedMemoryRegistry,
    /// The machine's ids of the groups that rules define.
    pub(super) groups: BTreeMap<Instance, GroupId>,
    pub(super) next_group: u64,
    pub(super) next_gang: u64,
    /// Gangs with clients, by the tenant and the name.
    pub(super) gangs: BTreeMap<(Tenant, u64), Gang>,
    pub budgets: Rc<Budgets>,
    /// When host memory was last measured.
    pub(super) host_sampled: Time,
    /// Kubernetes' names of the pods of this node.
    pub(super) pods: Pods,
    pub(super) claims: Claims,
    /// Processes to which GPUs were assigned for a program that they are yet to start.
    pub(super) pending_placements: Vec<placement::PendingPlacement>,
    pub(super) lock_files: LockDirectories,
    pub(super) next_client: u64,
    pub(super) timer: Rc<Timer>,
    /// Time that the timer is set to.
    pub(super) armed: Option<Time>,
    /// Time of the machine's last tick.
    pub(super) ticked: Time,
    pub(super) started: Time,
    pub(super) host: HostMemory,
    pub(super) host_ahead: HostAhead,
    pub(super) swap_files: SwapFiles,
    /// Processes that have disconnected, and when: their GPU memory is freed only a moment later.
    pub(super) departed: BTreeMap<u32, Time>,
    /// Processes of the clients that have ended last: the recording has only their ids.
    pub(super) ended: VecDeque<(ClientId, Arc<Identity>)>,
    /// Processes that were refused memory, the newest last; also after they have ended.
    pub(super) refusals: VecDeque<Refusal>,
    pub(super) stopped: BTreeSet<ClientId>,
    pub(super) log_limit: LogRateLimit,
    pub(super) counts: counts::Counts,
    pub(super) pressure: Pressure,
    pub(super) usage: Usage,
    pub(super) hours: Hours,
    pub(super) nvml: Option<std::sync::mpsc::Sender<Query>>,
    /// Whether NVML answers queries.
    pub(super) nvml_state: nvml::State,
    pub(super) driver: DriverVersions,
    /// The log has said that clients' reports cannot be verified.
    pub(super) logged_unverified: bool,
    pub(super) settings: watch::Sender<Settings>,
    /// The error of the configuration files when they were last read, and the configuration in effect instead.
    configuration_error: Option<String>,
    /// Why metrics are not served where the configuration says.
    metrics_error: Option<String>,
    problems: watch::Sender<Vec<String>>,
    pub(super) present: watch::Sender<Present>,
    /// How often programs have attached GPUs, and whether they have any.
    pub(super) attachments: usize,
    pub(super) attached: watch::Sender<bool>,
    /// The machine is about to sleep.
    pub(super) asleep: bool,
    /// Has processes taken off their GPUs and put back.
    pub(super) checkpoints: Option<mpsc::UnboundedSender<Checkpoint>>,
    /// When it was last found that nothing here can do that.
    pub(super) no_checkpoints: Option<Time>,
    /// Clients that may be off their GPUs, where no helper can tell.
    pub(super) undetermined: BTreeSet<ClientId>,
    pub(super) paused: Paused,
    /// UUIDs of GPUs that are drained, whether they are there or not.
    pub(super) drained: Saved<String>,
    /// Who waits for a client to be on another GPU.
    pub(super) migrations: BTreeMap<ClientId, Reply>,
    /// Memory that is kept free for users, and the newest number of such a room.
    pub(super) rooms: BTreeMap<RoomId, Room>,
    pub(super) last_room: u64,
    pub signals: Rc<Signals>,
}

/// Wakes the periodic jobs.
#[derive(Debug, Default)]
pub struct Signals {
    /// A client's process is stopped: it is checked until it runs again.
    pub stopped: Notify,
    /// Clients came or went, or locks moved: for the status line of systemd.
    pub turns: Notify,
    /// The same, for the D-Bus property `Holders`.
    pub holders: Notify,
    /// Clients came or went, for the signals on D-Bus.
    pub arrivals: Notify,
    /// There is another GPU: clients are to be told their limits on it.
    pub limits: Notify,
    /// A client did something after [`SAMPLE_QUIET`].
    pub activity: Notify,
    pub last_activity: Cell<Time>,
    /// Number of clients.
    pub clients: Cell<usize>,
}

/// Memory that a client is to adopt.
#[derive(Default)]
pub(super) struct Adoptions {
    /// What it has not been told yet.
    pub waiting: VecDeque<Import>,
    /// Number of those that it has been told and has not answered.
    pub asked: usize,
}

/// Clients whose kernels wait for each other.
pub(super) struct Gang {
    /// The machine's number.
    pub number: u64,
    pub members: BTreeSet<ClientId>,
}

/// A client that has been welcomed.
pub(super) struct Client {
    pub connection: Rc<Connection>,
    pub session: Session,
    pub identity: Arc<Identity>,
    pub library: String,
    pub connected: SystemTime,
    /// The GPUs that it is attached to.
    pub gpus: BTreeMap<GpuId, ClientGpuStats>,
    /// Its gang, by the number that the client sent and by the machine's; 0: none.
    pub gang: (u64, u64),
    /// Its rule, and the group that it counts with.
    pub rule: Option<Instance>,
    /// That group has used up its `gpu-hours`.
    pub has_used_up: bool,
    /// Limits from its environment.
    pub env_limits: EnvLimits,
    /// The memory limits by rule that were announced to it, bytes by GPU.
    pub announced_limits: BTreeMap<GpuId, u64>,
    pub adoptions: Adoptions,
    /// The exporter that it asked for last and that is not known, and when it did so first.
    pub asked_for: Option<(Secret, Time)>,
    /// It was connected before, and may have received other limits then.
    pub reconnects: bool,
    pub file_use: FileUse,
    /// A pidfd, if its process is visible here.
    pub process: Option<Rc<AsyncFd<OwnedFd>>>,
    /// Of the newest request to the checkpoint helper: dropped with the client, it takes that back.
    pub checkpoint: Option<oneshot::Receiver<Infallible>>,
    /// The name of its connection in systemd's descriptor store, if it is there.
    pub stored_as: Option<ConnectionName>,
    /// Of a lock that was acquired over D-Bus, which has no memory; `None` for a program with the library.
    pub lock: Option<Rc<LockFiles>>,
}

/// The descriptors by which a lock over D-Bus outlives the daemon.
#[derive(Debug)]
pub struct LockFiles {
    /// The other end of the socket that the caller of `AcquireLock` has.
    pub owner: UnixStream,
    /// A file in memory with what the next daemon has to know; `connections::lock` writes it.
    pub record: File,
}

/// A client about to be welcomed.
pub struct Arrival {
    pub connection: Rc<Connection>,
    pub identity: Arc<Identity>,
    pub version: u16,
    /// The number of its gang, as the client sent it; 0: none.
    pub gang: u64,
    pub library: String,
    /// As in the client's entry.
    pub lock: Option<Rc<LockFiles>>,
    /// It was connected before, to this daemon or an earlier one.
    pub reconnects: bool,
    /// It has been told to sleep by an earlier scheduler.
    pub is_asleep: bool,
    /// A pidfd, if it is visible here.
    pub process: Option<Rc<AsyncFd<OwnedFd>>>,
}

/// State of a client on one GPU that the machine does not keep.
pub(super) struct ClientGpuStats {
    /// When it attached the GPU.
    pub attached: Time,
    /// When it last neither held nor awaited the lock.
    pub idle_since: Time,
    /// Bytes.
    pub mapped: u64,
    /// Bytes.
    pub allowance: u64,
    /// Bounds on its mapped memory in the recent past.
    pub history: History,
    /// Bytes.
    pub limit: Option<u64>,
    /// Its own newest report.
    pub report: Option<MemoryReport>,
    /// Bytes of host memory that it holds.
    pub host: u64,
    /// Bytes that it has in a swap file.
    pub in_file: u64,
    /// When the log last said that it was refused memory.
    pub refusal_logged: Option<Time>,
    /// When the log last said that mapping its memory failed.
    pub failure_logged: Option<Time>,
    /// When the log last said that its memory cannot be evicted.
    pub eviction_block_logged: Option<Time>,
    /// It submits work in a way that passes no gate.
    pub untracked_work: bool,
    /// Why it has its engine.
    pub reason: EngineReason,
}

pub(super) struct Gpu {
    /// It reports errors.
    pub failing: bool,
    pub kind: GpuKind,
    pub name: String,
    /// Bytes.
    pub total: u64,
    /// NVML's index; `None` while only clients know the GPU.
    pub index: Option<u32>,
    /// NVML knew it and no longer lists it, and clients still use it.
    pub gone: bool,
    /// Minor number of its device file; a MIG slice has its GPU's.
    pub minor: Option<u32>,
    /// Its compute capability.
    pub capability: Option<(i32, i32)>,
    pub accounting: Accounting,
    /// The newest measurement by NVML.
    pub sample: Option<Sample>,
    /// A display is attached to it.
    pub has_display: bool,
    /// Programs that are no clients use it, or may.
    pub has_others: bool,
    /// The part of a tenant's budget that it is, if a client named it and NVML does not list it.
    pub _named_by: Option<Share>,
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
    /// `record`: a file for what the recorder records.
    ///
    /// # Errors
    /// If the process has no file descriptors left, or the record cannot be written.
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
        let budgets = Rc::new(Budgets::new(config.max_clients_per_tenant));
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
            stopped: BTreeSet::new(),
            log_limit: LogRateLimit::default(),
            counts: counts::Counts::default(),
            pressure: Pressure::default(),
            usage: Usage::default(),
            hours: Hours::default(),
            nvml: None,
            nvml_state: nvml::State::Usable,
            driver: DriverVersions::default(),
            logged_unverified: false,
            settings,
            configuration_error: None,
            metrics_error: None,
            problems: watch::Sender::default(),
            present: watch::Sender::default(),
            attachments: 0,
            attached: watch::Sender::default(),
            asleep: false,
            checkpoints: None,
            no_checkpoints: None,
            undetermined: BTreeSet::new(),
            paused: Paused::default(),
            drained: Saved::default(),
            migrations: BTreeMap::new(),
            rooms: BTreeMap::new(),
            last_room: 0,
            signals: Rc::default(),
        })
    }

    /// Expires at the machine's next deadline.
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

    /// Applies a configuration. `by`: who changed it, for the log.
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

    /// Sentences about what keeps the scheduler from working as it is set up.
    pub fn problems(&self) -> watch::Receiver<Vec<String>> {
        self.problems.subscribe()
    }

    pub(super) fn driver_problem(&self) -> Option<String> {
        match &self.nvml_state {
            nvml::State::Failed(e) => Some(format!("the NVIDIA driver cannot be used: {e}")),
            nvml::State::Usable | nvml::State::Released => None,
        }
    }

    /// Publishes them after a change.
    pub(super) fn publish_problems(&self) {
        let configuration = self.configuration_error.as_ref();
        let configuration = configuration.map(|error| format!("the configuration has an error: {error}"));
        let others = [self.metrics_error.clone(), self.driver_problem(), self.undetermined_problem()];
        let problems: Vec<String> = configuration.into_iter().chain(others.into_iter().flatten()).collect();
        if *self.problems.borrow() != problems {
            self.problems.send_replace(problems);
            self.signals.turns.notify_one(); // for the status line
        }
    }

    /// Closes connections because the daemon stops. Connections in systemd's descriptor store stay open: systemd closes them
    /// if no other daemon follows.
    pub fn stop(&mut self) {
        for client in self.clients.values().filter(|client| client.stored_as.is_none()) {
            client.connection.close();
        }
    }
}

/// The differences between settings as text, such as `time-quantum from 30s to 45s`. Values that read the same are left out.
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
