//! The scheduling loop's state: the machine, everybody it decides about, and the carrying out of its commands. All of
//! it belongs to one thread; a message that comes in has been answered, to everybody concerned, when its call returns.
//!
//! - `bundle`: what a debug bundle has of it.
//! - `clients`: who comes, what they say, who goes.
//! - `sharing`: memory that one program lets another use.
//! - `counts`: what is counted for metrics, which `metrics` makes a copy of.
//! - `measure`: what NVML and the host say of memory.
//! - `placement`: which GPUs a program is to see.
//! - `notes`: what is remembered for people, and logged.
//! - `rules`: who has which rule.
//! - `bounds`: what the driver is to bound of it.
//! - `traffic`: what moves between GPUs and the host, and who hears of thrashing.
//! - `views`: what people see.

mod bounds;
mod bundle;
mod clients;
mod counts;
mod measure;
mod metrics;
mod notes;
mod placement;
mod rules;
mod sharing;
mod traffic;
mod views;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{OpenOptions, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nvshare_wire::client::{EngineReason, GpuKind};

use nvshare_wire::{SchedulerMessage, scheduler as wire, version};
use tokio::sync::{Notify, watch};
use tracing::{debug, info, warn};

pub use traffic::Thrashing;
pub use views::{ClientView, printable};

use crate::bus;
use crate::config::rules::{EnvLimits, Instance};
use crate::config::{Config, names};
use crate::daemon::gpu::driver_limits::Wanted;
use crate::daemon::gpu::host_memory::HostMemory;
use crate::daemon::gpu::nvml::{Ask, DriverVersions, Sample};
use crate::daemon::gpu::overhead::{Accounting, History};
use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::daemon::logging::trace::Trace;
use crate::daemon::pods::Pods;
use crate::daemon::shared::Book;
use crate::daemon::systemd::fd_store::ConnectionName;
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::Session;
use crate::identity::Identity;
use crate::recorder::Recorder;
use crate::scheduler::{
    ClientId, Command, Denial, Event, GpuId, GpuSet, GroupId, Machine, MemoryReport, Settings, Time, WaitReason,
};
use crate::sys::clock::{self, Timer};

/// The machine asks for no tick sooner than this after one, so that a mistake in it cannot take a whole CPU.
const MIN_TICK: Duration = Duration::from_micros(100);

pub struct Hub {
    pub config: Config,
    machine: Machine,
    recorder: Recorder,
    clients: BTreeMap<ClientId, Client>,
    gpus: BTreeMap<GpuId, Gpu>,
    shared: Book,
    /// Those who count together under a rule, as the machine knows them.
    groups: BTreeMap<Instance, GroupId>,
    next_group: u64,
    next_gang: u64,
    /// What Kubernetes calls those that are here.
    pods: Pods,
    /// Processes that have a place for a program which is still to come.
    ahead: Vec<placement::Ahead>,
    /// Where clients connect, if that is known.
    directory: Option<PathBuf>,
    next_client: u64,
    timer: Rc<Timer>,
    armed: Option<Time>,
    /// When the machine was last given a tick.
    ticked: Time,
    started: Time,
    host: HostMemory,
    /// Processes whose connection has closed, and when: what they had on a GPU is still there for a moment.
    departed: BTreeMap<u32, Time>,
    stopped: BTreeSet<ClientId>,
    log_limit: LogRateLimit,
    counts: counts::Counts,
    trace: Option<Trace>,
    nvml: Option<std::sync::mpsc::Sender<Ask>>,
    driver: DriverVersions,
    /// The log has said that clients are believed.
    believed: bool,
    settings: watch::Sender<Settings>,
    thrashing: watch::Sender<Thrashing>,
    noted: BTreeMap<GpuId, traffic::Noted>,
    /// What the driver was last told to bound.
    bounded: Option<Wanted>,
    pub signals: Rc<Signals>,
}

/// What wakes the loop's background tasks.
#[derive(Debug, Default)]
pub struct Signals {
    /// A client is stopped, and has to be looked at until it runs again.
    pub stopped: Notify,
    /// Clients came or went, or locks moved.
    pub turns: Notify,
    /// The same, for those who follow it on D-Bus.
    pub holders: Notify,
    /// Somebody has a lock, or another one.
    pub grants: Notify,
    /// What the driver is to bound may be something else.
    pub limits: Notify,
    /// A client did something.
    pub activity: Notify,
    pub last_activity: Cell<Time>,
    pub clients: Cell<usize>,
}

/// A client that has been welcomed.
struct Client {
    connection: Rc<Connection>,
    session: Session,
    identity: Arc<Identity>,
    library: String,
    connected: SystemTime,
    uses: BTreeMap<GpuId, Use>,
    /// Its gang, as it calls that and as the machine does; 0: none.
    gang: (u64, u64),
    /// With whom it counts, under which rule.
    rule: Option<Instance>,
    /// What it says of itself.
    own: EnvLimits,
    /// What it was told that a rule allows it of each GPU's memory.
    foretold: BTreeMap<GpuId, u64>,
    /// What it was told by an earlier daemon, or on an earlier connection, may be something else.
    returns: bool,
    /// What systemd knows its connection by, if that outlives this daemon.
    kept: Option<ConnectionName>,
    /// It can be.
    lasts: bool,
}

/// A client that is let in.
pub struct Arrival {
    pub connection: Rc<Connection>,
    pub identity: Arc<Identity>,
    pub version: u16,
    pub gang: u64,
    pub library: String,
    /// Its connection can outlive this daemon.
    pub lasts: bool,
    /// It was welcomed before, here or by an earlier daemon.
    pub returns: bool,
}

/// What the machine does not remember of a client on one GPU.
struct Use {
    /// When it last had nothing to do with the lock.
    idle_since: Time,
    mapped: u64,
    allowance: u64,
    /// How much of its memory can have been mapped lately.
    history: History,
    limit: Option<u64>,
    /// Its own newest report.
    report: Option<MemoryReport>,
    /// Bytes of host memory that it holds.
    host: u64,
    /// When the log last said that it was refused memory.
    refused: Option<Time>,
    /// When the log last said that mapping its memory failed.
    failed: Option<Time>,
    /// When the log last said that its memory stays.
    eviction_blocked: Option<Time>,
    /// It gives the GPU work by a way that passes no gate.
    untracked_work: bool,
    /// Why it has its engine.
    reason: EngineReason,
}

struct Gpu {
    kind: GpuKind,
    name: String,
    total: u64,
    /// Its number for NVML; `None` while only clients know it.
    index: Option<u32>,
    /// The number of its device file, or of the GPU's that it is a slice of.
    minor: Option<u32>,
    accounting: Accounting,
    /// The newest measurement by NVML.
    sample: Option<Sample>,
}

impl Gpu {
    fn label(&self, gpu: GpuId) -> String {
        bus::gpu_name(self.kind, gpu)
    }

