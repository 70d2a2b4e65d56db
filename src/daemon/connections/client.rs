//! One client's connection: its handshake, its packets, and its end.

use std::cell::RefCell;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::client::ASLEEP;
use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{ClientMessage, MAX_LEN, Text, WireError, version};
use tokio::io::unix::AsyncFd;
use tracing::{debug, error};

use super::Connections;
use super::accept::{discard_unread, refuse};
use crate::daemon::core::{ABSENCE, Arrival, Core, Departure};
use crate::daemon::tenants::{Budget, Share, Slice, What};
use crate::daemon::transport::connection::{Connection, Received};
use crate::daemon::transport::peer;
use crate::daemon::transport::session::Violation;
use crate::identity::{Identity, Tenant};
use crate::scheduler::ClientId;
use crate::sys::foreign::{self, Foreign};
use crate::sys::{descriptors, socket};

/// A connection is closed if its first packet does not arrive within this time. A client that was
/// stopped for that time reconnects.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// Charge to the tenant's message budget for identifying a process, and for adding or removing a
/// client.
const ARRIVAL_TOKENS: u32 = 10;
/// A process that exits has ended this time after its connection was closed. If it has not, it
/// continues without the connection.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of packets that are read after a process has exited. A socket holds fewer.
const MAX_LAST_PACKETS: usize = 1024;

/// Completes a log line that begins with a program's name.
const DISCONNECTED: &str = "is disconnected after a protocol violation";

/// An accepted connection.
pub(super) struct Incoming {
    pub socket: Foreign,
    /// The UID of the claim that the socket belongs to. Empty if the socket belongs to no claim.
    pub claim: String,
    /// The budget of the presumed tenant, and the connection's share of that budget.
    pub budget: Arc<Budget>,
    pub arrival: Share,
}

/// Serves a connection from the handshake to its end.
pub(super) async fn serve(core: Rc<RefCell<Core>>, client: Incoming, connections: Rc<Connections>) {
    let Incoming { socket, claim, budget, arrival } = client;
    let slice = budget.slice().await;
    slice.spend(ARRIVAL_TOKENS);
    let (mut identity, pidfd) = match peer::identify(socket.as_fd()) {
        Ok(known) => known,
        Err(e) => {
            if connections.log_limit.borrow_mut().allows("identify", &Tenant::Root) {
                error!(name: "client-refused", "refused a program, because its process cannot be identified: {e}");
            }
            return refuse(
                socket.as_fd(),
                socket.owner(),
                Refusal::Identity,
                &format!("the scheduler cannot identify this process: {e}"),
            );
        }
    };
    slice.end().await;
    drop(arrival);
    identity.claim.uid = claim;
    let identity = Arc::new(identity);
    let budget = connections.budgets.of(&identity.tenant);
    let (place, too_many) = match budget.take(What::Clients, 1) {
        Some(place) => (place, false),
        // Sends the client the reason, except if too many refused clients of the tenant are still reading
        // their reasons.
        None => match budget.take(What::Refusals, 1) {
            Some(place) => (place, true),
            None => return socket::stop_receiving(socket.as_fd()),
        },
    };
    let watched = Connection::new(socket, 0, budget.clone())
        .and_then(|connection| pidfd.map(descriptors::watch).transpose().map(|pidfd| (connection, pidfd)));
    let (connection, pidfd) = match watched {
        Ok((connection, pidfd)) => (Rc::new(connection), pidfd.map(Rc::new)),
        Err(e) => return error!("cannot watch a connection: {e}"),
    };

    let hello = tokio::time::timeout(HELLO_TIMEOUT, read_hello(&connection)).await;
    if !matches!(hello, Ok(Ok(Some(_)))) {
        connection.close();
    }
    let hello = match hello {
        Ok(Ok(Some(hello))) => hello,
        Ok(Ok(None)) => return,
        Ok(Err(violation)) => return connections.log_refused(&identity, format_args!("{DISCONNECTED}: {violation}")),
        Err(_) => return debug!(pid = identity.pid, "sent no Hello within {HELLO_TIMEOUT:?}"),
    };
    let Hello { min, max, .. } = hello;
    let slice = budget.slice().await;
    slice.spend(ARRIVAL_TOKENS);
    let Some(version) = version::negotiate(min, max) else {
        let (oldest, newest) = (version::MIN, version::MAX);
        connections.log_refused(
            &identity,
            format_args!("is refused: its library speaks protocol {min} to {max}, this scheduler {oldest} to {newest}"),
        );
        let text = format!(
            "no common protocol: library {min} to {max}, scheduler {oldest} to {newest}. Install the same nvshare version for both"
        );
        return refuse(connection.socket(), budget.tenant().number(), Refusal::Version, &text);
    };
    if too_many {
        let text = too_many_clients(&budget);
        connections.log_refused(&identity, format_args!("is refused: {text}"));
        return refuse(connection.socket(), budget.tenant().number(), Refusal::TooMany, &text);
    }

    connection.set_version(version);
    let arrival = hello.arrival(&connection, &identity, version, &pidfd);
    let client = core.borrow_mut().connect(arrival);
    slice.end().await;
    connections.resumed().await;
    converse(&core, client, &connection, &identity, pidfd.as_deref(), &connections).await;
    drop(place);
}

