//! GPU locks acquired over D-Bus, without the library. `nvsharectl lock` calls the D-Bus method
//! `AcquireLock`.
//!
//! The caller becomes an ordinary client. This client has its own identity and rule, waits in the same
//! queue, gets the same turns, and counts against its tenant's limit. A [`LockKeeper`] speaks the
//! client protocol on its behalf. The caller receives one end of a socket pair. Closing that end
//! releases the lock or cancels the request. A revoked lock is released immediately, even if the caller
//! does not read, and is requested again.
//!
//! systemd's descriptor store keeps the daemon's end of the pair while the daemon restarts. The store
//! also keeps a memfd ([`Record`]) with the state for the next daemon. If the store has lost the
//! descriptors, the lock is lost, and the caller reads end-of-file.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;

use nvshare_wire::client::{Engine, EngineReason, GpuKind, ReleaseReason};
use nvshare_wire::{ClientMessage, MAX_LEN, SchedulerMessage, Text, Uuid, version};
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use tokio::task::spawn_local;
use tracing::warn;
use zbus::fdo;

use super::Connections;
use super::client::too_many_clients;
use crate::daemon::core::{Arrival, Core, LockFiles, NamedGpu, may_lock};
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::{LOCK_RECORD, StoredConnection};
use crate::daemon::tenants::{Budget, Share, What};
use crate::daemon::transport::connection::Connection;
use crate::identity::{Identity, printable};
use crate::scheduler::ClientId;
use crate::sys::foreign::Foreign;
use crate::sys::{descriptors, socket};

/// Maximum length of a name or a reason, in characters.
const MAX_TEXT: usize = 200;
/// The slot of the lock's GPU. A client that represents a lock has only this slot.
const SLOT: u32 = 0;
const GPUS: u64 = 1 << SLOT;
/// Utilization in permille that is too high for any other client to run beside this one.
const EXCLUSIVE: u32 = 2000;

/// The arguments of the D-Bus method `AcquireLock`, and its caller.
#[derive(Debug, Clone)]
pub struct LockRequest {
    /// UUID or index of the GPU. Empty if the host has only one GPU.
    pub gpu: String,
    pub who: String,
    pub why: String,
    pub caller: Identity,
}

/// A lock that the caller is allowed to acquire.
#[derive(Debug, Clone)]
pub struct Lockable {
    pub gpu: NamedGpu,
    /// The name of the caller's rule, for messages. Empty if no rule applies.
    pub rule: String,
}

/// Checks that a request is valid and that the caller's rule allows it.
///
/// # Errors
/// `InvalidArgs` if the request is invalid. `AccessDenied` if the rule forbids it.
pub fn check(core: &Core, request: &LockRequest) -> fdo::Result<Lockable> {
    for (what, text) in [("who", &request.who), ("why", &request.why)] {
        if text.is_empty() || text.chars().count() > MAX_TEXT {
            return Err(fdo::Error::InvalidArgs(format!("{what} must have 1 to {MAX_TEXT} characters")));
        }
    }
    let gpu = core.model.find_gpu(&request.gpu)?;
    let rule = may_lock(&core.model, &request.caller, &gpu).map_err(|why| {
        let Identity { pid, uid, .. } = request.caller;
        fdo::Error::AccessDenied(format!("process {pid} of user {uid} may not acquire this lock: {why}"))
    })?;
    Ok(Lockable { gpu, rule })
}

/// Queues the caller for the lock. Returns the caller's end of the socket pair.
///
/// # Errors
/// The request is invalid or not allowed, or the caller's tenant has too many clients.
pub fn acquire(core: &Rc<RefCell<Core>>, connections: &Rc<Connections>, request: LockRequest) -> fdo::Result<OwnedFd> {
    let failed = |e: io::Error| fdo::Error::Failed(format!("cannot create a lock: {e}"));
    let Lockable { gpu, .. } = check(&core.borrow(), &request)?;
    let budget = connections.budgets.of(&request.caller.tenant);
    let too_many = || fdo::Error::LimitsExceeded(too_many_clients(&budget));
    let place = budget.take(What::Clients, 1).ok_or_else(too_many)?;

    let (owner, theirs) = std::os::unix::net::UnixStream::pair().map_err(failed)?;
    owner.set_nonblocking(true).map_err(failed)?;
    let identity = Identity { name: printable(&request.who), why: printable(&request.why), ..request.caller };
    let record = Record::new(&gpu, identity);
    let files =
        LockFiles { owner: UnixStream::from_std(owner).map_err(failed)?, record: record.create().map_err(failed)? };
    let keeper = record.keeper(core, files, budget, Core::connect).map_err(failed)?;
    let connections = connections.clone();
    spawn_local(async move {
        connections.resumed().await;
        keeper.attach();
        // A program first waits for its context. A lock has no context, so the lock is requested
        // immediately.
        keeper.request();
        keeper.keep(place).await;
    });
    Ok(theirs.into())
}

