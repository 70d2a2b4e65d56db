//! The plugin as a process: starts its parts, handles signals, and ends.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use nvshare::config::LogLevel;
use nvshare_kubernetes::config::reloaded;
use nvshare_kubernetes::{log, signals};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::level_filters::LevelFilter;
use tracing::{info, warn};

use crate::cdi;
use crate::config::{Config, Offer};
use crate::devices::Devices;
use crate::dra;
use crate::health;
use crate::inventory::{self, Offered};
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
    /// The options of the DRA driver, if the node's name is known.
    pub dra: Option<dra::driver::Options>,
    pub log_level: LogLevel,
}

/// Runs until a signal ends the plugin.
pub fn run(options: Options) -> Result<(), String> {
    let config = Config::load(options.config.as_deref()).map_err(|e| e.to_string())?;
    if config.offers_by(Offer::Dra) && options.dra.is_none() {
        return Err("offer = \"dra\" needs the name of this node. Set --node or the environment variable \
            NODE_NAME"
            .into());
    }
    log::start(options.log_level, LevelFilter::WARN);
    block_on(work(&options, config))
}

/// Runs an asynchronous task on this thread.
///
/// # Errors
/// The task fails, or the runtime cannot be started.
pub fn block_on<T>(work: impl Future<Output = Result<T, String>>) -> Result<T, String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| format!("cannot start: {e}"))?.block_on(work)
}

async fn work(options: &Options, config: Config) -> Result<(), String> {
    let (mut termination, mut hangup) = signals::listen()?;
    info!(
        "nvshare-device-plugin {}: {} for kubelet at {}, scheduler at {}",
        env!("CARGO_PKG_VERSION"),
        if config.offers_by(Offer::DevicePlugin) { &config.resource } else { dra::DRIVER },
        options.kubelet.display(),
        options.control.display()
    );

    let resource = config.resource.clone();
    let offers = [Offer::DevicePlugin, Offer::Dra].map(|offer| config.offers_by(offer));
    let (settings, config) = watch::channel(Arc::new(config));
    let (reports, reported) = mpsc::unbounded_channel();
    let (by_plugin, plugin_devices) = watch::channel(Arc::new(Devices::default()));
    let (by_dra, dra_devices) = watch::channel(Arc::new(Devices::default()));
    let (complete, completed) = oneshot::channel();
    health::nvml::start(config.clone(), reports.clone()).map_err(|e| format!("cannot start a thread for NVML: {e}"))?;
    tokio::spawn(cdi::follow(options.cdi.clone(), reports.clone()));
    tokio::spawn(health::scheduler::follow(options.control.clone(), config.clone(), reports));
    let offered = Offered { by_plugin, by_dra };
    tokio::spawn(inventory::keep(reported, config.clone(), offered, complete));

    let (stop, stopped) = watch::channel(false);
    let live = async {
        // Before the first answers of NVML and the scheduler, GPUs must not be reported as
        // unhealthy.
        let mut early = stopped.clone();
        tokio::select! {
            _ = completed => {}
            _ = early.wait_for(|stopped| *stopped) => return Ok(()),
        }
        let [by_plugin, by_dra] = offers;
        let plugin = async {
            if by_plugin {
                let facts = Facts { config: config.clone(), devices: plugin_devices };
                lifecycle::live(&options.kubelet, &resource, facts, stopped.clone())
                    .await
                    .map_err(|e| e.to_string())?;
            }
            Ok(())
        };
        let driver = async {
            match options.dra.clone().filter(|_| by_dra) {
                Some(options) => dra::driver::run(options, config.clone(), dra_devices, stopped.clone()).await,
                None => Ok(()),
            }
        };
        tokio::try_join!(plugin, driver).map(|_| ())
    };
    let heed = async {
        let mut end = std::pin::pin!(termination.wait());
        loop {
            tokio::select! {
                () = &mut end => break,
                Some(()) = hangup.recv() => reload(options.config.as_deref(), &settings, offers),
            }
        }
        let _ = stop.send(true);
        std::future::pending::<()>().await;
    };
    tokio::select! {
        done = live => done,
        () = heed => Ok(()),
    }
}

/// Reads the configuration again. The resource's name stays unchanged, because kubelet knows the
/// plugin by this name. A newly configured API requires a restart of the plugin. kubelet restarts
/// the plugin when the plugin's probe finds that the API is missing.
fn reload(path: Option<&Path>, settings: &watch::Sender<Arc<Config>>, offers: [bool; 2]) {
    let read = Config::load(path).map_err(|e| e.to_string()).and_then(|new| {
        let is_missing = [Offer::DevicePlugin, Offer::Dra]
            .into_iter()
            .zip(offers)
            .any(|(offer, is_there)| new.offers_by(offer) && !is_there);
        if is_missing { Err("restart the plugin to offer GPUs by another API".to_owned()) } else { Ok(new) }
    });
    let Some(mut new) = reloaded(read) else { return };
    let registered = settings.borrow().resource.clone();
    if new.resource != registered {
        warn!("the resource stays {registered}: restart the plugin to offer {}", new.resource);
        new.resource = registered;
    }
    settings.send_replace(Arc::new(new));
}
