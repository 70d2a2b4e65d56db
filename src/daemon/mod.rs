//! The daemon: everything around the machine that touches the world.
//!
//! - `control`: what administrators ask of it.
//! - `changes`: settings that were changed at run time.
//! - `clients`: the clients' connections, with `session` for what they may say, `outbox` for what they have not read
//!   yet, `peer` for who they are and `complaints` for how often the log hears of them.
//! - `pods`: what Kubernetes calls them.
//! - `node`: whether a daemon in a pod sees the processes of its node.
//! - `resume`: connections that outlive the daemon.
//! - `lock`: GPU locks for those who ask over D-Bus.
//! - `core`: the machine and everybody it decides about, with `shared` for memory that one program lets another use.
//! - `host`: the host's memory.
//! - `gpus`: NVML, with `accounting` for what follows from it, and `traffic` for what moves, of which `uvm` knows some.
//! - `driver_limits`: what the driver itself is to bound.
//! - `bus`: the D-Bus object, in a thread of its own. `bundle`: debug bundles.
//! - `metrics`: metrics for monitoring, in a thread of its own, where somebody has asked for them.
//! - `status`: what `systemctl status` shows.
//! - `systemd`, [`log`], `trace`: sockets and notifications, the log, the event trace; `journal` and `messages` are the log
//!   as the journal has it.
//!
//! One thread, this one, runs the scheduling loop; nothing that can take long happens on it.

mod bus;
mod changes;
mod clients;
mod control;
mod core;
mod gpu;
mod lock;
mod logging;
mod metrics;
mod node;
mod resume;
mod status;
mod systemd;
mod transport;

use std::cell::RefCell;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::{LocalSet, spawn_local};
use tracing::{error, info, warn};

use self::core::views::Holders;
use self::core::{Core, SAMPLE_QUIET};
use crate::config::paths::CLIENTS_SOCKET;
use crate::config::{Config, LogLevel};
use crate::sys::listen::{self, Bound};
use crate::sys::socket::Kind;
use crate::sys::{clock, descriptors, privileges};
use bus::{Bus, BusServer};
use changes::Changes;
use control::Control;
use gpu::nvml::Query;
use systemd::fd_store::StoredConnection;

/// Anybody may be a client: what a client is allowed is decided by who it is, not by the file's mode.
const CLIENTS_MODE: u32 = 0o666;
const CONTROL_MODE: u32 = 0o660;

/// How long NVML's first answers are waited for.
const FIRST_LOOK: Duration = Duration::from_secs(1);
/// How often memory is sampled while clients do something, and while they do nothing.
const SAMPLE_BUSY: Duration = Duration::from_millis(200);
const SAMPLE_IDLE: Duration = Duration::from_secs(5);

/// How often the bus is told who holds which lock, at most.
const FOLLOWED: Duration = Duration::from_millis(100);

/// How often the driver's limits change, at most. Programs try for longer to get memory that was promised to them.
const BOUNDED: Duration = Duration::from_millis(20);

/// How often traffic is measured where it matters. NVML counts for 20 ms each way.
const TRAFFIC_PERIOD: Duration = Duration::from_secs(1);

/// How often a stopped process is looked at.
const STOPPED_PERIOD: Duration = Duration::from_millis(200);

/// How long limits in the driver are waited for to be gone when the daemon stops.
const LIFT_PATIENCE: Duration = Duration::from_secs(3);

/// How long the daemon waits for its bus name before it says that it is ready.
const BUS_PATIENCE: Duration = Duration::from_secs(2);

/// What the command line says.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// Where clients connect, unless systemd passes that socket.
    pub socket: Option<PathBuf>,
    pub control_socket: Option<PathBuf>,
    pub config: Option<PathBuf>,
    pub log_level: Option<LogLevel>,
    pub trace: Option<PathBuf>,
    /// The address of the bus, instead of the system's.
    pub bus_address: Option<String>,
    pub no_bus: bool,
    /// It is a node's scheduler, in a pod.
    pub in_pod: bool,
}