/// The state of a lock for the next daemon. In the file, the record follows one byte that tells whether
/// the lock is held.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Record {
    gpu: [u8; 16],
    is_slice: bool,
    /// The GPU's memory, in bytes.
    total: u64,
    /// The caller at the time of its request.
    identity: Identity,
}

const HELD: [u8; 1] = *b"h";
const NOT_HELD: [u8; 1] = *b"w";

impl Record {
    fn new(gpu: &NamedGpu, identity: Identity) -> Self {
        Self { gpu: gpu.uuid.0, is_slice: gpu.kind == GpuKind::Mig, total: gpu.total, identity }
    }

    /// Creates the record file of a lock that is not held yet.
    fn create(&self) -> io::Result<File> {
        let file = systemd::record::create("nvshare-lock")?;
        file.write_all_at(&NOT_HELD, 0)?;
        systemd::record::write(&file, NOT_HELD.len() as u64, self)?;
        Ok(file)
    }

    /// Reads a record file of an earlier daemon. Also returns whether the lock is held.
    fn read(file: &File) -> io::Result<(Self, bool)> {
        let mut held = NOT_HELD;
        file.read_exact_at(&mut held, 0)?;
        Ok((systemd::record::read(file, held.len() as u64)?, held == HELD))
    }

    /// Creates the client that represents the lock, and its keeper. `connect` adds the client to the core.
    fn keeper(
        self,
        core: &Rc<RefCell<Core>>,
        files: LockFiles,
        budget: Arc<Budget>,
        connect: impl FnOnce(&mut Core, Arrival) -> ClientId,
    ) -> io::Result<LockKeeper> {
        let (client_end, daemon_end) = socket::packet_pair()?;
        let connection = Rc::new(Connection::new(Foreign::connection(daemon_end, 0), version::MAX, budget)?);
        let client_end = descriptors::watch(client_end)?;
        let files = Rc::new(files);
        let arrival = Arrival {
            connection: connection.clone(),
            identity: Arc::new(self.identity.clone()),
            version: version::MAX,
            gang: 0,
            library: "D-Bus".to_owned(),
            lock: Some(files.clone()),
            reconnects: false,
            is_asleep: false,
            process: None,
        };
        let client = connect(&mut core.borrow_mut(), arrival);
        Ok(LockKeeper { core: core.clone(), client, record: self, connection, client_end, files })
    }
}

/// A lock taken over from an earlier daemon. If the lock was not held, its request must be
/// repeated.
pub struct TakenOver {
    keeper: LockKeeper,
    held: bool,
    place: Share,
}

