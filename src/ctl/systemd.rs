//! Queries and controls systemd's services over D-Bus.

use std::time::{Duration, Instant};

use zbus::Connection;
use zbus::OwnedObjectPath;
use zbus::connection::Builder;
use zbus::proxy::CacheProperties;

use super::preload::drop_in::Manager;
use crate::ctl::CtlError;
use crate::ctl::progress::Progress;

/// Timeout for calls. systemctl uses the same value for `daemon-reload`, which runs every
/// generator.
const PATIENCE: Duration = Duration::from_secs(90);
/// Interval between checks whether a service has started.
const LOOK: Duration = Duration::from_millis(100);
/// Time for which a restarted service must keep running. A service whose program is missing or
/// whose configuration is invalid ends sooner.
const SETTLING: Duration = Duration::from_secs(2);

#[zbus::proxy(
    interface = "org.freedesktop.systemd1.Manager",
    default_service = "org.freedesktop.systemd1",
    default_path = "/org/freedesktop/systemd1"
)]
trait Manager {
    fn load_unit(&self, name: &str) -> zbus::Result<OwnedObjectPath>;
    fn restart_unit(&self, name: &str, mode: &str) -> zbus::Result<OwnedObjectPath>;
    fn reload(&self) -> zbus::Result<()>;
    fn list_units_by_patterns(&self, states: &[&str], patterns: &[&str]) -> zbus::Result<Vec<Listed>>;
}

/// Name, description, load state, active state, sub-state, followed unit, object, and the job's
/// number, kind and object.
type Listed = (String, String, String, String, String, String, OwnedObjectPath, u32, String, OwnedObjectPath);

