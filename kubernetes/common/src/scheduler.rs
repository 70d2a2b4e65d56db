//! The connection to the scheduler: D-Bus without a bus, on its control socket.

use std::os::unix::net::UnixStream;
use std::path::Path;

use nvshare::bus::SchedulerProxy;
use zbus::Connection;
use zbus::connection::Builder;
use zbus::proxy::CacheProperties;

/// Connects to the scheduler whose control socket is `control`.
///
/// # Errors
/// A sentence for the log: no scheduler listens there, or it ends the handshake.
pub async fn connect(control: &Path) -> Result<(Connection, SchedulerProxy<'static>), String> {
    let missing = |e: std::io::Error| format!("no scheduler is at {}: {e}", control.display());
    let stream = UnixStream::connect(control).map_err(missing)?;
    let proxy = async {
        let connection = Builder::unix_stream(stream).p2p().build().await?;
        let proxy = SchedulerProxy::builder(&connection).cache_properties(CacheProperties::No).build().await?;
        Ok((connection, proxy))
    };
    proxy.await.map_err(|e: zbus::Error| format!("the scheduler at {} hangs up: {e}", control.display()))
}
