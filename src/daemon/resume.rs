//! Connections that outlive the daemon. systemd keeps them (`FDSTORE=1`), and hands them to the next daemon, which knows
//! nothing of what was said on them: what the one before had read and not acted upon is lost, and so is what it had
//! decided and not sent. So each client is asked to say all of it again, and what it said before that is thrown away.
//!
//! Nothing is decided before all have answered: who has not may hold a lock. Those whose process is stopped are not
//! waited for, and are let in when they answer. Programs that connect meanwhile are welcomed, and heard afterwards.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, SlotSet, version};
use tokio::io::unix::AsyncFd;
use tokio::sync::mpsc;
use tokio::task::spawn_local;
use tokio::time::Instant;
use tracing::{info, warn};

use crate::daemon::clients::{self, Counted, Hello, Shared};
use crate::daemon::core::{Arrival, Core};
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::{ConnectionName, StoredConnection};
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::peer;
use crate::identity::Identity;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, socket};

/// How long a client may take to answer. One that moves its memory just now takes a moment.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between looks whether those that have not answered are stopped.
const LOOK: Duration = Duration::from_millis(50);
/// No client has more to say.
const MAX_PACKETS: usize = 1024;

/// A client that is asked.
struct Asked {
    name: ConnectionName,
    connection: Rc<Connection>,
    identity: Arc<Identity>,
    pidfd: Option<AsyncFd<OwnedFd>>,
    counted: Counted,
}

/// All that it says.
struct Statement {
    asked: Asked,
    hello: Hello,
    packets: Vec<Vec<u8>>,
    held: SlotSet,
}

/// Takes over the connections that were kept; returns when everybody whose answer matters has given it.
pub async fn all(core: &Rc<RefCell<Core>>, kept: Vec<StoredConnection>, shared: &Rc<Shared>) {
    let begin = Instant::now();
    let count = kept.len();
    let (answer, mut answers) = mpsc::unbounded_channel();
    let mut silent: BTreeMap<u64, (Rc<Connection>, Arc<Identity>)> = BTreeMap::new();
    for StoredConnection { name, socket } in kept {
        core.borrow_mut().reserve_id(ClientId(name.client));
        let Some(asked) = ask(core, name, socket, shared) else {
            systemd::forget(&name.to_string());
            continue;
        };
        silent.insert(name.client, (asked.connection.clone(), asked.identity.clone()));
        let answer = answer.clone();
        spawn_local(async move {
            let statement = hear(asked).await;
            let _ = answer.send((name, statement));
        });
    }
    drop(answer);

    let mut statements = Vec::new();
    while !silent.is_empty() && begin.elapsed() < PATIENCE {
        match tokio::time::timeout(LOOK, answers.recv()).await {
            Ok(Some((name, statement))) => {
                silent.remove(&name.client);
                match statement {
                    Some(statement) => statements.push(statement),
                    None => systemd::forget(&name.to_string()),
                }
            }
            Ok(None) => break,
            Err(_) => silent.retain(|_, (_, identity)| !peer::is_stopped(identity.pid)),
        }
    }
    for (connection, identity) in silent.values() {
        let Identity { pid, uid, unit, name, .. } = &**identity;
        warn!(name: "client-silent", pid, uid, unit, "{name} does not answer, and is hung up on");
        connection.close();
    }
    if count > 0 {
        let milliseconds = begin.elapsed().as_millis() as u64;
        let resumed = statements.len();
        info!(name: "resumed", milliseconds, "{resumed} of {count} programs go on, after {milliseconds} ms");
    }
    admit(core, statements, shared);

    let (core, shared) = (core.clone(), shared.clone());
    spawn_local(async move {
        while let Some((name, statement)) = answers.recv().await {
            match statement {
                Some(statement) => admit(&core, vec![statement], &shared),
                None => systemd::forget(&name.to_string()),
            }
        }
    });
}