/// Why the daemon cannot start, as a sentence.
#[derive(Debug)]
pub struct StartError {
    text: String,
    /// It is in the journal already.
    pub is_logged: bool,
}

impl StartError {
    fn new(text: impl fmt::Display) -> Self {
        Self { text: text.to_string(), is_logged: false }
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for StartError {}

/// Runs until SIGTERM or SIGINT. Call it from the only thread of the process.
pub fn run(options: Options) -> Result<(), StartError> {
    let config = Config::load(options.config.as_deref());
    let level = config.as_ref().map_or(LogLevel::Info, |config| config.log_level);
    let log = logging::start(options.log_level.unwrap_or(level));
    let result = config.map_err(StartError::new).and_then(|config| run_logged(options, config, log.clone()));
    let result = result.map_err(|mut e| {
        if log.is_journal() {
            error!(name: "cannot-start", "{e}");
            e.is_logged = true;
        }
        e
    });
    log.flush();
    result
}

fn run_logged(options: Options, mut config: Config, log: logging::Control) -> Result<(), StartError> {
    if let Err(e) = descriptors::raise_limit() {
        warn!("cannot raise the limit of file descriptors: {e}");
    }
    if options.in_pod {
        node::sees_the_host().map_err(StartError::new)?;
    }
    let sockets = Sockets::open(&options, &config)?;
    let state = std::env::var_os("STATE_DIRECTORY").map(PathBuf::from);
    let sets_limits = config.driver_limits || gpu::driver_limits::are_left(state.as_deref());
    let unsure = |e| StartError::new(format!("cannot be sure to have no privilege: {e}"));
    let nvml = gpu::nvml::Thread::new(sets_limits).map_err(unsure)?;
    // `/proc` and NVML answer everybody. As a service it has none from the beginning.
    privileges::keep(&[]).map_err(unsure)?;
    // From here on there are other threads, which have no more than this one.
    log.begin();
    systemd::start();
    let changes = Changes::open(state.as_deref());
    changes.apply(&mut config);
    let trace = options.trace.as_deref().map(logging::trace::Trace::create).transpose();
    let trace = trace.map_err(|e| StartError::new(format!("cannot write the trace: {e}")))?;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|e| StartError::new(format!("cannot start: {e}")))?;
    let result = LocalSet::new()
        .block_on(&runtime, serve(Control { options, log, changes }, config, sockets, trace, (nvml, state)));
    result.map_err(|e| StartError::new(format!("cannot start: {e}")))
}

/// The listening sockets, and what removes those that we bound ourselves.
struct Sockets {
    clients: OwnedFd,
    control: Option<OwnedFd>,
    metrics: Vec<OwnedFd>,
    clients_path: PathBuf,
    kept: Vec<StoredConnection>,
    unknown: Vec<String>,
    /// Its directory stays when this daemon ends.
    in_lasting_directory: bool,
    _bound: Vec<Bound>,
}

impl Sockets {
    fn open(options: &Options, config: &Config) -> Result<Self, StartError> {
        let given = systemd::activated().map_err(StartError::new)?;
        let mut bound = Vec::new();
        let clients_path = options.socket.clone().unwrap_or_else(|| CLIENTS_SOCKET.into());
        let mut in_lasting_directory = true;
        let clients = match given.clients {
            Some(socket) => socket,
            None => {
                let (socket, ours) =
                    listen::listen(&clients_path, Kind::Packets, CLIENTS_MODE).map_err(StartError::new)?;
                in_lasting_directory = !ours.created_directory();
                bound.push(ours);
                socket
            }
        };
        let control = match given.control {
            Some(socket) => Some(socket),
            None => {
                let path = options.control_socket.clone().unwrap_or_else(|| control_path(&clients_path));
                match listen::listen(&path, Kind::Stream, CONTROL_MODE) {
                    Ok((socket, ours)) => {
                        bound.push(ours);
                        Some(socket)
                    }
                    Err(e) if options.control_socket.is_some() => return Err(StartError::new(e)),
                    Err(e) => {
                        warn!("there is no control socket: {e}");
                        None
                    }
                }
            }
        };
        let mut metrics = given.metrics;
        if let Some((socket, ours)) = metrics::listen::bind(&config.metrics).map_err(StartError::new)? {
            metrics.push(socket);
            bound.extend(ours);
        }
        let (kept, unknown) = (given.kept, given.unknown);
        Ok(Self { clients, control, metrics, clients_path, kept, unknown, in_lasting_directory, _bound: bound })
    }
}

/// The control socket that belongs to a clients' socket: in a directory beside that one's, never inside it.
fn control_path(clients: &Path) -> PathBuf {
    let directory = clients.parent().filter(|d| d.file_name().is_some()).unwrap_or(Path::new("nvshare"));
    let mut control = directory.as_os_str().to_owned();
    control.push("-control");
    Path::new(&control).join("control.sock")
}

/// The scheduling loop.
async fn serve(
    mut control: Control,
    config: Config,
    sockets: Sockets,
    trace: Option<logging::trace::Trace>,
    (nvml, state): (gpu::nvml::Thread, Option<PathBuf>),
) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let Sockets {
        clients,
        control: control_socket,
        metrics,
        clients_path,
        kept,
        unknown,
        in_lasting_directory,
        _bound,
    } = sockets;
    unknown.iter().for_each(|name| systemd::forget(name));
    let (settings, watching) = watch::channel(config.settings.clone());
    let core = Rc::new(RefCell::new(Core::new(config, trace, settings)?));

