//! The daemon: everything around the machine that touches the world.
//!
//! - [`config`]: the configuration file and every default.
//! - `socket`: system calls around sockets, the timer, the clock.
//! - `clients`: the clients' connections, with `session` for what they may say, `outbox` for what they have not read
//!   yet, `peer` for who they are and `complaints` for how often the log hears of them.
//! - `hub`: the machine and everybody it decides about.
//! - `gpus`: NVML, with `overhead` for what it measures.
//! - `bus_server`: the D-Bus object, in a thread of its own.
//! - `systemd`, [`log`], `trace`: sockets and notifications, the log, the event trace.
//!
//! One thread, this one, runs the scheduling loop; nothing that can take long happens on it.

mod bus_server;
mod clients;
mod complaints;
pub mod config;
mod gpus;
mod hub;
pub mod log;
mod outbox;
mod overhead;
mod peer;
mod session;
mod socket;
mod systemd;
mod trace;

use std::cell::RefCell;
use std::fmt;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::task::{LocalSet, spawn_local};
use tracing::{debug, info, warn};

use bus_server::{Bus, BusServer, Request};
use config::{Config, LogLevel};
use gpus::{Ask, Report};
use hub::Hub;
use socket::{Bound, Kind};

/// Where clients connect. The directory can be mounted into containers.
pub const CLIENTS_SOCKET: &str = "/run/nvshare/scheduler.sock";

/// Anybody may be a client: what a client is allowed is decided by who it is, not by the file's mode.
const CLIENTS_MODE: u32 = 0o666;
const CONTROL_MODE: u32 = 0o660;

/// How often memory is sampled while clients do something, and while they do nothing.
const SAMPLE_BUSY: Duration = Duration::from_millis(200);
const SAMPLE_IDLE: Duration = Duration::from_secs(5);
/// Clients do nothing when nothing came from any of them for this long.
const SAMPLE_QUIET: Duration = Duration::from_secs(2);

/// How often a stopped process is looked at.
const STOPPED_PERIOD: Duration = Duration::from_millis(200);

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
}

/// Why the daemon cannot start, as a sentence.
#[derive(Debug)]
pub struct StartError(String);

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for StartError {}

/// Runs until SIGTERM or SIGINT. Call it from the only thread of the process.
pub fn run(options: Options) -> Result<(), StartError> {
    let config = Config::load(options.config.as_deref()).map_err(|e| StartError(e.to_string()))?;
    let log = log::start(options.log_level.unwrap_or(config.log_level));
    if let Err(e) = socket::raise_descriptor_limit() {
        warn!("cannot raise the limit of file descriptors: {e}");
    }
    let sockets = Sockets::open(&options)?;
    drop_capabilities();
    let trace = options.trace.as_deref().map(trace::Trace::create).transpose();
    let trace = trace.map_err(|e| StartError(format!("cannot write the trace: {e}")))?;

    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|e| StartError(format!("cannot start: {e}")))?;
    let result = LocalSet::new().block_on(&runtime, serve(options, config, log, sockets, trace));
    result.map_err(|e| StartError(format!("cannot start: {e}")))
}

/// The listening sockets, and what removes those that we bound ourselves.
struct Sockets {
    clients: OwnedFd,
    control: Option<OwnedFd>,
    clients_path: PathBuf,
    _bound: Vec<Bound>,
}

impl Sockets {
    fn open(options: &Options) -> Result<Self, StartError> {
        let given = systemd::activated().map_err(StartError)?;
        let mut bound = Vec::new();
        let clients_path = options.socket.clone().unwrap_or_else(|| CLIENTS_SOCKET.into());
        let clients = match given.clients {
            Some(socket) => socket,
            None => {
                let (socket, ours) = socket::listen(&clients_path, Kind::Packets, CLIENTS_MODE)
                    .map_err(|e| StartError(e.to_string()))?;
                bound.push(ours);
                socket
            }
        };
        let control = match given.control {
            Some(socket) => Some(socket),
            None => {
                let path = options.control_socket.clone().unwrap_or_else(|| control_path(&clients_path));
                match socket::listen(&path, Kind::Stream, CONTROL_MODE) {
                    Ok((socket, ours)) => {
                        bound.push(ours);
                        Some(socket)
                    }
                    Err(e) if options.control_socket.is_some() => return Err(StartError(e.to_string())),
                    Err(e) => {
                        warn!("there is no control socket: {e}");
                        None
                    }
                }
            }
        };
        Ok(Self { clients, control, clients_path, _bound: bound })
    }
}

/// The control socket that belongs to a clients' socket: in a directory beside that one's, never inside it.
fn control_path(clients: &Path) -> PathBuf {
    let directory = clients.parent().filter(|d| d.file_name().is_some()).unwrap_or(Path::new("nvshare"));
    let mut control = directory.as_os_str().to_owned();
    control.push("-control");
    Path::new(&control).join("control.sock")
}

/// Nothing after this needs a privilege: `/proc` and NVML answer everybody.
fn drop_capabilities() {
    for set in [caps::CapSet::Ambient, caps::CapSet::Effective, caps::CapSet::Permitted, caps::CapSet::Inheritable] {
        if let Err(e) = caps::clear(None, set) {
            debug!("cannot give up capabilities: {e}");
        }
    }
}

