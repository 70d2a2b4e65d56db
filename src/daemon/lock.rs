//! GPU locks that somebody asks for over D-Bus, without the library: `AcquireLock`, and with it `nvsharectl lock`.
//!
//! Whoever asks becomes a client like any other, in the same line, for the same turns, counted against the same limit of its
//! user: this end speaks for it. It gets one end of a pair of sockets; the lock, or the wait for it, is over when that is
//! closed. When the lock is asked back, it goes to the next at once, whether the owner listens or not, and is asked for anew.

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

use crate::bus::Error;
use crate::daemon::clients::{Counted, Shared};
use crate::daemon::core::views::printable;
use crate::daemon::core::{Arrival, Core};
use crate::daemon::transport::connection::Connection;
use crate::identity::Identity;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, socket};

/// No name or reason is longer, in characters.
const MAX_TEXT: usize = 200;
/// The only slot that such a client has.
const SLOT: u32 = 0;
const GPUS: u64 = 1 << SLOT;
/// It wants nobody beside it, however little the others need.
const ALONE: u32 = 2000;

/// What somebody asks for.
#[derive(Debug)]
pub struct LockRequest {
    /// By UUID or number; empty where there is only one.
    pub gpu: String,
    pub who: String,
    pub why: String,
    pub uid: u32,
    pub pid: i32,
}

/// Lets somebody in, and gives the end of the pair that is theirs.
pub fn acquire(core: &Rc<RefCell<Core>>, shared: &Rc<Shared>, request: LockRequest) -> Result<OwnedFd, Error> {
    let failed = |e: io::Error| Error::Failed(format!("cannot make a lock: {e}"));
    let wanted = core.borrow().find_gpu(&request.gpu).map_err(Error::InvalidArgument)?;
    for (what, text) in [("who", &request.who), ("why", &request.why)] {
        if text.is_empty() || text.chars().count() > MAX_TEXT {
            return Err(Error::InvalidArgument(format!(
                "{what} has to have 1 to {MAX_TEXT} characters, for people to read"
            )));
        }
    }
    let most = core.borrow().config.max_clients_per_user;
    let (counted, count) = Counted::new(shared.connections.clone(), request.uid);
    if request.uid != 0 && count > most {
        let text = format!("{most} programs of this user are connected; max-clients-per-user allows no more");
        return Err(Error::TooMany(text));
    }

    let (owner, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    owner.set_nonblocking(true).map_err(failed)?;
    let owner = UnixStream::from_std(owner).map_err(failed)?;
    let (ours, hubs) = socket::packet_pair().map_err(failed)?;
    let connection = Rc::new(Connection::new(hubs, version::MAX).map_err(failed)?);
    let ours = descriptors::watch(ours).map_err(failed)?;
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
    let (core, shared) = (core.clone(), shared.clone());
    spawn_local(async move {
        shared.resumed().await;
        let keeper = Keeper { core: &core, client, ours, owner };
        keeper.say(ClientMessage::Attach {
            slot: SLOT,
            uuid: wanted.uuid,
            kind: wanted.kind,
            engine: Engine::None,
            total: wanted.total,
            name: Text::new(""),
            reason: EngineReason::default(),
        });
        // At once: it makes no context, for which there would have to be room.
        keeper.say(ClientMessage::Request { gpus: GPUS });
        tokio::select! {
            () = keeper.obey() => {}
            () = keeper.owner_leaves() => {}
            // Never the first to end.
            () = async { connection.flush().await; std::future::pending().await } => {}
        }
        core.borrow_mut().disconnect(client, "no longer wants the lock");
        drop(counted);
    });
    Ok(theirs.into())
}

/// What speaks for the owner of a lock.
struct Keeper<'a> {
    core: &'a RefCell<Core>,
    client: ClientId,
    ours: AsyncFd<OwnedFd>,
    owner: UnixStream,
}

impl Keeper<'_> {
    fn say(&self, message: ClientMessage) {
        // What is said here breaks no rule.
        let _ = self.core.borrow_mut().receive(self.client, message.encode(version::MAX).as_bytes(), Vec::new());
    }

    /// A line for the owner, who need not read it.
    fn tell(&self, line: &str) {
        let _ = self.owner.try_write(line.as_bytes());
    }

    /// Does what the scheduler says, for as long as there is one.
    async fn obey(&self) {
        let mut buffer = [0; MAX_LEN];
        loop {
            let Ok(mut ready) = self.ours.readable().await else { return };
            let length = match ready.try_io(|fd| socket::receive(fd.as_fd(), &mut buffer, &mut Vec::new())) {
                Ok(Ok(length)) if length > 0 => length,
                Err(_would_block) => continue,
                _ => return,
            };
            let Some(packet) = buffer.get(..length) else { return };
            match SchedulerMessage::decode(packet, version::MAX) {
                Ok(SchedulerMessage::Grant { .. }) => {
                    self.say(ClientMessage::Utilization { slot: SLOT, permille: ALONE });
                    self.tell("granted\n");
                }
                Ok(SchedulerMessage::Contended { waiters: 1.., .. }) => self.tell("wanted\n"),
                Ok(SchedulerMessage::Revoke { .. }) => {
                    self.tell("revoked\n");
                    self.say(ClientMessage::Release { gpus: GPUS, reason: ReleaseReason::Revoked, busy_us: 0 });
                    self.say(ClientMessage::Request { gpus: GPUS });
                }
                _ => {}
            }
        }
    }

    /// Until the owner's end is closed. What it sends is read and forgotten.
    async fn owner_leaves(&self) {
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
