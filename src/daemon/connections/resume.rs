//! Takes over the connections that systemd stored for an earlier daemon (`FDSTORE=1`). Messages
//! that the earlier daemon read but did not handle are lost. Decisions that the earlier daemon did
//! not send are lost too. The new daemon therefore asks each client to send its whole state again
//! (`Resume`), and discards all packets before the answer.
//!
//! A silent client may hold a lock, so no lock is granted before all clients have answered. There
//! are three exceptions: stopped processes, processes without memory on any GPU, and tenants that have
//! used up their message budget. Clients of these processes and tenants are taken over last, once they
//! answer. Programs that connect during the takeover are welcomed, but their packets are not read until
//! the takeover is complete.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::client::ASLEEP;
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, SlotSet, version};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::spawn_local;
use tokio::time::Instant;
use tracing::{info, warn};

use super::Connections;
use super::client::{self, Hello};
use super::lock::{self, TakenOver};
use crate::daemon::core::{Core, MAX_DEVICES};
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::{EntryName, Kind, StoredConnection};
use crate::daemon::tenants::{Share, Slice, What};
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::peer;
use crate::identity::Identity;
use crate::scheduler::ClientId;
use crate::sys::device_file::DeviceFile;
use crate::sys::foreign::Foreign;
use crate::sys::{descriptors, socket};

/// Maximum time for a client to answer. A client that is moving its memory answers late.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the checks for silent clients that are stopped.
const CHECK_PERIOD: Duration = Duration::from_millis(50);
/// Maximum number of packets that contain a client's state.
const MAX_PACKETS: usize = 1024;

/// A client that was asked for its state over its stored connection.
struct StoredClient {
    name: EntryName,
    connection: Rc<Connection>,
    identity: Arc<Identity>,
    pidfd: Option<Rc<AsyncFd<OwnedFd>>>,
    place: Share,
}

/// A client's answer: its state.
struct ClientState {
    asked: StoredClient,
    hello: Hello,
    packets: Vec<Vec<u8>>,
    /// The device files that the client has open.
    devices: BTreeSet<DeviceFile>,
    held: SlotSet,
}

/// Takes over stored connections. Returns once all clients have answered, apart from stopped clients,
/// clients that are on no GPU, and clients without message budget.
pub async fn resume_all(core: &Rc<RefCell<Core>>, stored: Vec<StoredConnection>, connections: &Rc<Connections>) {
    let begin = Instant::now();
    let (stored, locks): (Vec<_>, Vec<_>) = stored.into_iter().partition(|stored| stored.name.kind == Kind::Program);
    for StoredConnection { name, .. } in &locks {
        core.borrow_mut().model.reserve_id(ClientId(name.client));
    }
    let count = stored.len();
    let (answer, mut answers) = mpsc::unbounded_channel();
    let mut silent: BTreeMap<u64, (Rc<Connection>, Arc<Identity>)> = BTreeMap::new();
    for StoredConnection { name, socket, record: _ } in stored {
        core.borrow_mut().model.reserve_id(ClientId(name.client));
        let Some(asked) = ask(name, socket, connections) else {
            systemd::forget(&name.to_string());
            continue;
        };
        silent.insert(name.client, (asked.connection.clone(), asked.identity.clone()));
        let answer = answer.clone();
        spawn_local(async move {
            let state = read_state(asked).await;
            let _ = answer.send((name, state));
        });
    }
    drop(answer);

    let mut states = Vec::new();
    let is_awaited = |silent: &BTreeMap<u64, (Rc<Connection>, Arc<Identity>)>| {
        let core = core.borrow();
        silent.values().any(|(_, identity)| !core.model.is_off_gpus(identity.pid.try_into().unwrap_or(0)))
    };
    while is_awaited(&silent) && begin.elapsed() < ANSWER_TIMEOUT {
        match tokio::time::timeout(CHECK_PERIOD, answers.recv()).await {
            Ok(Some((name, state))) => {
                silent.remove(&name.client);
                match state {
                    Some(state) => states.push(state),
                    None => systemd::forget(&name.to_string()),
                }
            }
            Ok(None) => break,
            Err(_) => silent.retain(|_, (_, identity)| !peer::is_stopped(identity.pid)),
        }
        silent.retain(|_, (connection, _)| !connection.budget().is_spent());
    }
    if count > 0 {
        let milliseconds = begin.elapsed().as_millis() as u64;
        let resumed = states.len();
        info!(name: "resumed", milliseconds, "{resumed} of {count} programs continue, after {milliseconds} ms");
    }
    // Held locks are restored before any client's request for a lock.
    let locks: Vec<TakenOver> =
        locks.into_iter().filter_map(|stored| lock::take_over(core, connections, stored)).collect();
    let late = admit(core, states, connections, false).await;
    locks.into_iter().for_each(TakenOver::go_on);

    let (core, connections) = (core.clone(), connections.clone());
    spawn_local(async move {
        late.into_iter().for_each(|state| admit_late(state, &core, &connections));
        loop {
            let (name, state) = tokio::select! {
                answer = answers.recv() => match answer {
                    Some(answer) => answer,
                    None => return,
                },
                () = tokio::time::sleep_until(begin + ANSWER_TIMEOUT), if !silent.is_empty() => {
                    silent.retain(|_, (connection, identity)| {
                        !peer::is_stopped(identity.pid) && !connection.budget().is_spent()
                    });
                    std::mem::take(&mut silent).into_values().for_each(disconnect);
                    continue;
                }
            };
            silent.remove(&name.client);
            match state {
                Some(state) => admit_late(state, &core, &connections),
                None => systemd::forget(&name.to_string()),
            }
        }
    });
}