    fn is_slice(&self) -> bool {
        self.kind == GpuKind::Mig
    }
}

impl Hub {
    pub fn new(config: Config, trace: Option<Trace>, settings: watch::Sender<Settings>) -> std::io::Result<Self> {
        let machine = Machine::new(config.settings.clone());
        Ok(Self {
            recorder: Recorder::new(&machine),
            machine,
            config,
            clients: BTreeMap::new(),
            gpus: BTreeMap::new(),
            shared: Book::new(clock::now()),
            groups: BTreeMap::new(),
            next_group: 1,
            next_gang: 0,
            pods: Pods::default(),
            ahead: Vec::new(),
            directory: None,
            next_client: 1,
            timer: Rc::new(Timer::new()?),
            armed: None,
            ticked: Time::ZERO,
            started: clock::now(),
            host: HostMemory::default(),
            departed: BTreeMap::new(),
            stopped: BTreeSet::new(),
            log_limit: LogRateLimit::default(),
            counts: counts::Counts::default(),
            trace,
            nvml: None,
            driver: DriverVersions::default(),
            believed: false,
            settings,
            thrashing: watch::Sender::default(),
            noted: BTreeMap::new(),
            bounded: None,
            signals: Rc::default(),
        })
    }

    pub fn timer(&self) -> Rc<Timer> {
        self.timer.clone()
    }

    /// Has the files made there that clients need once there is no daemon.
    pub fn provide_in(&mut self, directory: &Path) {
        self.directory = Some(directory.to_owned());
    }