    if let Some(directory) = clients_path.parent().filter(|_| in_lasting_directory) {
        core.borrow_mut().create_lock_files_in(directory);
    }
    let (report, mut reports) = mpsc::unbounded_channel();
    if let Some(ask) = nvml.start(report, state.as_deref()) {
        core.borrow_mut().use_nvml(ask);
        // Which GPUs there are, and what is in use there: before anybody is told what there is room for.
        let first = async {
            for _ in 0..2 {
                let Some(report) = reports.recv().await else { return };
                core.borrow_mut().nvml_report(report);
            }
        };
        if tokio::time::timeout(FIRST_LOOK, first).await.is_err() {
            info!("NVML takes long to say what GPUs there are");
        }
    }
    let (request, mut requests) = mpsc::unbounded_channel();
    let bus = match &control.options {
        Options { no_bus: true, .. } | Options { in_pod: true, .. } => Bus::None,
        Options { bus_address: Some(address), .. } => Bus::Address(address.clone()),
        _ => Bus::System,
    };
    let (holders, following) = watch::channel(Holders::new());
    let followed =
        bus::Followed { settings: watching, holders: following, thrashing: core.borrow().follow_thrashing() };
    let (bus, attempted) = BusServer::start(bus, control_socket, request, followed)?;
    spawn_local(follow(core.clone(), holders));
    let (question, mut questions) = mpsc::unbounded_channel();
    metrics::start(metrics, question)?;

    let (done, mut resumed) = watch::channel(false);
    let shared = Rc::new(clients::Shared::new(resumed.clone()));
    spawn_local({
        let (core, shared) = (core.clone(), shared.clone());
        async move {
            resume::all(&core, kept, &shared).await;
            done.send_replace(true);
        }
    });
    spawn_local({
        let (core, shared) = (core.clone(), shared.clone());
        async move {
            if let Err(e) = clients::accept(core, clients, shared).await {
                error!("cannot accept programs any more: {e}");
            }
        }
    });
    spawn_local(ticks(core.clone()));
    spawn_local(sample(core.clone()));
    spawn_local(watch_stopped(core.clone()));
    spawn_local(watch_traffic(core.clone()));
    spawn_local(bound(core.clone()));
    spawn_local({
        let core = core.clone();
        async move {
            let _ = resumed.wait_for(|resumed| *resumed).await;
            let _ = tokio::time::timeout(BUS_PATIENCE, attempted).await;
            systemd::ready();
            if systemd::is_there() {
                status::keep_current(core).await;
            }
        }
    });
    info!(name: "started", "nvshare-scheduler {} serves {}", env!("CARGO_PKG_VERSION"), clients_path.display());