/// `None` where there is nobody to ask.
fn ask(core: &Rc<RefCell<Core>>, name: ConnectionName, socket: OwnedFd, shared: &Shared) -> Option<Asked> {
    let speaks = (version::RESUMING..=version::MAX).contains(&name.version);
    let keeps = core.borrow().config.keep_connections;
    let known = peer::identify(socket.as_fd()).ok().filter(|(identity, pidfd)| {
        // A child of the process may have the connection still.
        let lives = identity.pid == 0 || pidfd.is_some();
        lives
            && (name.start_time == 0
                || peer::start_time(identity.pid).is_none_or(|start_time| start_time == name.start_time))
    });
    let Some((identity, pidfd)) = known.filter(|_| speaks && keeps) else {
        socket::shut_down(socket.as_fd());
        return None;
    };
    let connection = Rc::new(Connection::new(socket, name.version).ok()?);
    let pidfd = pidfd.map(descriptors::watch).transpose().ok()?;
    let (counted, _) = Counted::new(shared.connections.clone(), identity.uid);
    connection.send(SchedulerMessage::Resume { client: name.client });
    Some(Asked { name, connection, identity: Arc::new(identity), pidfd, counted })
}

/// Waits for all that one client says; `None` if it is gone.
async fn hear(asked: Asked) -> Option<Statement> {
    let (hello, packets, held) = tokio::select! {
        said = listen(&asked.connection, asked.name) => said?,
        () = clients::died(asked.pidfd.as_ref()) => return None,
        // Never the first to end.
        () = async { asked.connection.flush().await; std::future::pending().await } => return None,
    };
    Some(Statement { asked, hello, packets, held })
}

async fn listen(connection: &Connection, name: ConnectionName) -> Option<(Hello, Vec<Vec<u8>>, SlotSet)> {
    let mut buffer = [0; MAX_LEN];
    let mut hello = None;
    let mut packets = Vec::new();
    loop {
        // Descriptors come with answers to the daemon before: they are closed.
        let packet = connection.receive(&mut buffer, &mut Vec::new()).await.ok()??;
        match ClientMessage::decode(packet, name.version) {
            Ok(ClientMessage::Hello { min_version: min, max_version: max, flags: _, resume, gang, library }) => {
                if resume != name.client || !(min..=max).contains(&name.version) {
                    return None;
                }
                hello = Some(Hello { min, max, resume, gang, library });
                packets.clear();
            }
            Ok(ClientMessage::Held { gpus }) if hello.is_some() => return Some((hello?, packets, gpus)),
            Ok(_) if hello.is_some() => {
                if packets.len() == MAX_PACKETS {
                    return None;
                }
                packets.push(packet.to_vec());
            }
            _ => {}
        }
        tokio::task::yield_now().await;
    }
}

/// Lets clients in with all that they said: first what is where, then who has which lock, then what they want.
fn admit(core: &Rc<RefCell<Core>>, mut statements: Vec<Statement>, shared: &Rc<Shared>) {
    statements.sort_by_key(|statement| statement.asked.name.client);
    let mut wishes = Vec::new();
    for Statement { asked, hello, packets, .. } in &mut statements {
        let client = ClientId(asked.name.client);
        let arrival = Arrival {
            connection: asked.connection.clone(),
            identity: asked.identity.clone(),
            version: asked.name.version,
            gang: hello.gang,
            library: hello.library.as_str().to_owned(),
            is_program: true,
            reconnects: true,
        };
        core.borrow_mut().resume(client, arrival, asked.name);
        for packet in std::mem::take(packets) {
            if is_wish(&packet, asked.name.version) {
                wishes.push((client, packet));
            } else {
                // What other threads of it said of a GPU, before it had said which GPU that is, it says again.
                let _ = core.borrow_mut().receive(client, &packet, Vec::new());
            }
        }
    }
    for Statement { asked, held, .. } in &statements {
        core.borrow_mut().resume_locks(ClientId(asked.name.client), *held);
    }
    for (client, packet) in wishes {
        let _ = core.borrow_mut().receive(client, &packet, Vec::new());
    }
    for Statement { asked, .. } in statements {
        let Asked { name, connection, identity, pidfd, counted } = asked;
        let (core, shared) = (core.clone(), shared.clone());
        spawn_local(async move {
            clients::converse(&core, ClientId(name.client), &connection, &identity, pidfd.as_ref(), &shared).await;
            drop(counted);
        });
    }
}

fn is_wish(packet: &[u8], version: u16) -> bool {
    use ClientMessage::{Open, Request, RequestLimit, Reserve};
    let message = ClientMessage::decode(packet, version);
    matches!(message, Ok(Open { .. } | Request { .. } | RequestLimit { .. } | Reserve { .. }))
}