    /// The lock files by which clients take turns without a daemon. Where they cannot be made, clients find another place.
    fn provide(&self, gpu: GpuId) {
        let Some(directory) = &self.directory else { return };
        for what in ["turn", "lack", "here"] {
            let path = directory.join(format!("nvshare-{}.{what}", gpu.0));
            let file =
                OpenOptions::new().write(true).create(true).truncate(false).custom_flags(libc::O_NOFOLLOW).open(&path);
            // They are locked by who reads them, whatever our umask is.
            if let Err(e) = file.and_then(|file| file.set_permissions(Permissions::from_mode(0o644))) {
                debug!("cannot make {}: {e}", path.display());
            }
        }
    }

    pub fn use_nvml(&mut self, ask: std::sync::mpsc::Sender<Ask>) {
        self.nvml = Some(ask);
    }

    pub fn ask_nvml(&self, ask: Ask) {
        if let Some(nvml) = &self.nvml {
            let _ = nvml.send(ask);
        }
    }

    pub fn tick(&mut self) {
        self.armed = None;
        self.ticked = clock::now();
        self.apply(Event::Tick);
    }

    /// Gives the machine an event and carries out what it decides.
    fn apply(&mut self, event: Event) {
        let now = clock::now();
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            self.note_event(&event, now);
            self.count_event(&event, now);
            let reporter = match &event {
                Event::Memory { client, gpu, .. } => Some((*client, *gpu)),
                _ => None,
            };
            let commands = self.recorder.handle(&mut self.machine, now, event);
            let allowed = commands.iter().filter_map(|command| match command {
                Command::Allowance { client, gpu, .. } => Some((*client, *gpu)),
                _ => None,
            });
            let moved: Vec<(ClientId, GpuId)> = reporter.into_iter().chain(allowed).collect();
            for (client, gpu) in moved {
                self.record_extent(client, gpu, now);
            }
            for command in commands {
                if let Some(answer) = self.carry_out(command, now) {
                    events.push_back(answer);
                }
            }
            self.count_held(now);
        }
        let deadline = self.machine.deadline().map(|at| at.max(self.ticked + MIN_TICK));
        if deadline != self.armed {
            self.timer.set(deadline);
            self.armed = deadline;
        }
    }

    /// Remembers how much of a client's memory can be mapped from now on.
    fn record_extent(&mut self, client: ClientId, gpu: GpuId, now: Time) {
        let Some(extent) = self.machine.extent(client, gpu) else { return };
        if let Some(usage) = self.usage(client, gpu) {
            usage.history.record(now, extent);
        }
    }