/// A sentence about why the tenant's next client is refused.
pub(super) fn too_many_clients(budget: &Budget) -> String {
    let (tenant, most) = (budget.tenant(), budget.limit(What::Clients));
    format!("{tenant} has {most} programs connected, which is the limit max-clients-per-tenant")
}

/// Exchanges packets with a welcomed client until either side ends the connection.
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
        // This branch never completes: a failure to send does not end the connection.
        () = async { connection.flush().await; std::future::pending().await } => End::Closed,
        () = died(pidfd) => End::Died,
    };
    let departure = core.borrow().host.departures.departure(client);
    let end = match (end, departure) {
        (End::Closed, Some(Departure::Left(back) | Departure::Returning(back))) => tokio::select! {
            () = died(pidfd) => End::Died,
            () = back.notified() => End::Closed,
            () = tokio::time::sleep(ABSENCE) => End::Closed,
        },
        (end, _) => end,
    };
    let slice = connection.budget().slice().await;
    if !matches!(end, End::Violation(_)) {
        read_last_packets(core, client, connection, &slice);
    }
    let why = match end {
        End::Closed => "disconnected",
        End::Died => "has ended",
        End::Violation(violation) => {
            let what = if matches!(violation, Violation::Unproven { .. }) { "is refused" } else { DISCONNECTED };
            connections.log_refused(identity, format_args!("{what}: {violation}"));
            "was disconnected"
        }
    };
    let opened = core.borrow_mut().host.sharing.keep_open(client);
    core.borrow_mut().disconnect(client, why);
    connection.close();
    discard_unread(connection.socket(), connection.budget().tenant().number());
    slice.spend(ARRIVAL_TOKENS);
    slice.end().await;
    // A process that exits closes its connection first. A process that continues has its imports still mapped.
    if !opened.is_empty() && tokio::time::timeout(EXIT_TIMEOUT, died(pidfd)).await.is_ok() {
        let core = &mut *core.borrow_mut();
        core.host.sharing.importer_ended(&core.model, opened);
    }
}

/// Reads packets that a process sent before it exited. The daemon can notice the exit before it has
/// read these packets.
fn read_last_packets(core: &RefCell<Core>, client: ClientId, connection: &Connection, slice: &Slice<'_>) {
    let mut buffer = [0; MAX_LEN];
    // The number is limited: another process that shares the socket could send packets forever.
    for _ in 0..MAX_LAST_PACKETS {
        let owner = connection.budget().tenant().number();
        if foreign::is_behind(owner) {
            return;
        }
        let Ok(length @ 1..) = socket::receive(connection.socket(), &mut buffer, owner, &mut Vec::new()) else {
            return;
        };
        // Spends tokens even if none are left, so that the tenant's other clients are read later.
        let _ = core.borrow_mut().receive(client, buffer.get(..length).unwrap_or_default(), None, slice);
    }
}

/// How a connection ended.
enum End {
    Closed,
    /// The process has exited. A child of the process may still have the socket open.
    Died,
    Violation(Violation),
}

/// Waits until a process has exited.
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
    /// The client's ID on an earlier connection. 0 if there was none.
    pub resume: u64,
    /// True if an earlier scheduler put the client to sleep.
    pub is_asleep: bool,
    pub gang: u64,
    pub library: Text<32>,
}

impl Hello {
    pub fn arrival(
        &self,
        connection: &Rc<Connection>,
        identity: &Arc<Identity>,
        version: u16,
        process: &Option<Rc<AsyncFd<OwnedFd>>>,
    ) -> Arrival {
        Arrival {
            connection: connection.clone(),
            identity: identity.clone(),
            version,
            gang: self.gang,
            library: self.library.as_str().to_owned(),
            lock: None,
            reconnects: self.resume != 0,
            is_asleep: self.is_asleep,
            process: process.clone(),
        }
    }
}

/// Reads the first packet. `None` if the connection ends without a packet.
async fn read_hello(connection: &Connection) -> Result<Option<Hello>, Violation> {
    let mut buffer = [0; MAX_LEN];
    let Some(packet) = connection.receive(&mut buffer, &mut Vec::new()).await? else { return Ok(None) };
    match ClientMessage::decode(packet, 0) {
        Ok(ClientMessage::Hello { min_version: min, max_version: max, flags, resume, gang, library }) => {
            let is_asleep = flags & ASLEEP != 0;
            Ok(Some(Hello { min, max, resume, is_asleep, gang, library }))
        }
        Ok(_) | Err(WireError::Version { .. }) => Err(Violation::NotHello),
        Err(error) => Err(error.into()),
    }
}

/// Reads a client's packets during the time slices of its tenant.
async fn read(core: &RefCell<Core>, client: ClientId, connection: &Connection) -> End {
    let mut buffer = [0; MAX_LEN];
    loop {
        connection.readable().await;
        let slice = connection.budget().slice().await;
        loop {
            let mut descriptors = Vec::new();
            let length = match connection.try_receive(&mut buffer, &mut descriptors) {
                Ok(Received::Packet(length)) => length,
                Ok(Received::Nothing) => break,
                Ok(Received::End) => return End::Closed,
                Err(violation) => return End::Violation(violation),
            };
            let packet = buffer.get(..length).unwrap_or_default();
            let received = core.borrow_mut().receive(client, packet, Some(descriptors), &slice);
            match received {
                Ok(true) => {}
                Ok(false) => break,
                Err(violation) => return End::Violation(violation),
            }
        }
        slice.end().await;
    }
}
