//! The agent as a process: starts its parts, handles signals, and ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvshare::config::LogLevel;
use nvshare_kubernetes::config::reloaded;
use nvshare_kubernetes::{api_server, log, signals};
use tokio::signal::unix::Signal;
use tokio::sync::{mpsc, watch};
use tracing::info;
use tracing::level_filters::LevelFilter;

use crate::config::Config;
use crate::links::Link;
use crate::probe::Socket;
use crate::{kubernetes, node, scheduler};

/// The maximum number of queued changes. If the queue is full, further changes wait at the API
/// server.
const QUEUE: usize = 64;

/// The longest wait for threads that look up names, when the agent ends.
const END: Duration = Duration::from_millis(200);

/// The command line.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's name in Kubernetes.
    pub node: String,
    pub config: Option<PathBuf>,
    pub kubeconfig: Option<PathBuf>,
    /// The scheduler's control socket.
    pub control: PathBuf,
    /// The agent's own socket.
    pub socket: PathBuf,
    pub log_level: LogLevel,
}

/// Runs until a signal ends the agent.
pub fn run(options: Options) -> Result<(), String> {
    let config = Config::load(options.config.as_deref()).map_err(|e| e.to_string())?;
    // kube and its dependencies log every failed request. These lines are not logged, because
    // `kubernetes` logs the relevant failures once.
    let libraries = if options.log_level == LogLevel::Trace { LevelFilter::WARN } else { LevelFilter::OFF };
    log::start(options.log_level, libraries);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| format!("cannot start: {e}"))?;
    let done = runtime.block_on(work(&options, config));
    runtime.shutdown_timeout(END);
    done
}

async fn work(options: &Options, config: Config) -> Result<(), String> {
    let (mut termination, hangup) = signals::listen()?;
    let client = api_server::client(options.kubeconfig.as_deref()).await?;
    let socket = Socket::bind(&options.socket)?;
    info!(
        "nvshare-agent {}: sending the pods of node {} to the scheduler at {}",
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
        () = termination.wait() => {}
    }
    Ok(())
}

/// Reads the configuration again on every SIGHUP.
async fn reload(mut hangup: Signal, path: Option<&Path>, settings: &watch::Sender<Arc<Config>>) {
    while hangup.recv().await.is_some() {
        if let Some(new) = reloaded(Config::load(path)) {
            settings.send_replace(Arc::new(new));
        }
    }
}
