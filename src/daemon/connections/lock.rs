//! GPU locks that are acquired over D-Bus, without the library: `AcquireLock`, and with it `nvsharectl lock`.
//!
//! The caller becomes a client like any other, in the same queue, with the same turns, counted against the same limit of its
//! user; a [`LockKeeper`] speaks the protocol for it. The caller gets one end of a pair of sockets; closing it releases the
//! lock, or ends the wait for it. A revoked lock is released at once, whether the caller reads or not, and requested again.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;

use nvshare_wire::client::{Engine, EngineReason, ReleaseReason};
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text, version};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::task::spawn_local;
use zbus::fdo;

use super::Connections;
use crate::daemon::core::views::printable;
use crate::daemon::core::{Arrival, Core};
use crate::daemon::transport::connection::Connection;
use crate::identity::Identity;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, socket};

/// Characters of a name or a reason.
const MAX_TEXT: usize = 200;
/// The only slot of such a client.
const SLOT: u32 = 0;
const GPUS: u64 = 1 << SLOT;
/// Utilization in permille that lets no other client run beside this one.
const EXCLUSIVE: u32 = 2000;

/// The arguments of `AcquireLock`, and the caller.
#[derive(Debug)]
pub struct LockRequest {
    /// UUID or index; empty if there is only one GPU.
    pub gpu: String,
    pub who: String,
    pub why: String,
    pub uid: u32,
    pub pid: i32,
}

/// Queues the caller for the lock. Returns the caller's end of the pair of sockets.
///
/// # Errors
/// If an argument is wrong, or the user has too many clients.
pub fn acquire(core: &Rc<RefCell<Core>>, connections: &Rc<Connections>, request: LockRequest) -> fdo::Result<OwnedFd> {
    let failed = |e: io::Error| fdo::Error::Failed(format!("cannot create a lock: {e}"));
    let wanted = core.borrow().find_gpu(&request.gpu).map_err(fdo::Error::InvalidArgs)?;
    for (what, text) in [("who", &request.who), ("why", &request.why)] {
        if text.is_empty() || text.chars().count() > MAX_TEXT {
            return Err(fdo::Error::InvalidArgs(format!("{what} must have 1 to {MAX_TEXT} characters")));
        }
    }
    let most = core.borrow().config.max_clients_per_user;
    let (counted, count) = connections.count(request.uid);
    if request.uid != 0 && count > most {
        let text = format!("{most} programs of this user are connected; max-clients-per-user allows no more");
        return Err(fdo::Error::LimitsExceeded(text));
    }

    let (owner, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    owner.set_nonblocking(true).map_err(failed)?;
    let owner = UnixStream::from_std(owner).map_err(failed)?;
    let (client_end, daemon_end) = socket::packet_pair().map_err(failed)?;
    let connection = Rc::new(Connection::new(daemon_end, version::MAX).map_err(failed)?);
    let client_end = descriptors::watch(client_end).map_err(failed)?;
    let identity = Identity {
        pid: request.pid,
        uid: request.uid,
        name: printable(&request.who),
        why: printable(&request.why),
        ..Identity::default()
    };
    let arrival = Arrival {
        connection: connection.clone(),
        identity: Arc::new(identity),
        version: version::MAX,
        gang: 0,
        library: "D-Bus".to_owned(),
        is_program: false,
        reconnects: false,
    };
    let client = core.borrow_mut().connect(arrival);
    let (core, connections) = (core.clone(), connections.clone());
    spawn_local(async move {
        connections.resumed().await;
        let keeper = LockKeeper { core: &core, client, client_end, owner };
        keeper.send(ClientMessage::Attach {
            slot: SLOT,
            uuid: wanted.uuid,
            kind: wanted.kind,
            engine: Engine::None,
            total: wanted.total,
            name: Text::new(""),
            reason: EngineReason::default(),
        });
        // At once, since there is no context to wait for.
        keeper.send(ClientMessage::Request { gpus: GPUS });
        tokio::select! {
            () = keeper.serve() => {}
            () = keeper.owner_closes() => {}
            // Sending never ends the connection.
            () = async { connection.flush().await; std::future::pending().await } => {}
        }
        core.borrow_mut().disconnect(client, "no longer wants the lock");
        drop(counted);
    });
    Ok(theirs.into())
}

/// Speaks the protocol for the owner of a lock.
struct LockKeeper<'a> {
    core: &'a RefCell<Core>,
    client: ClientId,
    client_end: AsyncFd<OwnedFd>,
    owner: UnixStream,
}

impl LockKeeper<'_> {
    fn send(&self, message: ClientMessage) {
        // These messages keep the protocol.
        let _ = self.core.borrow_mut().receive(self.client, message.encode(version::MAX).as_bytes(), Vec::new());
    }

    /// Writes a line to the owner, who need not read it.
    fn tell(&self, line: &str) {
        let _ = self.owner.try_write(line.as_bytes());
    }

    /// Handles the scheduler's messages.
    async fn serve(&self) {
        let mut buffer = [0; MAX_LEN];
        loop {
            let Ok(mut ready) = self.client_end.readable().await else { return };
            let length = match ready.try_io(|fd| socket::receive(fd.as_fd(), &mut buffer, &mut Vec::new())) {
                Ok(Ok(length)) if length > 0 => length,
                Err(_would_block) => continue,
                _ => return,
            };
            let Some(packet) = buffer.get(..length) else { return };
            match SchedulerMessage::decode(packet, version::MAX) {
                Ok(SchedulerMessage::Grant { .. }) => {
                    self.send(ClientMessage::Utilization { slot: SLOT, permille: EXCLUSIVE });
                    self.tell("granted\n");
                }
                Ok(SchedulerMessage::Contended { waiters: 1.., .. }) => self.tell("wanted\n"),
                Ok(SchedulerMessage::Revoke { .. }) => {
                    self.tell("revoked\n");
                    self.send(ClientMessage::Release { gpus: GPUS, reason: ReleaseReason::Revoked, busy_us: 0 });
                    self.send(ClientMessage::Request { gpus: GPUS });
                }
                _ => {}
            }
        }
    }

    /// Waits until the owner's end is closed. What the owner writes is discarded.
    async fn owner_closes(&self) {
        let mut buffer = [0; 64];
        while self.owner.readable().await.is_ok() {
            match self.owner.try_read(&mut buffer) {
                Ok(1..) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    }
}
