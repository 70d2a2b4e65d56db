//! Finding the scheduler: on the system bus, else on its control socket.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use zbus::connection::Builder;
use zbus::proxy::CacheProperties;

use super::CtlError;
use crate::bus::SchedulerProxy;
use crate::config::paths::CONTROL_SOCKET;

/// Where the scheduler is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Target {
    /// On the system bus; on a host without one, on the control socket.
    #[default]
    Anywhere,
    Control(PathBuf),
}

impl Target {
    pub(super) async fn connect(&self) -> Result<SchedulerProxy<'static>, CtlError> {
        let connection = match self {
            Self::Control(path) => peer(path).await?,
            Self::Anywhere => match Builder::system().build().await {
                Ok(connection) => connection,
                Err(no_bus) => {
                    let path = Path::new(CONTROL_SOCKET);
                    if !path.exists() {
                        return Err(CtlError::not_running(format_args!(
                            "no system bus: {no_bus}; no {CONTROL_SOCKET}"
                        )));
                    }
                    peer(path).await?
                }
            },
        };
        Ok(SchedulerProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?)
    }
}

async fn peer(path: &Path) -> Result<zbus::Connection, CtlError> {
    let stream = UnixStream::connect(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::PermissionDenied => CtlError::Failed(format!(
            "you may not use the control socket {}: only root and the group nvshare may",
            path.display()
        )),
        _ => CtlError::not_running(format_args!("{}: {e}", path.display())),
    })?;
    Ok(Builder::unix_stream(stream).p2p().build().await?)
}
