//! Startup, the scheduling loop and shutdown.

use std::cell::{Cell, RefCell};
use std::fmt::Display;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tracing::{error, info, warn};

use crate::config::paths::CLIENTS_SOCKET;
use crate::config::{Config, LogLevel};
use crate::daemon::bus::{self, Bus, BusServer};
use crate::daemon::checkpoint::{self, Helpers};
use crate::daemon::connections::claims::ClaimSockets;
use crate::daemon::connections::{Connections, accept, resume};
use crate::daemon::control::Control;
use crate::daemon::control::changes::Changes;
use crate::daemon::control::last_good::{self, Fallback, LastGood};
use crate::daemon::control::views::{self, Views};
use crate::daemon::core::Core;
use crate::daemon::gpu::nvml::{self, Report};
use crate::daemon::logging;
use crate::daemon::systemd::fd_store::{Inherited, StoredConnection};
use crate::daemon::tenants::Budgets;
use crate::daemon::{metrics, node, systemd, tasks};
use crate::sys::listen::{self, Bound};
use crate::sys::socket::Kind;
use crate::sys::{descriptors, privileges};

/// Every user may connect. A client's rights depend on its identity, not on the mode of the socket.
const CLIENTS_MODE: u32 = 0o666;
const CONTROL_MODE: u32 = 0o660;

/// Maximum time to wait for NVML's first reports.
const FIRST_REPORTS_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum time to wait for the name on the bus, before systemd is notified that the daemon is ready.
const BUS_TIMEOUT: Duration = Duration::from_secs(2);

/// Maximum time to wait at shutdown until usage is saved.
const USAGE_PATIENCE: Duration = Duration::from_secs(2);

/// The command line.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The path of the clients' socket if systemd does not pass it.
    pub socket: Option<PathBuf>,
    pub control_socket: Option<PathBuf>,
    pub config: Option<PathBuf>,
    pub log_level: Option<LogLevel>,
    /// The file for the scheduler's recording.
    pub record: Option<PathBuf>,
    /// The address of the bus to use instead of the system bus.
    pub bus_address: Option<String>,
    pub no_bus: bool,
    /// The daemon is a node's scheduler and runs in a pod.
    pub in_pod: bool,
    /// The parent of the directories with the ResourceClaims' sockets.
    pub claims: Option<PathBuf>,
    /// Overrides the configured time quantum. A change at run time overrides both.
    pub time_quantum: Option<Duration>,
}

/// The reason why the daemon cannot start, as a sentence.
#[derive(Debug, thiserror::Error)]
#[error("{text}")]
pub struct StartError {
    text: String,
    /// The journal already contains the error.
    pub is_logged: bool,
}

impl StartError {
    fn new(text: impl Display) -> Self {
        Self { text: text.to_string(), is_logged: false }
    }
}