#[zbus::proxy(interface = "org.freedesktop.systemd1.Unit", default_service = "org.freedesktop.systemd1")]
trait Unit {
    #[zbus(property)]
    fn id(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn load_state(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn active_state(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn sub_state(&self) -> zbus::Result<String>;
    /// The number and the object of the pending job. Without a job, the number is 0.
    #[zbus(property)]
    fn job(&self) -> zbus::Result<(u32, OwnedObjectPath)>;
}

#[zbus::proxy(interface = "org.freedesktop.systemd1.Service", default_service = "org.freedesktop.systemd1")]
trait Service {
    #[zbus(property)]
    fn environment(&self) -> zbus::Result<Vec<String>>;
    #[zbus(property)]
    fn environment_files(&self) -> zbus::Result<Vec<(String, bool)>>;
    #[zbus(property)]
    fn unset_environment(&self) -> zbus::Result<Vec<String>>;
    #[zbus(property)]
    fn root_directory(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn root_image(&self) -> zbus::Result<String>;
    #[zbus(property)]
    fn restrict_address_families(&self) -> zbus::Result<(bool, Vec<String>)>;
    #[zbus(property)]
    fn app_armor_profile(&self) -> zbus::Result<(bool, String)>;
    #[zbus(property)]
    fn exec_start(&self) -> zbus::Result<Vec<ExecCommand>>;
    #[zbus(property, name = "MainPID")]
    fn main_pid(&self) -> zbus::Result<u32>;
    #[zbus(property)]
    fn slice(&self) -> zbus::Result<String>;
}

/// Path, arguments, whether failures are ignored, start and end time on two clocks each, process
/// ID, code, status.
type ExecCommand = (String, Vec<String>, bool, u64, u64, u64, u64, u32, i32, i32);

/// A service as systemd has loaded it.
#[derive(Debug, Default)]
pub struct Service {
    /// The service's name, which may differ from the alias that the caller requested.
    pub id: String,
    pub environment: Vec<String>,
    /// Files with further variables, which take precedence over `environment`.
    pub environment_files: Vec<String>,
    pub unset_environment: Vec<String>,
    pub root_directory: String,
    pub root_image: String,
    /// True if the service may use Unix sockets.
    pub unix_sockets: bool,
    pub apparmor_profile: String,
    /// The programs in `ExecStart=`.
    pub programs: Vec<String>,
    /// The pid of the main process, or 0 if the service is not running.
    pub main_pid: u32,
}

/// A connection to a service manager, either the system's or the calling user's.
#[derive(Debug)]
pub struct Systemd {
    connection: Connection,
}

impl Systemd {
    pub async fn connect(manager: Manager) -> Result<Self, CtlError> {
        let (builder, bus, remedy) = match manager {
            Manager::System => (Builder::system(), "system", ""),
            Manager::User => (
                Builder::session(),
                "session",
                ". Run nvsharectl in a session of the service's user. To start the user's services without a session, \
                 run `loginctl enable-linger`",
            ),
        };
        let connection = builder.method_timeout(PATIENCE).build().await;
        let connection =
            connection.map_err(|e| CtlError::Failed(format!("cannot reach systemd on the {bus} bus: {e}{remedy}")))?;
        Ok(Self { connection })
    }

    /// Uses an existing connection to the bus.
    pub fn of(connection: Connection) -> Self {
        Self { connection }
    }

    /// The load state and the active state of a unit, in systemd's words.
    pub async fn states(&self, name: &str) -> zbus::Result<(String, String)> {
        let path = self.manager().await?.load_unit(name).await?;
        let unit =
            UnitProxy::builder(&self.connection).path(&path).cache_properties(CacheProperties::No).build().await?;
        Ok((unit.load_state().await?, unit.active_state().await?))
    }

    /// Restarts a service, and watches it for [`SETTLING`].
    ///
    /// # Errors
    /// The service does not start, or fails within [`SETTLING`]. systemd considers a simple service
    /// started as soon as its program is executed.
    pub async fn restart(&self, name: &str) -> Result<(), CtlError> {
        let restarted = async {
            let manager = self.manager().await?;
            manager.restart_unit(name, "replace").await?;
            let path = manager.load_unit(name).await?;
            let unit =
                UnitProxy::builder(&self.connection).path(&path).cache_properties(CacheProperties::No).build().await?;
            while unit.job().await?.0 != 0 {
                tokio::time::sleep(LOOK).await;
            }
            let started = Instant::now();
            loop {
                // In `auto-restart`, systemd waits before it restarts a failed service.
                let has_failed = unit.active_state().await? == "failed" || unit.sub_state().await? == "auto-restart";
                if has_failed || started.elapsed() >= SETTLING {
                    return Ok(has_failed);
                }
                tokio::time::sleep(LOOK).await;
            }
        };
        let restarted = Progress::new().during(&format!("restarting {name}"), restarted).await;
        match restarted.map_err(|e| failed(name, &e))? {
            true => Err(CtlError::Failed(format!("{name} does not start. See `journalctl -u {name}`"))),
            false => Ok(()),
        }
    }

    async fn manager(&self) -> zbus::Result<ManagerProxy<'_>> {
        ManagerProxy::builder(&self.connection).cache_properties(CacheProperties::No).build().await
    }

    /// Makes systemd reload its files.
    pub async fn reload(&self) -> Result<(), CtlError> {
        let reloaded = async { self.manager().await?.reload().await }.await;
        reloaded.map_err(|e| CtlError::Failed(format!("cannot make systemd read its files again (daemon-reload): {e}")))
    }

    /// Returns the properties of a service. For a template, returns the properties that all
    /// instances share.
    ///
    /// # Errors
    /// The service does not exist or cannot be started.
    pub async fn service(&self, name: &str) -> Result<Service, CtlError> {
        let asked = async {
            let loaded = name.replace("@.", "@nvshare.");
            let path = self.manager().await?.load_unit(&loaded).await?;
            let unit =
                UnitProxy::builder(&self.connection).path(&path).cache_properties(CacheProperties::No).build().await?;
            let state = unit.load_state().await?;
            if state != "loaded" {
                return Ok(Err(state));
            }
            let mut service = self.describe(&path).await?;
            service.id = if loaded == name { unit.id().await? } else { name.to_owned() };
            Ok(Ok(service))
        };
        match asked.await {
            Ok(Ok(service)) => Ok(service),
            Ok(Err(state)) if state == "not-found" => Err(CtlError::Failed(format!(
                "systemd has no unit {name}. List the services with `systemctl list-unit-files --type=service`"
            ))),
            Ok(Err(state)) => Err(CtlError::Failed(format!("cannot start {name}: its state in systemd is {state}"))),
            Err(e) => Err(failed(name, &e)),
        }
    }

    async fn describe(&self, path: &OwnedObjectPath) -> zbus::Result<Service> {
        let service = self.proxy(path).await?;
        let (only, families) = service.restrict_address_families().await?;
        Ok(Service {
            id: String::new(),
            environment: service.environment().await?,
            environment_files: service.environment_files().await?.into_iter().map(|(file, _)| file).collect(),
            unset_environment: service.unset_environment().await?,
            root_directory: service.root_directory().await?,
            root_image: service.root_image().await?,
            unix_sockets: families.iter().any(|family| family == "AF_UNIX") == only,
            apparmor_profile: service.app_armor_profile().await?.1,
            programs: service.exec_start().await?.into_iter().map(|command| command.0).collect(),
            main_pid: service.main_pid().await?,
        })
    }

    async fn proxy(&self, path: &OwnedObjectPath) -> zbus::Result<ServiceProxy<'_>> {
        ServiceProxy::builder(&self.connection).path(path.clone()).cache_properties(CacheProperties::No).build().await
    }

    /// Returns the loaded services in a slice or its child slices, sorted.
    pub async fn services_in(&self, slice: &str) -> Result<Vec<String>, CtlError> {
        let below = format!("{}-", slice.strip_suffix(".slice").unwrap_or(slice));
        let listed = async {
            let mut services = Vec::new();
            for (name, _, load_state, _, _, _, path, ..) in
                self.manager().await?.list_units_by_patterns(&[], &["*.service"]).await?
            {
                let own = self.proxy(&path).await?.slice().await?;
                // `user-runtime-dir@` services only create a directory.
                let is_directory = name.starts_with("user-runtime-dir@");
                if load_state == "loaded" && !is_directory && (own == slice || own.starts_with(&below)) {
                    services.push(name);
                }
            }
            services.sort();
            Ok(services)
        };
        listed.await.map_err(|e| failed(slice, &e))
    }
}

fn failed(what: &str, error: &zbus::Error) -> CtlError {
    CtlError::Failed(format!("cannot ask systemd about {what}: {error}"))
}
