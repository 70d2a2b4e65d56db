//! The plugin as a process: its parts are started, signals are heeded, and all of it ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nvshare::config::LogLevel;
use nvshare_kubernetes::config::reloaded;
use nvshare_kubernetes::{log, signals};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::level_filters::LevelFilter;
use tracing::{info, warn};

use crate::cdi;
use crate::config::Config;
use crate::devices::Devices;
use crate::health;
use crate::inventory;
use crate::lifecycle;
use crate::server::Facts;

/// The command line.
#[derive(Debug, Clone)]
pub struct Options {
    pub config: Option<PathBuf>,
    /// kubelet's directory for plugins.
    pub kubelet: PathBuf,
    /// The scheduler's control socket.
    pub control: PathBuf,
    pub cdi: cdi::Paths,
    pub log_level: LogLevel,
}

/// Runs until a signal ends it.
pub fn run(options: Options) -> Result<(), String> {
    let config = Config::load(options.config.as_deref()).map_err(|e| e.to_string())?;
    log::start(options.log_level, LevelFilter::WARN);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| format!("cannot start: {e}"))?;
    runtime.block_on(work(&options, config))
}

async fn work(options: &Options, config: Config) -> Result<(), String> {
    let (mut termination, mut hangup) = signals::listen()?;
    info!(
        "nvshare-device-plugin {}: {} for kubelet at {}, of the scheduler at {}",
        env!("CARGO_PKG_VERSION"),
        config.resource,
        options.kubelet.display(),
        options.control.display()
    );

    let resource = config.resource.clone();
    let (settings, config) = watch::channel(Arc::new(config));
    let (reports, reported) = mpsc::unbounded_channel();
    let (devices, listed) = watch::channel(Arc::new(Devices::default()));
    let (complete, completed) = oneshot::channel();
    health::nvml::start(config.clone(), reports.clone()).map_err(|e| format!("cannot start a thread for NVML: {e}"))?;
    tokio::spawn(cdi::follow(options.cdi.clone(), reports.clone()));
    tokio::spawn(health::scheduler::follow(options.control.clone(), config.clone(), reports));
    tokio::spawn(inventory::keep(reported, config.clone(), devices, complete));

    let (stop, stopped) = watch::channel(false);
    let live = async {
        // GPUs are not reported as unhealthy before the first answers of NVML and the scheduler.
        let mut early = stopped.clone();
        tokio::select! {
            _ = completed => {}
            _ = early.wait_for(|stopped| *stopped) => return Ok(()),
        }
        lifecycle::live(&options.kubelet, &resource, Facts { config, devices: listed }, stopped).await
    };
    let heed = async {
        let mut end = std::pin::pin!(termination.wait());
        loop {
            tokio::select! {
                () = &mut end => break,
                Some(()) = hangup.recv() => reload(options.config.as_deref(), &settings),
            }
        }
        let _ = stop.send(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = live => done.map_err(|e| e.to_string()),
        () = heed => Ok(()),
    }
}

/// Reads the configuration again. The resource's name stays: kubelet knows the plugin by it.
fn reload(path: Option<&Path>, settings: &watch::Sender<Arc<Config>>) {
    let Some(mut new) = reloaded(Config::load(path)) else { return };
    let registered = settings.borrow().resource.clone();
    if new.resource != registered {
        warn!("the resource stays {registered}: restart the plugin to offer {}", new.resource);
        new.resource = registered;
    }
    settings.send_replace(Arc::new(new));
}
