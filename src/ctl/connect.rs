//! Finds the scheduler on the system bus, or else on the scheduler's control socket.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use zbus::connection::Builder;
use zbus::fdo::DBusProxy;
use zbus::names::BusName;
use zbus::proxy::CacheProperties;

use super::CtlError;
use super::systemd::Systemd;
use crate::bus::{NAME, SchedulerProxy};
use crate::config::paths::CONTROL_SOCKET;

const UNIT: &str = "nvshare.service";

/// Where to connect to the scheduler.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Target {
    /// The system bus, or the control socket on a host without a system bus.
    #[default]
    Anywhere,
    Control(PathBuf),
}

impl Target {
    pub(super) async fn connect(&self) -> Result<SchedulerProxy<'static>, CtlError> {
        let connection = match self {
            Self::Control(path) => peer(path).await?,
            Self::Anywhere => match Builder::system().build().await {
                Ok(connection) => {
                    check_unit(&connection).await?;
                    connection
                }
                Err(no_bus) => {
                    let path = Path::new(CONTROL_SOCKET);
                    if !path.exists() {
                        return Err(CtlError::not_running(format_args!(
                            "cannot connect to the system bus: {no_bus}, and {CONTROL_SOCKET} does not exist"
                        )));
                    }
                    peer(path).await?
                }
            },
        };
        Ok(SchedulerProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?)
    }
}

/// Checks the state of the scheduler's unit before the first call. The bus would activate the unit
/// for that call, and wait 25 seconds if the unit cannot be started.
async fn check_unit(connection: &zbus::Connection) -> Result<(), CtlError> {
    let name = BusName::try_from(NAME)?;
    if DBusProxy::new(connection).await?.name_has_owner(name).await? {
        return Ok(());
    }
    // Without systemd, the error of the later call is sufficient.
    match Systemd::of(connection.clone()).states(UNIT).await {
        Ok((load_state, _)) if load_state == "masked" => Err(CtlError::NotRunning(format!(
            "the scheduler is not running: {UNIT} is masked. As root, run `systemctl unmask {UNIT} nvshare.socket`"
        ))),
        Ok((_, active_state)) if active_state == "failed" => Err(CtlError::NotRunning(format!(
            "the scheduler is not running: {UNIT} has failed. `journalctl -u {UNIT}` and `systemctl status {UNIT}` \
             show the reason, and `nvshare-scheduler --check-config` checks its configuration. To start it again, run \
             `systemctl reset-failed {UNIT} nvshare.socket` and `systemctl start nvshare.socket` as root"
        ))),
        _ => Ok(()),
    }
}

async fn peer(path: &Path) -> Result<zbus::Connection, CtlError> {
    let stream = UnixStream::connect(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => CtlError::Failed(format!(
            "cannot use the control socket {}: only root and the group nvshare have access",
            path.display()
        )),
        _ => CtlError::not_running(format_args!("{}: {e}", path.display())),
    })?;
    Ok(Builder::unix_stream(stream).p2p().build().await?)
}