    let watchdog = systemd::watchdog_period();
    let mut feed = tokio::time::interval(watchdog.unwrap_or(Duration::from_secs(3600)));
    loop {
        tokio::select! {
            // The machine has to get through an event, or systemd hears nothing.
            _ = feed.tick(), if watchdog.is_some() => {
                core.borrow_mut().tick();
                systemd::watchdog();
            }
            Some(report) = reports.recv() => core.borrow_mut().nvml_report(report),
            Some(reply) = questions.recv() => drop(reply.send(core.borrow().snapshot())),
            Some(request) = requests.recv() => control.answer(&core, &shared, request),
            _ = hang_up.recv() => {
                let _ = control.reload(&core);
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    systemd::stopping();
    info!(name: "stopping", "nvshare-scheduler stops");
    core.borrow_mut().stop();
    let lifted = core.borrow().lift_driver_limits();
    let _ = tokio::time::timeout(LIFT_PATIENCE, lifted).await;
    bus.stop();
    Ok(())
}

/// Has the driver bound what it is to bound, once for all that changes at about the same moment.
async fn bound(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().signals.clone();
    loop {
        core.borrow_mut().update_driver_limits();
        tokio::time::sleep(BOUNDED).await;
        signals.limits.notified().await;
    }
}

/// Tells the bus who holds which lock: turns change many times a second, and what is told does not.
async fn follow(core: Rc<RefCell<Core>>, holders: watch::Sender<Holders>) {
    let signals = core.borrow().signals.clone();
    loop {
        signals.holders.notified().await;
        let now = core.borrow().holders();
        holders.send_if_modified(|told| {
            let changed = *told != now;
            *told = now;
            changed
        });
        tokio::time::sleep(FOLLOWED).await;
    }
}

async fn ticks(core: Rc<RefCell<Core>>) {
    let timer = core.borrow().timer();
    while timer.expired().await.is_ok() {
        core.borrow_mut().tick();
    }
}

/// Asks how much memory is in use: often while clients do something, rarely while they do nothing, never without any.
async fn sample(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().signals.clone();
    core.borrow_mut().sample_host();
    loop {
        if signals.clients.get() == 0 {
            // Once more when everything of the last one is gone: the next one is told what there is.
            tokio::time::sleep(SAMPLE_BUSY).await;
            core.borrow().query_nvml(Query::Sample);
            signals.activity.notified().await;
        }
        core.borrow().query_nvml(Query::Sample);
        core.borrow_mut().sample_host();
        if clock::now().saturating_sub(signals.last_activity.get()) < SAMPLE_QUIET {
            tokio::time::sleep(SAMPLE_BUSY).await;
        } else {
            let _ = tokio::time::timeout(SAMPLE_IDLE, signals.activity.notified()).await;
        }
    }
}

/// Asks for the figures for as long as they can matter, and then waits until they can again.
async fn watch_traffic(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().signals.clone();
    loop {
        if core.borrow().may_thrash() {
            core.borrow().query_traffic();
            tokio::time::sleep(TRAFFIC_PERIOD).await;
        } else {
            signals.grants.notified().await;
        }
    }
}

async fn watch_stopped(core: Rc<RefCell<Core>>) {
    let signals = core.borrow().signals.clone();
    loop {
        signals.stopped.notified().await;
        loop {
            tokio::time::sleep(STOPPED_PERIOD).await;
            if !core.borrow_mut().check_stopped() {
                break;
            }
        }
    }
}