fn disconnect((connection, identity): (Rc<Connection>, Arc<Identity>)) {
    let Identity { pid, uid, unit, name, .. } = &*identity;
    warn!(name: "client-silent", pid, uid, unit, "disconnected {name}, because it does not answer");
    connection.close();
}

/// Takes over a client as soon as its tenant's budget allows more messages.
fn admit_late(state: ClientState, core: &Rc<RefCell<Core>>, connections: &Rc<Connections>) {
    let (core, connections) = (core.clone(), connections.clone());
    spawn_local(async move {
        let budget = state.asked.connection.budget().clone();
        budget.slice().await.end().await;
        admit(&core, vec![state], &connections, true).await;
    });
}

/// Asks a client for its state. `None` if its process has exited, or its connection cannot be taken
/// over.
fn ask(name: EntryName, socket: OwnedFd, connections: &Connections) -> Option<StoredClient> {
    let is_supported = (version::MIN..=version::MAX).contains(&name.version);
    let tenant = peer::presumed_tenant(socket.as_fd());
    let socket = Foreign::connection(socket, tenant.number());
    let known = peer::identify(socket.as_fd()).ok().filter(|(identity, pidfd)| {
        // If the process has exited, its child may still have the connection open.
        let is_alive = identity.pid == 0 || pidfd.is_some();
        is_alive
            && (name.start_time == 0
                || peer::start_time(identity.pid).is_none_or(|start_time| start_time == name.start_time))
    });
    let Some((identity, pidfd)) = known.filter(|_| is_supported) else {
        socket::shut_down(socket.as_fd());
        return None;
    };
    let budget = connections.budgets.of(&identity.tenant);
    let place = budget.hold(What::Clients, 1);
    let connection = Rc::new(Connection::new(socket, name.version, budget).ok()?);
    let pidfd = pidfd.map(descriptors::watch).transpose().ok()?.map(Rc::new);
    connection.send(SchedulerMessage::Resume { client: name.client });
    Some(StoredClient { name, connection, identity: Arc::new(identity), pidfd, place })
}

/// Waits for the state of one client. `None` if the client has disconnected.
async fn read_state(asked: StoredClient) -> Option<ClientState> {
    let (hello, packets, devices, held) = tokio::select! {
        answer = read_answer(&asked.connection, asked.name) => answer?,
        () = client::died(asked.pidfd.as_deref()) => return None,
        // This branch never completes: a failure to send does not end the connection.
        () = async { asked.connection.flush().await; std::future::pending().await } => return None,
    };
    Some(ClientState { asked, hello, packets, devices, held })
}

