//! One client's connection: the handshake, its packets, its end.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{ClientMessage, MAX_LEN, Text, WireError, version};
use tokio::io::unix::AsyncFd;
use tracing::{debug, error};

use super::Connections;
use super::accept::refuse;
use crate::daemon::core::{Arrival, Core};
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::Violation;
use crate::identity::Identity;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, socket};

/// A connection that sends nothing for this long is closed. A client that was stopped meanwhile connects again.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Packets of one client that are read before other clients have their turn.
const BURST: usize = 16;
/// Packets that are read of a process that has ended: more than a socket holds.
const MAX_LAST_PACKETS: usize = 1024;
/// Connections beyond the limit of a user that are refused with a message at a time; more are just closed.
const MAX_REFUSALS: u32 = 32;

/// Completes a log line that begins with a program's name.
const DISCONNECTED: &str = "is disconnected after a protocol violation";

/// Serves a connection from the handshake to its end.
pub(super) async fn serve(core: Rc<RefCell<Core>>, socket: OwnedFd, connections: Rc<Connections>) {
    let (identity, pidfd) = match peer::identify(socket.as_fd()) {
        Ok(known) => known,
        Err(e) => {
            if connections.log_limit.borrow_mut().allows("identify", 0) {
                error!(name: "client-refused", "a program is refused: cannot identify it: {e}");
            }
            return refuse(
                socket.as_fd(),
                Refusal::Identity,
                &format!("the scheduler cannot identify this process: {e}"),
            );
        }
    };
    let identity = Arc::new(identity);
    let most = core.borrow().config.max_clients_per_user;
    let (_counted, count) = connections.count(identity.uid);
    let too_many = identity.uid != 0 && count > most;
    if too_many && count > most + MAX_REFUSALS {
        return;
    }
    let watched = Connection::new(socket, 0)
        .and_then(|connection| pidfd.map(descriptors::watch).transpose().map(|pidfd| (connection, pidfd)));
    let (connection, pidfd) = match watched {
        Ok((connection, pidfd)) => (Rc::new(connection), pidfd),
        Err(e) => return error!("cannot watch a connection: {e}"),
    };

    let hello = match tokio::time::timeout(HELLO_TIMEOUT, read_hello(&connection)).await {
        Ok(Ok(Some(hello))) => hello,
        Ok(Ok(None)) => return,
        Ok(Err(violation)) => return connections.log_refused(&identity, format_args!("{DISCONNECTED}: {violation}")),
        Err(_) => return debug!(pid = identity.pid, "sent no Hello within {HELLO_TIMEOUT:?}"),
    };
    let Hello { min, max, resume, gang, library } = hello;
    let Some(version) = version::negotiate(min, max) else {
        let (oldest, newest) = (version::MIN, version::MAX);
        connections.log_refused(
            &identity,
            format_args!("is refused: its library speaks protocol {min} to {max}, this scheduler {oldest} to {newest}"),
        );
        let text = format!(
            "no common protocol: library {min} to {max}, scheduler {oldest} to {newest}; install the same nvshare on both sides"
        );
        return refuse(connection.socket(), Refusal::Version, &text);
    };
    if too_many {
        connections
            .log_refused(&identity, format_args!("is refused: user {} has {most} programs connected", identity.uid));
        let text = format!("{most} programs of this user are connected; max-clients-per-user allows no more");
        return refuse(connection.socket(), Refusal::TooMany, &text);
    }

    connection.set_version(version);
    let library = library.as_str().to_owned();
    let reconnects = resume != 0;
    let arrival = Arrival {
        connection: connection.clone(),
        identity: identity.clone(),
        version,
        gang,
        library,
        lock: None,
        reconnects,
    };
    let client = core.borrow_mut().connect(arrival);
    connections.resumed().await;
    converse(&core, client, &connection, &identity, pidfd.as_ref(), &connections).await;
}

/// Exchanges packets with a client that has been welcomed, until either side ends the connection.
pub async fn converse(
    core: &RefCell<Core>,
    client: ClientId,
    connection: &Connection,
    identity: &Identity,
    pidfd: Option<&AsyncFd<OwnedFd>>,
    connections: &Connections,
) {
    let end = tokio::select! {
        end = read(core, client, connection) => end,
        () = connection.overflowed() => End::Violation(Violation::Unread),
        // Sending never ends the connection.
        () = async { connection.flush().await; std::future::pending().await } => End::Closed,
        () = died(pidfd) => End::Died,
    };
    if !matches!(end, End::Violation(_)) {
        read_last_packets(core, client, connection);
    }
    let why = match end {
        End::Closed => "disconnected",
        End::Died => "has ended",
        End::Violation(violation) => {
            connections.log_refused(identity, format_args!("{DISCONNECTED}: {violation}"));
            "was disconnected"
        }
    };
    core.borrow_mut().disconnect(client, why);
    connection.close();
}

/// Reads what a process sent before it ended: its end can be noticed before its last packets.
fn read_last_packets(core: &RefCell<Core>, client: ClientId, connection: &Connection) {
    let mut buffer = [0; MAX_LEN];
    // Bounded, since a process that shares the socket could send for ever.
    for _ in 0..MAX_LAST_PACKETS {
        let Ok(length @ 1..) = socket::receive(connection.socket(), &mut buffer, &mut Vec::new()) else {
            return;
        };
        core.borrow_mut().receive_last(client, buffer.get(..length).unwrap_or_default());
    }
}

/// The end of a connection.
enum End {
    Closed,
    /// The process has ended, although a child of it may still have the socket.
    Died,
    Violation(Violation),
}

/// Waits until a process has ended.
pub async fn died(pidfd: Option<&AsyncFd<OwnedFd>>) {
    match pidfd {
        Some(pidfd) if pidfd.readable().await.is_ok() => {}
        _ => std::future::pending().await,
    }
}

/// The first message of a client.
pub struct Hello {
    pub min: u16,
    pub max: u16,
    /// Its id on an earlier connection, or 0.
    pub resume: u64,
    pub gang: u64,
    pub library: Text<32>,
}

/// Reads the first packet. `None` if the connection ends without one.
async fn read_hello(connection: &Connection) -> Result<Option<Hello>, Violation> {
    let mut buffer = [0; MAX_LEN];
    let Some(packet) = connection.receive(&mut buffer, &mut Vec::new()).await? else { return Ok(None) };
    match ClientMessage::decode(packet, 0) {
        Ok(ClientMessage::Hello { min_version, max_version, flags: _, resume, gang, library }) => {
            Ok(Some(Hello { min: min_version, max: max_version, resume, gang, library }))
        }
        Ok(_) | Err(WireError::Version { .. }) => Err(Violation::NotHello),
        Err(error) => Err(error.into()),
    }
}

async fn read(core: &RefCell<Core>, client: ClientId, connection: &Connection) -> End {
    let mut buffer = [0; MAX_LEN];
    loop {
        for _ in 0..BURST {
            let mut descriptors = Vec::new();
            match connection.receive(&mut buffer, &mut descriptors).await {
                Ok(Some(packet)) => {
                    if let Err(violation) = core.borrow_mut().receive(client, packet, descriptors) {
                        return End::Violation(violation);
                    }
                }
                Ok(None) => return End::Closed,
                Err(violation) => return End::Violation(violation),
            }
        }
        tokio::task::yield_now().await;
    }
}