    /// Sends what a command says to its client. A command that asks something is answered with an event.
    fn carry_out(&mut self, command: Command, now: Time) -> Option<Event> {
        self.note_command(&command, now);
        self.count_command(&command, now);
        let slot_of = |client: &ClientId, gpu: &GpuId| self.clients.get(client).and_then(|c| c.session.slot(*gpu));
        let slots_of = |client: &ClientId, gpus: &GpuSet| {
            self.clients.get(client).map(|c| c.session.slots(gpus)).filter(|slots| *slots != 0)
        };
        let (client, message) = match command {
            Command::Attached { client, gpu } => (client, SchedulerMessage::Attached { slot: slot_of(&client, &gpu)? }),
            Command::Limit { client, gpu, bytes, seq, most, spare, max } => {
                let (slot, max) = (slot_of(&client, &gpu)?, max.unwrap_or(0));
                (client, SchedulerMessage::Limit { slot, bytes, seq, most, spare, max })
            }
            Command::Reserved { client, gpu, bytes } => {
                (client, SchedulerMessage::Reserved { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Denied { client, gpu, bytes, why } => {
                let what = match why {
                    Denial::NoContext => wire::Denial::Context,
                    Denial::Unmappable => wire::Denial::Mapping,
                    _ => wire::Denial::Limit,
                };
                let version = self.clients.get(&client)?.session.version;
                if what != wire::Denial::Limit && version < version::DENIALS {
                    return None; // it would take that for the answer to a wish
                }
                (client, SchedulerMessage::Denied { slot: slot_of(&client, &gpu)?, bytes, what })
            }
            Command::Prepare { client, gpu, bytes } => {
                if self.clients.get(&client)?.session.version < version::LIMITS {
                    return None;
                }
                (client, SchedulerMessage::Prepare { slot: slot_of(&client, &gpu)?, bytes })
            }
            Command::Allowance { client, gpu, seq, bytes } => {
                (client, SchedulerMessage::Allowance { slot: slot_of(&client, &gpu)?, seq, bytes })
            }
            Command::Grant { client, gpus } => (client, SchedulerMessage::Grant { gpus: slots_of(&client, &gpus)? }),
            Command::Revoke { client, gpus } => (client, SchedulerMessage::Revoke { gpus: slots_of(&client, &gpus)? }),
            Command::Contended { client, gpus, waiters, grace } => {
                let grace_us = u32::try_from(grace.as_micros()).unwrap_or(u32::MAX);
                (client, SchedulerMessage::Contended { gpus: slots_of(&client, &gpus)?, waiters, grace_us })
            }
            Command::Waiting { client, gpus, why } => {
                let is_new = matches!(why, WaitReason::Context | WaitReason::Memory);
                if is_new && self.clients.get(&client)?.session.version < version::CONTEXT_WAIT {
                    return None;
                }
                (client, SchedulerMessage::Waiting { gpus: slots_of(&client, &gpus)?, why })
            }
            Command::Probe { client } => {
                let entry = self.clients.get(&client)?;
                let stopped = peer::is_stopped(entry.identity.pid);
                if stopped && self.stopped.insert(client) {
                    debug!(client = client.0, pid = entry.identity.pid, "the process is stopped");
                    self.signals.stopped.notify_one();
                }
                return Some(Event::Stopped { client, stopped });
            }
            Command::Measure { gpu } => return self.measure_anew(gpu, now),
            Command::Placed { client, gpus } => {
                self.placed(client, &gpus);
                return None;
            }
            Command::Unplaced { client, why } => {
                self.misfit(client, &why);
                return None;
            }
            Command::Undrainable { .. }
            | Command::EvictionBlocked { .. }
            | Command::Thrashing { .. }
            | Command::MappingFailed { .. } => return None,
        };
        self.send(client, message);
        None
    }

    fn send(&self, client: ClientId, message: SchedulerMessage) {
        if let Some(entry) = self.clients.get(&client) {
            entry.connection.send(message);
        }
    }

    /// Looks at those that were stopped. Returns whether any still is.
    pub fn check_stopped(&mut self) -> bool {
        let running: Vec<ClientId> = self
            .stopped
            .iter()
            .filter(|client| !self.clients.get(client).is_some_and(|c| peer::is_stopped(c.identity.pid)))
            .copied()
            .collect();
        for client in running {
            self.stopped.remove(&client);
            debug!(client = client.0, "the process runs again");
            self.apply(Event::Stopped { client, stopped: false });
        }
        !self.stopped.is_empty()
    }

    fn usage(&mut self, client: ClientId, gpu: GpuId) -> Option<&mut Use> {
        self.clients.get_mut(&client)?.uses.get_mut(&gpu)
    }

    fn active(&self) {
        let now = clock::now();
        let before = self.signals.last_activity.replace(now);
        if now.saturating_sub(before) > crate::daemon::SAMPLE_QUIET {
            self.signals.activity.notify_one();
        }
    }

    /// Puts a configuration into effect.
    pub fn configure(&mut self, config: Config) {
        let before = std::mem::replace(&mut self.config, config);
        self.config.rules.put_last(self.pods.wishes());
        if before.keep_connections != self.config.keep_connections {
            self.keep_as_configured();
        }
        if before.rules != self.config.rules {
            self.rule_anew(&before.rules);
        }
        if before.metrics != self.config.metrics {
            warn!("metrics are served where they were: [metrics] listen counts when the scheduler starts");
        }
        let settings = self.config.settings.clone();
        if *self.settings.borrow() != settings {
            info!(
                name: "settings-changed",
                time_quantum = settings.time_quantum.as_secs(),
                max_wait = settings.max_wait.as_secs(),
                anti_thrash = names::anti_thrash_name(settings.anti_thrash),
                policy = names::policy_name(settings.policy),
                "settings changed"
            );
            self.apply(Event::Configure(settings.clone()));
            self.settings.send_replace(settings);
        }
        self.sample_host();
        self.signals.limits.notify_one();
    }

    /// Tells every client that the daemon stops, by hanging up. Those whose connection is kept hear of it from systemd,
    /// if there is to be no other daemon.
    pub fn stop(&mut self) {
        for client in self.clients.values().filter(|client| client.kept.is_none()) {
            client.connection.close();
        }
    }
}
