//! The agent as a process: its parts are started, signals are heeded, and all of it ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvshare::daemon::config::LogLevel;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tracing::{info, warn};

use crate::config::Config;
use crate::links::Link;
use crate::probe::Socket;
use crate::{kubernetes, log, node, scheduler};

/// Changes that wait to be looked at; more wait at the API server.
const QUEUE: usize = 64;

/// How long threads may take to end that look up names.
const END: Duration = Duration::from_millis(200);

/// What the command line says.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's name in Kubernetes.
    pub node: String,
    pub config: Option<PathBuf>,
    pub kubeconfig: Option<PathBuf>,
    /// The scheduler's control socket.
    pub control: PathBuf,
    /// The agent's own.
    pub socket: PathBuf,
    pub log_level: LogLevel,
}

/// Runs until a signal ends it.
pub fn run(options: Options) -> Result<(), String> {
    let config = Config::load(options.config.as_deref()).map_err(|e| e.to_string())?;
    log::start(options.log_level);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| format!("cannot start: {e}"))?;
    let done = runtime.block_on(work(&options, config));
    runtime.shutdown_timeout(END);
    done
}

async fn work(options: &Options, config: Config) -> Result<(), String> {
    let listen = |kind| signal(kind).map_err(|e| format!("cannot listen for signals: {e}"));
    let hangup = listen(SignalKind::hangup())?;
    let (mut terminate, mut interrupt) = (listen(SignalKind::terminate())?, listen(SignalKind::interrupt())?);
    let client = kubernetes::client(options.kubeconfig.as_deref()).await?;
    let socket = Socket::bind(&options.socket)?;
    info!(
        "nvshare-agent {}: pods of node {}, for the scheduler at {}",
        env!("CARGO_PKG_VERSION"),
        options.node,
        options.control.display()
    );

    let (api_server, of_api_server) = Link::new("the API server");
    let (at_scheduler, of_scheduler) = Link::new("the scheduler");
    let (settings, config) = watch::channel(Arc::new(config));
    let (changes, changed) = mpsc::channel(QUEUE);
    let (pods, told) = watch::channel(None);
    tokio::select! {
        () = kubernetes::follow(client, &options.node, changes, api_server) => {}
        () = node::keep(changed, config, pods) => {}
        () = scheduler::tell(options.control.clone(), told, at_scheduler) => {}
        () = socket.serve([of_api_server, of_scheduler]) => {}
        () = reload(hangup, options.config.as_deref(), &settings) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(())
}

/// Reads the configuration again whenever a signal says so. One that is wrong changes nothing.
async fn reload(mut hangup: Signal, path: Option<&Path>, settings: &watch::Sender<Arc<Config>>) {
    while hangup.recv().await.is_some() {
        match Config::load(path) {
            Ok(new) => {
                settings.send_replace(Arc::new(new));
                info!("the configuration was read again");
            }
            Err(e) => warn!("the configuration stays as it was: {e}"),
        }
    }
}
