//! Serves the object in two places: on the bus and on the control socket.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::task::spawn_local;
use tracing::{debug, error, info, warn};
use zbus::{Guid, connection};

use super::announce::announce;
use super::callers::{Callers, Known};
use super::object::Object;
use super::served::Served;
use super::{Bus, Shared, suspend};
use crate::bus;
use crate::daemon::transport::peer::{Process, Where};
use crate::sys::{credentials, descriptors, socket};

/// Pause between attempts to connect to the bus.
const RETRY: Duration = Duration::from_secs(5);
/// Maximum number of concurrent connections to the control socket. Further connections wait.
const MAX_PEERS: usize = 64;
/// Maximum number of these connections from other PID namespaces. A peer can announce a message of 128
/// MiB, for which zbus allocates memory immediately. A connection beyond the limit is dropped.
const MAX_VISITORS: usize = 1;
/// A peer that does not complete the handshake within this time is disconnected.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Maintains a connection to the bus. Reconnects if the connection is lost.
pub async fn serve_bus(bus: Bus, shared: Shared, attempted: oneshot::Sender<()>) {
    let mut attempted = Some(attempted);
    let mut complained = false;
    let address = match &bus {
        Bus::None => return,
        Bus::System => None,
        Bus::Address(address) => Some(address.as_str()),
    };
    let builder = || address.map_or_else(connection::Builder::system, connection::Builder::address);
    loop {
        let connected = async {
            let asker = builder().build().await?;
            let callers = Callers::bus(asker.clone(), shared.budgets.clone());
            let object = Arc::new(Object { shared: shared.clone(), callers });
            // The name is requested last, so that its owner serves the object from the start.
            let connection = builder()
                .serve_at(bus::PATH, Served(object))
                .name(bus::NAME)
                .allow_name_replacements(false)
                .replace_existing_names(false)
                .build()
                .await?;
            Ok::<_, zbus::Error>((connection, asker))
        };
        match connected.await {
            Ok((connection, asker)) => {
                info!("on the bus as {}", bus::NAME);
                drop(attempted.take());
                complained = false;
                let followers =
                    async { tokio::join!(announce(&connection, &shared), suspend::follow(&connection, &shared)) };
                let mut followers = std::pin::pin!(followers);
                tokio::select! {
                    _ = &mut followers => {}
                    () = asker.closed() => {
                        // The followers must notice the end themselves: a suspend ends with the bus.
                        drop(connection.clone().close().await);
                        followers.await;
                    }
                }
                warn!(name: "bus-gone", "lost the connection to the bus");
            }
            Err(e) => {
                // A missing bus is not an error: containers and small systems have no bus.
                if !std::mem::replace(&mut complained, true) {
                    info!("cannot connect to the bus, retrying: {e}");
                }
                drop(attempted.take());
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// Serves the same object on the control socket, to directly connected peers.
pub async fn serve_peers(listener: OwnedFd, shared: Shared) {
    let listener = match descriptors::watch(listener) {
        Ok(listener) => listener,
        Err(e) => return error!("cannot serve the control socket: {e}"),
    };
    let places = Arc::new(Semaphore::new(MAX_PEERS));
    let visitors = Arc::new(Semaphore::new(MAX_VISITORS));
    loop {
        let Ok(place) = places.clone().acquire_owned().await else { return };
        let Ok(mut ready) = listener.readable().await else { return };
        match ready.try_io(|l| socket::accept(l.as_fd())) {
            Ok(Ok(stream)) => {
                // A process that has ended may have left its connection to a child in a container. With `hidepid`, no
                // process is shown, so that mount option must not make every peer a visitor.
                let is_of_host = |peer: Process| matches!(peer.place(), Where::Host | Where::Hidden);
                let is_visitor = !Process::of_socket(stream.as_fd()).is_ok_and(is_of_host);
                let visit = is_visitor.then(|| visitors.clone().try_acquire_owned());
                if let Some(Err(_)) = visit {
                    debug!("dropped a control connection: at most {MAX_VISITORS} may come from other PID namespaces");
                    continue;
                }
                let shared = shared.clone();
                spawn_local(async move {
                    if let Err(e) = serve_peer(stream, shared).await {
                        debug!("control connection failed: {e}");
                    }
                    drop((place, visit));
                });
            }
            Ok(Err(e)) => {
                debug!("cannot accept a control connection: {e}");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
            Err(_would_block) => {}
        }
    }
}

async fn serve_peer(stream: OwnedFd, mut shared: Shared) -> zbus::Result<()> {
    let credentials::Credentials { gid, .. } = credentials::credentials(stream.as_fd())?;
    let groups = credentials::groups(stream.as_fd(), gid)?;
    let process = Process::of_socket(stream.as_fd())?;
    shared.is_visitor = process.place() != Where::Host;
    let callers = Callers::Peer(Known::new(process, groups, &shared.budgets));
    let object = Arc::new(Object { shared: shared.clone(), callers });
    let build = connection::Builder::unix_stream(UnixStream::from(stream))
        .server(Guid::generate())
        .p2p()
        .serve_at(bus::PATH, Served(object))
        .build();
    let Ok(connection) = tokio::time::timeout(HANDSHAKE_TIMEOUT, build).await else { return Ok(()) };
    announce(&connection?, &shared).await;
    Ok(())
}