/// Takes over a lock of an earlier daemon, with the identity that its caller had at that time. Ends the
/// lock on failure.
pub fn take_over(core: &Rc<RefCell<Core>>, connections: &Connections, stored: StoredConnection) -> Option<TakenOver> {
    let StoredConnection { name, socket, record } = stored;
    let end = socket.try_clone().ok();
    let taken_over = || {
        let record = File::from(record.ok_or(io::ErrorKind::NotFound)?);
        if name.version != LOCK_RECORD {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let (content, held) = Record::read(&record)?;
        let owner = UnixStream::from_std(socket.into())?;
        let budget = connections.budgets.of(&content.identity.tenant);
        let place = budget.hold(What::Clients, 1);
        let client = ClientId(name.client);
        let keeper = content.keeper(core, LockFiles { owner, record }, budget, |core, arrival| {
            core.resume(client, arrival, name);
            client
        })?;
        Ok::<_, io::Error>(TakenOver { keeper, held, place })
    };
    let taken_over = match taken_over() {
        Ok(taken_over) => taken_over,
        Err(e) => {
            warn!(name: "lock-lost", client = name.client, "cannot restore a lock held over D-Bus, releasing it: {e}");
            systemd::forget(&name.to_string());
            // Closing this copy is not enough: systemd has another copy of the socket.
            end.iter().for_each(|socket| socket::shut_down(socket.as_fd()));
            return None;
        }
    };
    let keeper = &taken_over.keeper;
    keeper.attach();
    if taken_over.held {
        core.borrow_mut().resume_locks(keeper.client, GPUS);
        keeper.granted();
    }
    Some(taken_over)
}

impl TakenOver {
    /// Serves the lock from now on. Repeats the request if the lock is not held.
    pub fn go_on(self) {
        let Self { keeper, held, place } = self;
        if !held {
            keeper.request();
        }
        spawn_local(async move { keeper.keep(place).await });
    }
}

/// Speaks the protocol on behalf of a lock's owner.
struct LockKeeper {
    core: Rc<RefCell<Core>>,
    client: ClientId,
    record: Record,
    connection: Rc<Connection>,
    client_end: AsyncFd<OwnedFd>,
    files: Rc<LockFiles>,
}

impl LockKeeper {
    fn send(&self, message: ClientMessage) {
        // These messages never violate the protocol, so there are no errors to handle.
        let (packet, slice) = (message.encode(version::MAX), self.connection.budget().slice_at_once());
        let _ = self.core.borrow_mut().receive(self.client, packet.as_bytes(), Some(Vec::new()), &slice);
    }

    fn attach(&self) {
        self.send(ClientMessage::Attach {
            slot: SLOT,
            uuid: Uuid(self.record.gpu),
            kind: if self.record.is_slice { GpuKind::Mig } else { GpuKind::Gpu },
            engine: Engine::None,
            total: self.record.total,
            name: Text::new(""),
            reason: EngineReason::Best,
        });
    }

    fn request(&self) {
        self.send(ClientMessage::Request { gpus: GPUS });
    }

    /// Serves the lock until its owner closes the socket, or an administrator ends the lock.
    async fn keep(self, place: Share) {
        let why = tokio::select! {
            () = self.serve() => "is disconnected, because an administrator ended its lock",
            () = self.owner_closes() => "no longer wants the lock",
            // This branch never completes: a failure to send does not end the connection.
            () = async { self.connection.flush().await; std::future::pending().await } => "",
        };
        self.core.borrow_mut().disconnect(self.client, why);
        // systemd may have a copy of the socket. Without a shutdown, the owner would not read end-of-file.
        socket::shut_down(self.files.owner.as_fd());
        drop(place);
    }

    /// Sends the owner a line, or drops the line if the socket is full.
    fn tell(&self, line: &str) {
        // Bypasses tokio, which sends nothing until it has seen the socket become writable.
        let _ = socket::send(self.files.owner.as_fd(), line.as_bytes());
    }

    /// Records for the next daemon whether the lock is held.
    fn note(&self, held: [u8; 1]) {
        if let Err(e) = self.files.record.write_all_at(&held, 0) {
            warn!("cannot record the state of a lock: {e}");
        }
    }

    // The daemon may die between the steps of `granted` or `revoked`. Because of the order of the
    // steps, the owner then never mistakes a lost lock for a held one. At worst, the next daemon
    // sends `granted` again.

    fn granted(&self) {
        self.send(ClientMessage::Utilization { slot: SLOT, permille: EXCLUSIVE });
        self.note(HELD);
        self.tell("granted\n");
    }

    fn revoked(&self) {
        self.tell("revoked\n");
        self.note(NOT_HELD);
        self.send(ClientMessage::Release { gpus: GPUS, reason: ReleaseReason::Revoked, busy_us: 0 });
        self.request();
    }

    /// Handles the scheduler's messages until the scheduler ends the connection.
    async fn serve(&self) {
        let mut buffer = [0; MAX_LEN];
        loop {
            let Ok(mut ready) = self.client_end.readable().await else { return };
            let length = match ready.try_io(|fd| socket::receive(fd.as_fd(), &mut buffer, 0, &mut Vec::new())) {
                Ok(Ok(length)) if length > 0 => length,
                Err(_would_block) => continue,
                _ => return,
            };
            let Some(packet) = buffer.get(..length) else { return };
            match SchedulerMessage::decode(packet, version::MAX) {
                Ok(SchedulerMessage::Grant { .. }) => self.granted(),
                Ok(SchedulerMessage::Contended { waiters: 1.., .. }) => self.tell("wanted\n"),
                Ok(SchedulerMessage::Revoke { .. }) => self.revoked(),
                _ => {}
            }
        }
    }

    /// Waits until the owner closes its end. Discards data that the owner sends.
    async fn owner_closes(&self) {
        let mut buffer = [0; 64];
        while self.files.owner.readable().await.is_ok() {
            match self.files.owner.try_read(&mut buffer) {
                Ok(1..) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                _ => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::daemon::transport::peer;
    use crate::identity::{Cgroup, Place};

    #[test]
    fn a_locks_record_round_trips() {
        let gpu = NamedGpu {
            uuid: Uuid([7; 16]),
            kind: GpuKind::Mig,
            total: 16 << 30,
            minor: Some(0),
            label: String::new(),
            title: String::new(),
        };
        let mut identity = Identity { pid: 5, uid: 1000, groups: vec![1000, 44], ..Identity::default() };
        (identity.name, identity.why, identity.command) = ("me".into(), "to measure".into(), "python x.py".into());
        let cgroup = Cgroup { path: "/system.slice/jupyter.service".into() };
        peer::place(&mut identity, Place { cgroup: &cgroup, on_host: true, own_ids: true, login: None });
        let file = Record::new(&gpu, identity.clone()).create().expect("a file in memory");
        let (record, held) = Record::read(&file).expect("a record");
        assert_eq!((&record.identity, record.gpu, record.is_slice, held), (&identity, [7; 16], true, false));
        file.write_all_at(&HELD, 0).expect("a file in memory");
        assert!(Record::read(&file).expect("a record").1);

        identity.groups = (0..65536).map(|group| u32::MAX - group).collect();
        let file = Record::new(&gpu, identity.clone()).create().expect("a file in memory");
        assert_eq!(Record::read(&file).expect("a record").0.identity, identity);
    }
}