/// Runs the daemon until SIGTERM or SIGINT. Must be called while the process has only one thread.
///
/// # Errors
/// The daemon cannot start.
pub fn run(options: Options) -> Result<(), StartError> {
    let state = std::env::var_os("STATE_DIRECTORY").map(PathBuf::from);
    let log = logging::start(options.log_level.unwrap_or(LogLevel::Info));
    let result = Configuration::load(&options, state.as_deref()).and_then(|configuration| {
        log.set(options.log_level.unwrap_or(configuration.config.log_level));
        run_logged(options, configuration, state, log.clone())
    });
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

/// The configuration at startup.
struct Configuration {
    config: Config,
    /// The error in the configuration files, if they are invalid and this configuration replaces them.
    error: Option<String>,
    is_default: bool,
    last_good: LastGood,
}

impl Configuration {
    fn load(options: &Options, state: Option<&Path>) -> Result<Self, StartError> {
        let last_good = LastGood::new(state);
        match last_good.load(options.config.as_deref()) {
            Ok(config) => Ok(Self { config, error: None, is_default: false, last_good }),
            Err(e) => {
                let Fallback { config, is_default } = last_good.fallback().ok_or_else(|| StartError::new(&e))?;
                let error = last_good::in_effect_despite(&e.to_string(), is_default);
                error!(name: "configuration-wrong", "the configuration has an error: {error}");
                Ok(Self { config, error: Some(error), is_default, last_good })
            }
        }
    }
}

fn run_logged(
    options: Options,
    mut configuration: Configuration,
    state: Option<PathBuf>,
    log: logging::Control,
) -> Result<(), StartError> {
    let config = &mut configuration.config;
    if let Err(e) = descriptors::raise_limit() {
        warn!("cannot raise the limit of file descriptors: {e}");
    }
    if options.in_pod {
        node::sees_the_host().map_err(StartError::new)?;
    }
    let sockets = Sockets::open(&options, config, state.is_some())?;
    // Drops all privileges: `/proc` and NVML answer every user. As a service, the daemon starts without
    // privileges. No thread starts before this, so no thread inherits privileges.
    privileges::drop_all().map_err(|e| StartError::new(format!("cannot drop privileges: {e}")))?;
    log.begin();
    systemd::start();
    let mut changes = Changes::open(state.as_deref());
    config.settings.time_quantum = options.time_quantum.unwrap_or(config.settings.time_quantum);
    changes.apply(config);
    let record = options.record.as_deref().map(|path| {
        // Only the owner may read the recording, because it contains the names of all users' programs.
        let created = File::options().write(true).create(true).truncate(true).mode(0o600).open(path);
        created.map_err(|e| StartError::new(format!("cannot write the record {}: {e}", path.display())))
    });
    let record = record.transpose()?;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|e| StartError::new(format!("cannot start: {e}")))?;
    let daemon = Startup { options, configuration, changes, log, sockets, record, state };
    let result = LocalSet::new().block_on(&runtime, daemon.serve());
    // Does not wait for tasks: if a directory service hangs, the daemon must still be able to stop.
    runtime.shutdown_background();
    result.map_err(|e| StartError::new(format!("cannot start: {e}")))
}

/// The listening sockets.
struct Sockets {
    clients: OwnedFd,
    control: Option<OwnedFd>,
    metrics: Vec<OwnedFd>,
    /// The reason why metrics are not served on the configured address.
    metrics_error: Option<String>,
    clients_path: PathBuf,
    stored: Inherited,
    /// Names of passed file descriptors that this version of the daemon does not know.
    unknown: Vec<String>,
    /// On drop, removes the files of the sockets that the daemon bound itself.
    _bound: Vec<Bound>,
}

impl Sockets {
    /// Opens the sockets. If `is_service`, the daemon starts even if the metrics socket cannot be opened:
    /// without a scheduler, no limit of a rule would be enforced.
    ///
    /// # Errors
    /// Any other socket cannot be opened.
    fn open(options: &Options, config: &Config, is_service: bool) -> Result<Self, StartError> {
        let given = systemd::activated().map_err(StartError::new)?;
        let mut all_bound = Vec::new();
        let clients_path = options.socket.clone().unwrap_or_else(|| CLIENTS_SOCKET.into());
        let clients = match given.clients {
            Some(socket) => socket,
            None => {
                let (socket, bound) =
                    listen::listen(&clients_path, Kind::Packets, CLIENTS_MODE).map_err(StartError::new)?;
                all_bound.push(bound);
                socket
            }
        };
        let control = match given.control {
            Some(socket) => Some(socket),
            None => {
                let path = options.control_socket.clone().unwrap_or_else(|| control_path(&clients_path));
                match listen::listen(&path, Kind::Stream, CONTROL_MODE) {
                    Ok((socket, bound)) => {
                        all_bound.push(bound);
                        Some(socket)
                    }
                    Err(e) if options.control_socket.is_some() => return Err(StartError::new(e)),
                    Err(e) => {
                        warn!("cannot serve the control socket: {e}");
                        None
                    }
                }
            }
        };
        let (mut metrics, mut metrics_error) = (given.metrics, None);
        match metrics::listen::bind(&config.metrics) {
            Ok(Some((socket, bound))) => {
                metrics.push(socket);
                all_bound.extend(bound);
            }
            Ok(None) => {}
            Err(e) if is_service => {
                error!(name: "metrics-not-served", "{e}");
                metrics_error = Some(e);
            }
            Err(e) => return Err(StartError::new(e)),
        }
        let (stored, unknown) = (given.stored, given.unknown);
        Ok(Self { clients, control, metrics, metrics_error, clients_path, stored, unknown, _bound: all_bound })
    }
}