/// The scheduling loop.
async fn serve(
    options: Options,
    config: Config,
    log: log::Control,
    sockets: Sockets,
    trace: Option<trace::Trace>,
) -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    let Sockets { clients, control, clients_path, _bound } = sockets;
    let (settings, watching) = watch::channel(config.settings.clone());
    let hub = Rc::new(RefCell::new(Hub::new(config, trace, settings)?));

    let (report, mut reports) = mpsc::unbounded_channel();
    if let Some(ask) = gpus::start(report) {
        hub.borrow_mut().use_nvml(ask);
    }
    let (request, mut requests) = mpsc::unbounded_channel();
    let bus = match &options {
        Options { no_bus: true, .. } => Bus::None,
        Options { bus_address: Some(address), .. } => Bus::Address(address.clone()),
        _ => Bus::System,
    };
    let (bus, attempted) = BusServer::start(bus, control, request, watching)?;

    spawn_local({
        let hub = hub.clone();
        async move {
            if let Err(e) = clients::accept(hub, clients).await {
                tracing::error!("cannot accept programs any more: {e}");
            }
        }
    });
    spawn_local(ticks(hub.clone()));
    spawn_local(sample(hub.clone()));
    spawn_local(watch_stopped(hub.clone()));
    if let Some(period) = systemd::watchdog_period() {
        spawn_local(async move {
            loop {
                systemd::watchdog();
                tokio::time::sleep(period).await;
            }
        });
    }
    spawn_local(async move {
        let _ = tokio::time::timeout(BUS_PATIENCE, attempted).await;
        systemd::ready("Serving programs");
    });
    info!("nvshare-scheduler {} serves {}", env!("CARGO_PKG_VERSION"), clients_path.display());

    loop {
        tokio::select! {
            Some(report) = reports.recv() => match report {
                Report::Gpus(found) => hub.borrow_mut().gpus_found(found),
                Report::Used(used) => {
                    let mut hub = hub.borrow_mut();
                    used.iter().for_each(|sample| hub.sample(sample));
                }
            },
            Some(request) = requests.recv() => answer(&hub, request, &options, &log),
            _ = hang_up.recv() => {
                let _ = reload(&hub, &options, &log);
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    systemd::stopping();
    info!("nvshare-scheduler stops");
    hub.borrow_mut().stop();
    bus.stop();
    Ok(())
}

async fn ticks(hub: Rc<RefCell<Hub>>) {
    let timer = hub.borrow().timer();
    while timer.expired().await.is_ok() {
        hub.borrow_mut().tick();
    }
}

/// Asks how much memory is in use: often while clients do something, rarely while they do nothing, never without any.
async fn sample(hub: Rc<RefCell<Hub>>) {
    let signals = hub.borrow().signals.clone();
    loop {
        if signals.clients.get() == 0 {
            // Once more when everything of the last one is gone: the next one is told what there is.
            tokio::time::sleep(SAMPLE_BUSY).await;
            hub.borrow().ask_nvml(Ask::Sample);
            signals.activity.notified().await;
        }
        hub.borrow().ask_nvml(Ask::Sample);
        if socket::now().saturating_sub(signals.last_activity.get()) < SAMPLE_QUIET {
            tokio::time::sleep(SAMPLE_BUSY).await;
        } else {
            let _ = tokio::time::timeout(SAMPLE_IDLE, signals.activity.notified()).await;
        }
    }
}

async fn watch_stopped(hub: Rc<RefCell<Hub>>) {
    let signals = hub.borrow().signals.clone();
    loop {
        signals.stopped.notified().await;
        loop {
            tokio::time::sleep(STOPPED_PERIOD).await;
            if !hub.borrow_mut().check_stopped() {
                break;
            }
        }
    }
}

/// Answers the D-Bus object. Callers have been authorised there.
fn answer(hub: &RefCell<Hub>, request: Request, options: &Options, log: &log::Control) {
    // An answer that nobody waits for any more is no error.
    match request {
        Request::Clients(reply) => drop(reply.send(hub.borrow().list_clients())),
        Request::Gpus(reply) => drop(reply.send(hub.borrow().list_gpus())),
        Request::Set(change, reply) => {
            let mut hub = hub.borrow_mut();
            let mut config = hub.config.clone();
            change.apply(&mut config.settings);
            hub.configure(config);
            let _ = reply.send(());
        }
        Request::Reload(reply) => drop(reply.send(reload(hub, options, log))),
    }
}

/// Reads the configuration file again. One that is wrong changes nothing.
fn reload(hub: &RefCell<Hub>, options: &Options, log: &log::Control) -> Result<(), String> {
    systemd::reloading();
    let result = match Config::load(options.config.as_deref()) {
        Ok(config) => {
            log.set(options.log_level.unwrap_or(config.log_level));
            hub.borrow_mut().configure(config);
            info!("the configuration was read again");
            Ok(())
        }
        Err(e) => {
            warn!("the configuration stays as it was: {e}");
            Err(e.to_string())
        }
    };
    systemd::ready(if result.is_ok() {
        "Serving programs"
    } else {
        "Serving programs; the configuration file is wrong"
    });
    result
}
