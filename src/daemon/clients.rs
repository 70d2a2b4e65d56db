//! The clients' connections: accepting them, the handshake, reading packets one by one and sending without ever
//! waiting. What a packet means is `session`'s, what it leads to is `core`'s.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use nvshare_wire::scheduler::Refusal;
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text, version};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tracing::{debug, error, warn};

use crate::daemon::core::{Arrival, Core};
use crate::daemon::logging::log_rate_limit::LogRateLimit;
use crate::daemon::transport::connection::Connection;
use crate::daemon::transport::peer;
use crate::daemon::transport::session::Violation;
use crate::identity::Identity;
use crate::scheduler::ClientId;
use crate::sys::descriptors::{self, Spare};
use crate::sys::socket;

/// A connection that says nothing for this long is closed. A client that was stopped meanwhile connects again.
const HELLO_TIMEOUT: Duration = Duration::from_secs(10);
/// How many packets of one client are read before others have their turn.
const BURST: usize = 16;
/// How many packets of one that has ended are read: more than a socket holds.
const MOST_LAST_WORDS: usize = 1024;
/// Connections beyond the limit of a user are still accepted, to be refused in words, but only so many at a time.
const REFUSALS_AT_ONCE: u32 = 32;
/// How long to wait before accepting again when that failed for a reason which waiting may cure.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// What all connections have in common.
#[derive(Debug)]
pub struct Shared {
    log_limit: RefCell<LogRateLimit>,
    /// Connections of each user, those that have not said Hello included.
    pub connections: Rc<RefCell<HashMap<u32, u32>>>,
    /// Turns true when clients of an earlier daemon have been taken over.
    resumed: watch::Receiver<bool>,
}

impl Shared {
    pub fn new(resumed: watch::Receiver<bool>) -> Self {
        Self { log_limit: RefCell::default(), connections: Rc::default(), resumed }
    }

    /// Waits until clients of an earlier daemon have been taken over: before that nobody else is heard.
    pub async fn resumed(&self) {
        let _ = self.resumed.clone().wait_for(|resumed| *resumed).await;
    }

    fn complain(&self, identity: &Identity, what: std::fmt::Arguments<'_>) {
        if self.log_limit.borrow_mut().allows("client", identity.uid) {
            let Identity { pid, uid, unit, name, .. } = identity;
            warn!(name: "client-refused", pid, uid, unit, "{name} {what}");
        }
    }
}

/// Accepts connections for as long as the daemon runs.
pub async fn accept(core: Rc<RefCell<Core>>, listener: OwnedFd, shared: Rc<Shared>) -> io::Result<()> {
    let listener = descriptors::watch(listener)?;
    let mut spare = Spare::new();
    let log_limit = &shared.log_limit;
    loop {
        let mut ready = listener.readable().await?;
        let accepted = match ready.try_io(|l| socket::accept(l.as_fd())) {
            Ok(accepted) => accepted,
            Err(_would_block) => continue,
        };
        match accepted {
            Ok(socket) => {
                tokio::task::spawn_local(serve(core.clone(), socket, shared.clone()));
            }
            // Linux says so before it looks whether anybody waits, so there may be nobody to refuse.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                if log_limit.borrow_mut().allows("descriptors", 0) {
                    error!(name: "no-descriptors", "no file descriptors are left ({e}): new programs are refused until others end");
                }
                let refused = spare.accept(listener.as_fd()).map(|socket| {
                    refuse(socket.as_fd(), Refusal::TooMany, "the scheduler has no file descriptors left");
                });
                // Before anybody else runs, who could take the descriptor and keep it.
                spare.refill();
                match refused {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                    Err(_) => tokio::time::sleep(ACCEPT_PAUSE).await,
                }
            }
            // The client gave up before it was accepted.
            Err(e) if matches!(e.raw_os_error(), Some(libc::ECONNABORTED | libc::EINTR)) => {}
            Err(e) => {
                if log_limit.borrow_mut().allows("accept", 0) {
                    error!("cannot accept a connection: {e}");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Tells a client why it is not served. What it sent is read first: a socket that is closed with something unread
/// takes its last words with it.
fn refuse(socket: BorrowedFd<'_>, reason: Refusal, text: &str) {
    let mut buffer = [0; MAX_LEN];
    let mut descriptors = Vec::new();
    while socket::receive(socket, &mut buffer, &mut descriptors).is_ok_and(|n| n > 0) {
        descriptors.clear();
    }
    let message = SchedulerMessage::Refused { reason, text: Text::new(text) };
    let _ = socket::send(socket, message.encode(0).as_bytes());
}

/// Counts a connection for its user while it lives.
pub struct Counted {
    connections: Rc<RefCell<HashMap<u32, u32>>>,
    uid: u32,
}

impl Counted {
    /// Counts one more, and says how many that makes.
    pub fn new(connections: Rc<RefCell<HashMap<u32, u32>>>, uid: u32) -> (Self, u32) {
        let count = {
            let mut counts = connections.borrow_mut();
            let count = counts.entry(uid).or_default();
            *count += 1;
            *count
        };
        (Self { connections, uid }, count)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let mut counts = self.connections.borrow_mut();
        if let Some(count) = counts.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.uid);
            }
        }
    }
}