/// The path of the control socket that belongs to a clients' socket. The control socket is in a separate
/// directory next to the clients' directory: containers may have the clients' directory mounted.
fn control_path(clients: &Path) -> PathBuf {
    let directory = clients.parent().filter(|d| d.file_name().is_some()).unwrap_or(Path::new("nvshare"));
    let mut control = directory.as_os_str().to_owned();
    control.push("-control");
    Path::new(&control).join("control.sock")
}

/// The parts that the scheduling loop needs at its start.
struct Startup {
    options: Options,
    configuration: Configuration,
    changes: Changes,
    log: logging::Control,
    sockets: Sockets,
    record: Option<File>,
    /// The directory for state that outlives this daemon.
    state: Option<PathBuf>,
}

impl Startup {
    /// Starts all other parts, and runs the scheduling loop.
    async fn serve(self) -> std::io::Result<()> {
        let Self { options, configuration, changes, log, sockets, record, state } = self;
        let Configuration { config, error, is_default, last_good } = configuration;
        let mut terminate = signal(SignalKind::terminate())?;
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut hang_up = signal(SignalKind::hangup())?;
        let Sockets { clients, control: control_socket, metrics, metrics_error, clients_path, stored, unknown, _bound } =
            sockets;
        unknown.iter().for_each(|name| systemd::forget(name));

        let core = Rc::new(RefCell::new(Core::new(config, record)?));
        core.borrow_mut().set_problems(|problems| (problems.configuration, problems.metrics) = (error, metrics_error));
        if let Some(directory) = clients_path.parent() {
            core.borrow_mut().containers.lock_files.create_in(directory);
        }
        state.iter().for_each(|directory| open_state(&core, directory));
        let mut reports = start_nvml(&core).await;
        let (request, mut requests) = mpsc::unbounded_channel::<bus::Request>();
        let published = core.borrow().io.published.subscribe();
        let budgets = core.borrow().model.budgets.clone();
        let (views, readers) = Views::channel();
        let bus = bus_to_use(&options);
        let (bus, bus_attempted) =
            BusServer::start(bus, control_socket, request, views.clone(), published, budgets.clone())?;
        metrics::start(metrics, views.clone())?;
        // Must precede the takeover of an earlier daemon's clients, because some of these clients may be
        // asleep.
        match helpers(options.in_pod, budgets) {
            Ok(Some(helpers)) => tasks::start_checkpoints(&core, helpers),
            Ok(None) => {}
            Err(e) => warn!("cannot checkpoint programs: {e}"),
        }
        tasks::start_swap_files(&core, stored.swap_files)?;
        let connections = start_connections(&core, views, clients, stored.connections, bus_attempted);
        let claims = options.claims.map(|directory| ClaimSockets::new(&directory, &core, &connections));
        tasks::start(&core);
        spawn_local(views::answer(core.clone(), readers));
        let control = Rc::new(Control {
            core: core.clone(),
            connections,
            claims: RefCell::new(claims),
            config: options.config,
            log_level: options.log_level,
            time_quantum: options.time_quantum,
            log,
            changes,
            last_good,
            is_default: Cell::new(is_default),
            loading: Mutex::default(),
        });
        info!(name: "started", "nvshare-scheduler {} serves {}", env!("CARGO_PKG_VERSION"), clients_path.display());

        let watchdog = systemd::watchdog_period();
        let mut feed = tokio::time::interval(watchdog.unwrap_or(Duration::from_secs(3600)));
        loop {
            tokio::select! {
                // First handles a scheduler event. The watchdog notification then proves that the loop works.
                _ = feed.tick(), if watchdog.is_some() => {
                    core.borrow_mut().tick();
                    systemd::watchdog();
                }
                Some(report) = reports.recv() => core.borrow_mut().nvml_report(report),
                Some(request) = requests.recv() => {
                    request(&control);
                    // Lets other tasks serve clients between two requests, however many requests are pending.
                    tokio::task::yield_now().await;
                }
                _ = hang_up.recv() => {
                    let control = control.clone();
                    spawn_local(async move { control.reload("the signal SIGHUP").await });
                }
                _ = terminate.recv() => break,
                _ = interrupt.recv() => break,
            }
        }
        systemd::stopping();
        info!(name: "stopping", "nvshare-scheduler stops");
        core.borrow().model.close_connections();
        bus.stop();
        core.borrow_mut().record_usage();
        core.borrow_mut().observe.usage.finish(USAGE_PATIENCE);
        Ok(())
    }
}

