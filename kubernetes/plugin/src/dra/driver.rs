//! The whole driver. The driver creates and serves its sockets, and creates removed sockets again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nvshare_kubernetes::api_server;
use nvshare_kubernetes::retry::Retry;
use tokio::net::UnixListener;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::transport::server::Router;
use tonic_health::ServingStatus;
use tracing::{info, warn};

use super::claims::{Claims, Places};
use super::health::dra_resource_health_server::DraResourceHealthServer;
use super::plugin_registration::registration_server::RegistrationServer;
use super::protocol::dra_plugin_server::DraPluginServer;
use super::registration::Desk;
use super::service::{Facts, Service};
use super::{DRIVER, publish};
use crate::config::Config;
use crate::devices::Devices;
use crate::lifecycle::Trouble;
use crate::server::{GRACE, WHOLE_SERVER};
use crate::sockets::{BindError, PluginSocket, SocketState};
use crate::status::status_server::StatusServer;

/// Period of checks of the sockets.
const LOOK: Duration = Duration::from_secs(5);

/// Maximum pause between attempts to create the sockets.
const RETRY: Duration = Duration::from_secs(30);

/// The driver's part of the command line.
#[derive(Debug, Clone)]
pub struct Options {
    /// The node's name in Kubernetes.
    pub node: String,
    pub kubeconfig: Option<PathBuf>,
    /// kubelet's directory for plugins' own files, and its directory for registration sockets.
    pub plugins: PathBuf,
    pub registry: PathBuf,
    /// The scheduler's control socket.
    pub control: PathBuf,
    /// The directory for CDI files.
    pub cdi: PathBuf,
    /// The directory of claims' sockets.
    pub sockets: PathBuf,
    /// The agent's configuration.
    pub permissions: Option<PathBuf>,
}

/// Returns the path of the driver's socket, below kubelet's directory for plugins' own files.
pub fn socket(plugins: &Path) -> PathBuf {
    plugins.join(DRIVER).join("dra.sock")
}

/// Returns the path of the driver's registration socket. kubelet sends this path as the call's
/// authority, with `%2F` for each `/`. The HTTP library rejects a `%` in an authority unless an `@`
/// follows, so the name contains an `@`.
pub fn registration_socket(registry: &Path) -> PathBuf {
    registry.join(format!("{DRIVER}@reg.sock"))
}

/// Serves kubelet until the driver is stopped.
///
/// # Errors
/// Another driver serves the sockets, or no API server is configured.
pub async fn run(
    options: Options,
    config: watch::Receiver<Arc<Config>>,
    devices: watch::Receiver<Arc<Devices>>,
    stopped: watch::Receiver<bool>,
) -> Result<(), String> {
    let client = api_server::client(options.kubeconfig.as_deref()).await?;
    let claims = Arc::new(Claims::load(Places {
        control: options.control.clone(),
        store: options.plugins.join(DRIVER).join("claims"),
        cdi: options.cdi.clone(),
        sockets: options.sockets.clone(),
    }));
    let (problems, problem) = watch::channel(Some("no GPU is offered yet".to_owned()));
    let (register, registered) = watch::channel(false);
    info!("DRA driver {DRIVER} for node {}", options.node);
    let facts = Facts {
        node: options.node.clone(),
        client: client.clone(),
        config,
        devices: devices.clone(),
        claims: claims.clone(),
        permissions: options.permissions.clone(),
        problem,
        registered,
        stopped: stopped.clone(),
    };
    let mut end = stopped;
    tokio::select! {
        () = claims.keep_told() => Ok(()),
        () = publish::keep(client, options.node.clone(), devices, problems) => Ok(()),
        served = serve(&options, facts, register) => served,
        _ = end.wait_for(|stopped| *stopped) => Ok(()),
    }
}

async fn serve(options: &Options, facts: Facts, register: watch::Sender<bool>) -> Result<(), String> {
    let (own, registration) = (socket(&options.plugins), registration_socket(&options.registry));
    let (mut trouble, mut retry) = (Trouble::default(), Retry::up_to(RETRY));
    loop {
        // The driver's socket is bound first, because kubelet calls the driver as soon as it finds
        // the registration socket.
        let bound = bind(&own).and_then(|one| Ok((one, bind(&registration)?)));
        let ((listener, own_socket), (desk, registration_socket)) = match bound {
            Ok(bound) => bound,
            Err(e @ BindError::Taken(_)) => return Err(e.to_string()),
            Err(e) => {
                trouble.tell(e.to_string());
                sleep(retry.wait()).await;
                continue;
            }
        };
        trouble = Trouble::default();
        retry.reset();
        register.send_replace(false);
        let service = Service(facts.clone());
        let (reporter, probes) = tonic_health::server::health_reporter();
        let server = Server::builder()
            .add_service(DraPluginServer::new(service.clone()))
            .add_service(DraResourceHealthServer::new(service.clone()))
            .add_service(StatusServer::new(service))
            .add_service(probes);
        let registrations =
            RegistrationServer::new(Desk { endpoint: own.display().to_string(), registered: register.clone() });
        let report = async {
            let mut registered = facts.registered.clone();
            loop {
                let status =
                    if *registered.borrow_and_update() { ServingStatus::Serving } else { ServingStatus::NotServing };
                reporter.set_service_status(WHOLE_SERVER, status).await;
                if registered.changed().await.is_err() {
                    std::future::pending::<()>().await;
                }
            }
        };
        let gone = async {
            loop {
                match (own_socket.state(), registration_socket.state()) {
                    (SocketState::Ours, SocketState::Ours) => sleep(LOOK).await,
                    states => return states,
                }
            }
        };
        let end = facts.stopped.clone();
        let states = tokio::select! {
            states = gone => states,
            () = listen(server, listener, end.clone()) => (SocketState::Gone, SocketState::Gone),
            () = listen(Server::builder().add_service(registrations), desk, end) => (SocketState::Gone, SocketState::Gone),
            () = report => continue,
        };
        match states {
            (SocketState::Anothers, _) => return Err(BindError::Taken(own).to_string()),
            (_, SocketState::Anothers) => return Err(BindError::Taken(registration).to_string()),
            _ => info!("a socket of the driver has disappeared, creating both sockets again"),
        }
    }
}

fn bind(path: &Path) -> Result<(UnixListener, PluginSocket), BindError> {
    if let Some(directory) = path.parent() {
        std::fs::create_dir_all(directory).map_err(|e| BindError::Failed(path.into(), e))?;
    }
    PluginSocket::bind(path)
}

async fn listen(server: Router, listener: UnixListener, mut stopped: watch::Receiver<bool>) {
    let end = async move { drop(stopped.wait_for(|stopped| *stopped).await) };
    if let Err(e) = server.serve_with_incoming_shutdown(UnixListenerStream::new(listener), end).await {
        warn!("cannot serve a socket of the driver: {e}");
        sleep(GRACE).await;
    }
}