async fn read_answer(
    connection: &Connection,
    name: EntryName,
) -> Option<(Hello, Vec<Vec<u8>>, BTreeSet<DeviceFile>, SlotSet)> {
    let mut buffer = [0; MAX_LEN];
    let mut hello = None;
    let (mut packets, mut devices) = (Vec::new(), BTreeSet::new());
    loop {
        // Other descriptors belong to answers to the earlier daemon, so they are closed.
        let mut descriptors = Vec::new();
        let packet = connection.receive(&mut buffer, &mut descriptors).await.ok()??;
        devices.extend(descriptors.iter().filter_map(DeviceFile::opened).take(MAX_DEVICES - devices.len()));
        drop(descriptors);
        match ClientMessage::decode(packet, name.version) {
            Ok(ClientMessage::Hello { min_version: min, max_version: max, flags, resume, gang, library }) => {
                if resume != name.client || !(min..=max).contains(&name.version) {
                    return None;
                }
                let is_asleep = flags & ASLEEP != 0;
                hello = Some(Hello { min, max, resume, is_asleep, gang, library });
                packets.clear();
            }
            Ok(ClientMessage::Held { gpus }) if hello.is_some() => return Some((hello?, packets, devices, gpus)),
            Ok(_) if hello.is_some() => {
                if packets.len() == MAX_PACKETS {
                    return None;
                }
                packets.push(packet.to_vec());
            }
            _ => {}
        }
        let slice = connection.budget().slice().await;
        slice.spend(1);
        slice.end().await;
    }
}

/// Passes packets to the scheduler until the time slice ends.
fn feed(core: &RefCell<Core>, client: ClientId, slice: &Slice<'_>, packets: &mut impl Iterator<Item = Vec<u8>>) {
    for packet in packets {
        // Another thread of the client may have sent packets about a GPU before the packet that names the GPU.
        // Such packets violate the protocol. The error is ignored, because the client sends them again.
        let received = core.borrow_mut().receive(client, &packet, Some(Vec::new()), slice);
        if !received.unwrap_or_else(|_| slice.spend(0)) {
            break;
        }
    }
}

/// Takes clients over: first their memory, then the locks that they hold, then their requests. If
/// `is_late` is false, skips and returns clients whose tenants have used up their message budget.
async fn admit(
    core: &Rc<RefCell<Core>>,
    mut states: Vec<ClientState>,
    connections: &Rc<Connections>,
    is_late: bool,
) -> Vec<ClientState> {
    states.sort_by_key(|state| state.asked.name.client);
    let (mut admitted, mut late) = (Vec::new(), Vec::new());
    for mut state in states {
        let ClientState { asked, hello, packets: packets_left, devices, .. } = &mut state;
        if !is_late && asked.connection.budget().is_spent() {
            late.push(state);
            continue;
        }
        let client = ClientId(asked.name.client);
        let arrival = hello.arrival(&asked.connection, &asked.identity, asked.name.version, &asked.pidfd);
        core.borrow_mut().resume(client, arrival, asked.name);
        core.borrow_mut().host.files.resume(client);
        core.borrow_mut().model.prove(client, std::mem::take(devices));
        let packets = std::mem::take(packets_left);
        let (later, first): (Vec<_>, Vec<_>) =
            packets.into_iter().partition(|packet| is_request(packet, asked.name.version));
        *packets_left = later;
        let mut first = first.into_iter().peekable();
        while first.peek().is_some() {
            let slice = asked.connection.budget().slice_at_once();
            feed(core, client, &slice, &mut first);
            slice.end().await;
        }
        admitted.push(state);
    }
    for ClientState { asked, held, .. } in &admitted {
        core.borrow_mut().resume_locks(ClientId(asked.name.client), *held);
    }
    for ClientState { asked, packets: requests, .. } in admitted {
        let StoredClient { name, connection, identity, pidfd, place } = asked;
        let (core, connections) = (core.clone(), connections.clone());
        spawn_local(async move {
            let mut requests = requests.into_iter().peekable();
            while requests.peek().is_some() {
                let slice = connection.budget().slice().await;
                feed(&core, ClientId(name.client), &slice, &mut requests);
                slice.end().await;
            }
            client::converse(&core, ClientId(name.client), &connection, &identity, pidfd.as_deref(), &connections)
                .await;
            drop(place);
        });
    }
    late
}

fn is_request(packet: &[u8], version: u16) -> bool {
    use ClientMessage::{Open, Request, RequestLimit, Reserve};
    let message = ClientMessage::decode(packet, version);
    matches!(message, Ok(Open { .. } | Request { .. } | RequestLimit { .. } | Reserve { .. }))
}