/// Restores what an earlier daemon saved in this directory. From now on, changes are saved there.
fn open_state(core: &Rc<RefCell<Core>>, directory: &Path) {
    let saved = {
        let Core { model, host, observe, .. } = &mut *core.borrow_mut();
        host.sleep.open(directory);
        host.moves.open(directory);
        observe.usage.start(directory, model.config.keep_usage)
    };
    tasks::load_hours(core, saved);
}

fn bus_to_use(options: &Options) -> Bus {
    match options {
        Options { no_bus: true, .. } | Options { in_pod: true, .. } => Bus::None,
        Options { bus_address: Some(address), .. } => Bus::Address(address.clone()),
        _ => Bus::System,
    }
}

/// Chooses how checkpoint helpers are started. In a pod, helpers run in an optional separate
/// container with capabilities. Returns `None` if the pod lacks that container.
fn helpers(in_pod: bool, budgets: Arc<Budgets>) -> std::io::Result<Option<Helpers>> {
    let socket = Path::new(checkpoint::SOCKET);
    if in_pod {
        // The container may start or restart later. The socket's directory exists only in pods with such a
        // container.
        let has_one = socket.parent().is_some_and(Path::exists);
        return Ok(has_one.then(|| Helpers::by_socket(budgets)));
    }
    let has_one = systemd::is_there() && socket.exists();
    if has_one { Ok(Some(Helpers::by_socket(budgets))) } else { Helpers::of_children(budgets).map(Some) }
}

/// Starts the NVML thread, and waits briefly for its first reports. The GPUs and their memory in use
/// should be known before the first client requests memory. The wait is limited, because NVML's
/// initialisation can take long.
async fn start_nvml(core: &RefCell<Core>) -> mpsc::UnboundedReceiver<Report> {
    let (report, mut reports) = mpsc::unbounded_channel();
    core.borrow_mut().use_nvml(nvml::start(report));
    let first = async {
        while let Some(report) = reports.recv().await {
            let is_last = matches!(report, Report::Used(_) | Report::State(_));
            core.borrow_mut().nvml_report(report);
            if is_last {
                return;
            }
        }
    };
    if tokio::time::timeout(FIRST_REPORTS_TIMEOUT, first).await.is_err() {
        info!("NVML is slow to list the GPUs, continuing without them");
    }
    reports
}

/// Takes over stored connections and accepts new ones. Then notifies systemd that the daemon is ready.
fn start_connections(
    core: &Rc<RefCell<Core>>,
    views: Views,
    listener: OwnedFd,
    stored: Vec<StoredConnection>,
    bus_attempted: oneshot::Receiver<()>,
) -> Rc<Connections> {
    let (done, mut resumed) = watch::channel(false);
    let connections = Rc::new(Connections::new(core.borrow().model.budgets.clone(), resumed.clone()));
    spawn_local({
        let (core, connections) = (core.clone(), connections.clone());
        async move {
            resume::resume_all(&core, stored, &connections).await;
            done.send_replace(true);
        }
    });
    spawn_local({
        let (core, connections) = (core.clone(), connections.clone());
        async move {
            if let Err(e) = accept::accept(core, listener, connections, "").await {
                error!("cannot accept programs: {e}");
            }
        }
    });
    spawn_local({
        let core = core.clone();
        async move {
            let _ = resumed.wait_for(|resumed| *resumed).await;
            let _ = tokio::time::timeout(BUS_TIMEOUT, bus_attempted).await;
            systemd::ready();
            if systemd::is_there() {
                tasks::keep_status_line(&core, &views).await;
            }
        }
    });
    connections
}