/// One connection from beginning to end.
async fn serve(core: Rc<RefCell<Core>>, socket: OwnedFd, shared: Rc<Shared>) {
    let complain = |identity: &Identity, what: std::fmt::Arguments<'_>| shared.complain(identity, what);
    let (identity, pidfd) = match peer::identify(socket.as_fd()) {
        Ok(known) => known,
        Err(e) => {
            if shared.log_limit.borrow_mut().allows("identify", 0) {
                error!(name: "client-refused", "a program is refused: cannot tell who it is: {e}");
            }
            return refuse(socket.as_fd(), Refusal::Identity, &format!("the scheduler cannot tell who this is: {e}"));
        }
    };
    let identity = Arc::new(identity);
    let most = core.borrow().config.max_clients_per_user;
    let (_counted, count) = Counted::new(shared.connections.clone(), identity.uid);
    let too_many = identity.uid != 0 && count > most;
    if too_many && count > most + REFUSALS_AT_ONCE {
        return;
    }
    let watched = Connection::new(socket, 0)
        .and_then(|connection| pidfd.map(descriptors::watch).transpose().map(|pidfd| (connection, pidfd)));
    let (connection, pidfd) = match watched {
        Ok((connection, pidfd)) => (Rc::new(connection), pidfd),
        Err(e) => return error!("cannot watch a connection: {e}"),
    };

    let hello = match tokio::time::timeout(HELLO_TIMEOUT, hello(&connection)).await {
        Ok(Ok(Some(hello))) => hello,
        Ok(Ok(None)) => return,
        Ok(Err(violation)) => return complain(&identity, format_args!("is hung up on: {violation}")),
        Err(_) => return debug!(pid = identity.pid, "said no Hello within {HELLO_TIMEOUT:?}"),
    };
    let Hello { min, max, resume, gang, library } = hello;
    let Some(version) = version::negotiate(min, max) else {
        let (oldest, newest) = (version::MIN, version::MAX);
        complain(
            &identity,
            format_args!("is refused: its library speaks protocol {min} to {max}, this scheduler {oldest} to {newest}"),
        );
        let text = format!(
            "no common protocol: library {min} to {max}, scheduler {oldest} to {newest}; install the same nvshare on both sides"
        );
        return refuse(connection.socket(), Refusal::Version, &text);
    };
    if too_many {
        complain(&identity, format_args!("is refused: user {} has {most} programs connected", identity.uid));
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
        is_program: true,
        reconnects,
    };
    let client = core.borrow_mut().connect(arrival);
    shared.resumed().await;
    converse(&core, client, &connection, &identity, pidfd.as_ref(), &shared).await;
}

/// All that is said with a client that has been let in, until one side ends it.
pub async fn converse(
    core: &RefCell<Core>,
    client: ClientId,
    connection: &Connection,
    identity: &Identity,
    pidfd: Option<&AsyncFd<OwnedFd>>,
    shared: &Shared,
) {
    let end = tokio::select! {
        end = read(core, client, connection) => end,
        () = connection.overflowed() => End::Broke(Violation::Unread),
        // Never the first to end.
        () = async { connection.flush().await; std::future::pending().await } => End::HungUp,
        () = died(pidfd) => End::Died,
    };
    if !matches!(end, End::Broke(_)) {
        last_words(core, client, connection);
    }
    let why = match end {
        End::HungUp => "disconnected",
        End::Died => "has ended",
        End::Broke(violation) => {
            shared.complain(identity, format_args!("is hung up on: {violation}"));
            "was hung up on"
        }
    };
    core.borrow_mut().disconnect(client, why);
    connection.close();
}

/// A process that ends may have said something that nobody has read: its end can be seen first.
fn last_words(core: &RefCell<Core>, client: ClientId, connection: &Connection) {
    let mut buffer = [0; MAX_LEN];
    // Somebody else who has the socket can say things for ever.
    for _ in 0..MOST_LAST_WORDS {
        let Ok(length @ 1..) = socket::receive(connection.socket(), &mut buffer, &mut Vec::new()) else {
            return;
        };
        core.borrow_mut().receive_last(client, buffer.get(..length).unwrap_or_default());
    }
}

/// How a connection ends.
enum End {
    HungUp,
    /// The process is gone, although somebody (a child of it) may still have the socket.
    Died,
    Broke(Violation),
}

/// Waits for the end of a process.
pub async fn died(pidfd: Option<&AsyncFd<OwnedFd>>) {
    match pidfd {
        Some(pidfd) if pidfd.readable().await.is_ok() => {}
        _ => std::future::pending().await,
    }
}

/// What a client says of itself.
pub struct Hello {
    pub min: u16,
    pub max: u16,
    /// The id that it had on an earlier connection, or 0.
    pub resume: u64,
    pub gang: u64,
    pub library: Text<32>,
}

/// The first packet; `None` where the connection ends without one.
async fn hello(connection: &Connection) -> Result<Option<Hello>, Violation> {
    let mut buffer = [0; MAX_LEN];
    let Some(packet) = connection.receive(&mut buffer, &mut Vec::new()).await? else { return Ok(None) };
    match ClientMessage::decode(packet, 0) {
        Ok(ClientMessage::Hello { min_version, max_version, flags: _, resume, gang, library }) => {
            Ok(Some(Hello { min: min_version, max: max_version, resume, gang, library }))
        }
        Ok(_) | Err(nvshare_wire::WireError::Version { .. }) => Err(Violation::NotHello),
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
                        return End::Broke(violation);
                    }
                }
                Ok(None) => return End::HungUp,
                Err(violation) => return End::Broke(violation),
            }
        }
        tokio::task::yield_now().await;
    }
}
