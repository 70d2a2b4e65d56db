//! Takes clients' processes off their GPUs by checkpoints, and restores them. Helpers do the work:
//! each process has its own helper, the program `nvshare-checkpoint`. A driver call may take
//! seconds and does not return while the process is stopped, so no thread of the daemon makes
//! driver calls. This module starts helpers and sends each helper a pidfd with a timeout. The
//! helper's program explains its privileges and the rejected designs (`src/checkpoint/main.rs`).
//!
//! Every request is answered in bounded time, even if its helper hangs or dies. The answer contains
//! the state of the process, and the reason if the request failed. If the helper died or was late,
//! the answer says that the state is unknown. Helpers are then asked to settle the process, one
//! after the other, until the process is known to run or to sleep.
//!
//! The daemon shuts down the socket of a late helper. The helper then undoes its work as far as
//! possible and exits. A helper that does not exit is killed, by the daemon if it is a child,
//! otherwise by its service (`RuntimeMaxSec=`). Until its exit, a late helper counts among the
//! helpers of its tenant (`What::Helpers`), but no longer among the helpers of all tenants
//! (`MAX_HELPERS`). A user can keep a helper from exiting by stopping the client's process. Such
//! helpers must not count against other tenants.
//!
//! A helper initialises the driver when it starts, which takes 0.2 s for each GPU that no process
//! has open [H100]. To hide this time, the daemon starts the helper when it orders the client to
//! prepare, while the client's memory is still being evicted. If the client only moves to another
//! GPU, the same helper restores the process. A helper exits after 10 s without a request. So if
//! the client does not sleep after all, nothing has to be undone.
//!
//! With systemd, a helper is a service that has its own socket. Without systemd, the daemon has the
//! clients' user and starts the helper as a child. In a pod, a separate container listens at the
//! same socket and starts a helper for each connection (`src/checkpoint/listen.rs`).

#[cfg(test)]
mod tests;

use std::future::pending;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_checkpoint::{ANSWER, IDLE, MAX_PAIRS, Request, Step};
pub use nvshare_checkpoint::{Operation, Outcome, Uuid};
use rustix::net::Shutdown;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::select;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::spawn_local;
use tokio::time::timeout;

use crate::daemon::tenants::{Budgets, Share, What};
use crate::identity::Tenant;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, socket};

/// The socket for requests. Its listener is systemd (`nvshare-checkpoint.socket`) or, in a pod, a
/// separate container (`--listen`), and starts a helper for each connection.
pub const SOCKET: &str = "/run/nvshare-checkpoint/checkpoint.sock";
const PROGRAM: &str = "nvshare-checkpoint";

/// Maximum number of helpers that the daemon waits for at the same time. Each helper initialises the
/// driver, which takes host memory and processor time. All helpers move memory over the same links.
const MAX_HELPERS: usize = 8;
/// Maximum number of prepared helpers. Further helpers are started only with their requests.
const MAX_PREPARED: usize = 8;
/// Maximum time that a helper waits for a process's driver calls and GPU work to end before it
/// locks the process. A prepared process should have neither.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeouts of a request.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// Time to wait for the permission to run a helper ([`Place`]).
    place: Duration,
    /// Time to wait for the answer to a sleep or a wake. A sleep or a wake takes less than a second if the
    /// process's memory was evicted before (`bench/RESULTS.md`). Otherwise, the driver copies the memory,
    /// which takes 0.5 s for each GiB.
    answer: Duration,
    /// Time to wait for the answer to `Settle`. The helper itself waits for a driver call in progress.
    settled: Duration,
    /// Time to wait for a child to exit after the daemon has shut down the socket. The child first undoes
    /// its unfinished work. For helpers that systemd starts, `RuntimeMaxSec=` is the corresponding limit.
    end: Duration,
}

/// `RuntimeMaxSec=` of the service must exceed the sum of twice `answer`, the waits before each
/// request ([`IDLE`]), and `end`.
const PATIENCE: Patience = Patience {
    place: Duration::from_secs(60),
    answer: Duration::from_secs(60),
    settled: Duration::from_secs(10),
    end: Duration::from_secs(10),
};

/// How a helper is started.
#[derive(Debug)]
enum Start {
    /// Through the listener on this socket, which starts a helper for each connection.
    Connect(PathBuf),
    /// As a child process of the daemon. The child runs as the daemon's user, so it reaches only that
    /// user's processes.
    Child(PathBuf),
}

/// The result of a request.
#[derive(Debug)]
pub struct HelperAnswer {
    /// The state of the process. If the state is [`Outcome::Unknown`], the caller sends
    /// [`Operation::Settle`] until the state is known.
    pub outcome: Outcome,
    /// The reason why the request was not carried out.
    pub failure: Option<HelperFailure>,
}

/// A reason why a request was not carried out. The displayed text completes a line that names the
/// request.
#[derive(Debug, thiserror::Error)]
pub enum HelperFailure {
    /// All helpers were in use for longer than the timeout.
    #[error("other programs are being checkpointed or restored")]
    Busy,
    /// No helper could be started.
    #[error("cannot start {PROGRAM}: {0}")]
    NotStarted(io::Error),
    /// The helper exited without an answer.
    #[error("{PROGRAM} ended without a reply")]
    Died,
    /// The helper did not answer in time.
    #[error("{PROGRAM} did not reply in time")]
    TimedOut,
    /// The driver is missing, or does not support checkpoints.
    #[error("the driver does not support it. Driver 570 or newer is needed")]
    NoCalls,
    /// The process belongs to another user.
    #[error("its process runs as another user now")]
    OtherUser,
    /// A driver call failed with this error.
    #[error("{call} failed with error {error}")]
    Driver { call: &'static str, error: u32 },
}

impl HelperFailure {
    fn of(failed: Step, error: u32) -> Option<Self> {
        let call = match failed {
            Step::None => return None,
            Step::Driver if error == 0 => return Some(Self::NoCalls),
            Step::User => return Some(Self::OtherUser),
            Step::Driver => "cuInit",
            Step::State => "cuCheckpointProcessGetState",
            Step::Lock => "cuCheckpointProcessLock",
            Step::Checkpoint => "cuCheckpointProcessCheckpoint",
            Step::Restore => "cuCheckpointProcessRestore",
            Step::Unlock => "cuCheckpointProcessUnlock",
        };
        Some(Self::Driver { call, error })
    }
}

/// Starts helpers, and sends them requests. Runs on one thread in a `LocalSet`, and never blocks that
/// thread.
#[derive(Debug)]
pub struct Helpers {
    start: Start,
    patience: Patience,
    all: Arc<Semaphore>,
    budgets: Arc<Budgets>,
}

/// Permission for one helper to run. The helper counts against its tenant's limit and against the limit
/// of all helpers.
struct Place {
    of_tenant: Share,
    of_all: OwnedSemaphorePermit,
}

impl Helpers {
    /// Starts helpers through the listener at [`SOCKET`].
    pub fn by_socket(budgets: Arc<Budgets>) -> Self {
        Self::new(Start::Connect(SOCKET.into()), PATIENCE, budgets)
    }

    /// Starts helpers as children, from the program that is installed beside the daemon.
    ///
    /// # Errors
    /// The daemon cannot determine the path of its own program.
    pub fn of_children(budgets: Arc<Budgets>) -> io::Result<Self> {
        let own = std::env::current_exe()?;
        let beside = own.with_file_name(PROGRAM);
        let installed = own.parent().and_then(Path::parent).map(|prefix| prefix.join("libexec").join(PROGRAM));
        let program = installed.filter(|path| !beside.exists() && path.exists()).unwrap_or(beside);
        Ok(Self::new(Start::Child(program), PATIENCE, budgets))
    }

    fn new(start: Start, patience: Patience, budgets: Arc<Budgets>) -> Self {
        Self { start, patience, all: Arc::new(Semaphore::new(MAX_HELPERS)), budgets }
    }

    /// Starts a helper for a request that is expected soon. The helper exits if no request arrives. `None`
    /// if that fails, or the tenant has started too many helpers lately. [`ask`](Self::ask) then starts the
    /// helper, and reports the error.
    pub fn prepare(&self, tenant: &Tenant) -> Option<Helper> {
        let may_start = self.budgets.of(tenant).take_token(What::Helpers);
        may_start.then(|| self.start().ok()).flatten()
    }

    /// Checkpoints a process or restores it. If the future is dropped early, the helper undoes its work as
    /// far as possible. The caller must then settle the state of the process.
    ///
    /// - `prepared`: a helper that was started earlier.
    /// - `process`: a pidfd.
    /// - `uid`: a process is put to sleep only if it belongs to this user.
    /// - `tenant`: the tenant of the process.
    /// - `pairs`: for a wake, each GPU that the process sees, and the GPU on which its memory is restored;
    ///   at most `MAX_PAIRS`. If empty, all memory is restored to its own GPU.
    ///
    /// Returns after at most 120 seconds. If no helper has touched a process that was to sleep, the process
    /// is reported as running. After a successful sleep, and if a process was found locked, the helper is
    /// returned too, and accepts another request.
    pub async fn ask(
        &self,
        prepared: Option<Helper>,
        operation: Operation,
        process: OwnedFd,
        uid: u32,
        tenant: &Tenant,
        pairs: Vec<(Uuid, Uuid)>,
    ) -> (HelperAnswer, Option<Helper>) {
        let untouched = if operation == Operation::Sleep { Outcome::Runs } else { Outcome::Unknown };
        let not_begun = |failure| HelperAnswer { outcome: untouched, failure: Some(failure) };
        let Ok(place) = timeout(self.patience.place, self.place(tenant, prepared.is_none())).await else {
            return (not_begun(HelperFailure::Busy), None);
        };
        let helper = match self.send(prepared, tenant, operation, &[process], uid, pairs) {
            Ok(helper) => helper,
            Err(failure) => return (not_begun(failure), None),
        };
        let patience = match operation {
            Operation::Settle | Operation::Inspect => self.patience.settled,
            Operation::Sleep | Operation::Wake => self.patience.answer,
        };
        let (mut asker, answer) = oneshot::channel();
        let end = self.patience.end;
        // The helper counts against both limits until it exits. The caller does not wait for the exit, and
        // may be gone by then.
        spawn_local(async move {
            let Place { of_tenant, of_all } = place;
            let answer = select! {
                answer = timeout(patience, helper.answer()) => answer.ok(),
                () = asker.closed() => None,
            };
            // A late helper may never exit. So it no longer counts against the limit of all helpers, but only
            // against its tenant's limit.
            let of_all = answer.is_some().then_some(of_all);
            let has_slept = |answer: nvshare_checkpoint::Reply| answer.outcome == Outcome::Asleep;
            // A process is usually checkpointed soon after it was locked.
            let is_locked = |answer: nvshare_checkpoint::Reply| answer.outcome == Outcome::Locked;
            let goes_on = match operation {
                Operation::Sleep => answer.flatten().is_some_and(has_slept),
                Operation::Inspect => answer.flatten().is_some_and(is_locked),
                Operation::Wake | Operation::Settle => false,
            };
            let (kept, done) = if goes_on { (Some(helper), None) } else { (None, Some(helper)) };
            let not_taken = asker.send((answer, kept)).err().and_then(|(_, helper)| helper);
            if let Some(helper) = done.or(not_taken) {
                helper.end(end).await;
            }
            drop(of_all);
            drop(of_tenant);
        });
        let unknown = |failure| HelperAnswer { outcome: Outcome::Unknown, failure: Some(failure) };
        let (answer, helper) = answer.await.unwrap_or_default();
        let answer = match answer {
            None => unknown(HelperFailure::TimedOut),
            Some(None) => unknown(HelperFailure::Died),
            Some(Some(answer)) => match HelperFailure::of(answer.failed, answer.error) {
                // The helper cannot use the driver, so it has not changed the process.
                Some(failure) if answer.failed == Step::Driver => not_begun(failure),
                failure => HelperAnswer { outcome: answer.outcome, failure },
            },
        };
        (answer, helper)
    }

    /// Waits for the permission to run a helper. `starts`: the helper was not started yet.
    async fn place(&self, tenant: &Tenant, starts: bool) -> Place {
        // While a request waits for the limit of all helpers, it counts only against its own tenant's limit.
        // So the request delays no other tenant.
        let budget = self.budgets.of(tenant);
        let of_tenant = budget.wait_for(What::Helpers).await;
        if starts {
            budget.wait_for_token(What::Helpers).await;
        }
        match self.all.clone().acquire_owned().await {
            Ok(of_all) => Place { of_tenant, of_all },
            Err(_) => pending().await, // the semaphore is never closed
        }
    }

    /// Sends a request to the prepared helper. Starts a new helper if none was prepared, or if the prepared
    /// helper has exited.
    ///
    /// # Errors
    /// [`HelperFailure::NotStarted`] if no helper could be started. [`HelperFailure::Died`] if the new
    /// helper has already exited, or the prepared one has and the tenant has started too many helpers
    /// lately; a retry may succeed.
    fn send(
        &self,
        prepared: Option<Helper>,
        tenant: &Tenant,
        operation: Operation,
        process: &[OwnedFd],
        uid: u32,
        pairs: Vec<(Uuid, Uuid)>,
    ) -> Result<Helper, HelperFailure> {
        if pairs.len() > MAX_PAIRS {
            return Err(HelperFailure::NotStarted(io::Error::other(format!("{} GPUs are too many", pairs.len()))));
        }
        let request = Request { operation, uid, lock_timeout_ms: LOCK_TIMEOUT.as_millis() as u32, pairs }.encode();
        let ask = |helper: &Helper| socket::send_with(helper.socket.get_ref().as_fd(), &request, process);
        if let Some(helper) = prepared {
            if ask(&helper).is_ok() {
                return Ok(helper);
            }
            // The token paid for the helper that has exited.
            if !self.budgets.of(tenant).take_token(What::Helpers) {
                return Err(HelperFailure::Died);
            }
        }
        let helper = self.start().map_err(HelperFailure::NotStarted)?;
        ask(&helper).map_err(|_| HelperFailure::Died)?;
        Ok(helper)
    }

    fn start(&self) -> io::Result<Helper> {
        match &self.start {
            Start::Connect(path) => {
                let own = socket::connect(path, socket::Kind::Packets)?;
                Ok(Helper { socket: descriptors::watch(own)?, child: None })
            }
            Start::Child(program) => {
                let (own, its) = socket::packet_pair()?;
                rustix::io::ioctl_fionbio(&its, false)?;
                let own = descriptors::watch(own)?;
                let mut command = Command::new(program);
                command.stdin(Stdio::from(its)).stdout(Stdio::null()).env("NVSHARE_DISABLE", "1");
                let child = command.spawn()?;
                Ok(Helper { socket: own, child: Some(child) })
            }
        }
    }
}

/// Started helpers that await a request. Each client has at most one.
#[derive(Debug, Default)]
pub struct Prepared(Vec<(ClientId, Instant, Helper)>);

impl Prepared {
    /// Starts a helper with `helper` and keeps it. Does nothing if the client already has a prepared
    /// helper, or too many are kept. So a client that refuses repeated orders to prepare does not cause
    /// repeated starts.
    pub fn keep(&mut self, now: Instant, client: ClientId, helper: impl FnOnce() -> Option<Helper>) {
        self.0.retain(|(_, since, _)| now < *since + IDLE); // older helpers have exited
        if self.0.len() < MAX_PREPARED && self.0.iter().all(|(other, ..)| *other != client) {
            self.0.extend(helper().map(|helper| (client, now, helper)));
        }
    }

    pub fn take(&mut self, client: ClientId) -> Option<Helper> {
        let at = self.0.iter().position(|(other, ..)| *other == client)?;
        Some(self.0.swap_remove(at).2)
    }
}

/// A started helper. Dropping this value closes the socket, and the helper then undoes its work as far
/// as possible. If the helper is a child, the runtime reaps it.
#[derive(Debug)]
pub struct Helper {
    socket: AsyncFd<OwnedFd>,
    child: Option<Child>,
}

impl Helper {
    /// The helper's reply. `None` if the helper exited or sent an invalid packet.
    async fn answer(&self) -> Option<nvshare_checkpoint::Reply> {
        let mut packet = [0; ANSWER];
        let length = self.receive(&mut packet).await.ok()?;
        nvshare_checkpoint::Reply::decode(packet.get(..length)?)
    }

    async fn receive(&self, packet: &mut [u8]) -> io::Result<usize> {
        // Received file descriptors are closed.
        self.socket.async_io(Interest::READABLE, |fd| socket::receive(fd.as_fd(), packet, 0, &mut Vec::new())).await
    }

    /// Shuts down the socket, and waits until the helper has exited. A child that does not exit within
    /// `patience` is killed. Other helpers are killed by the service that started them. `Operation::Settle`
    /// then undoes the unfinished work.
    async fn end(mut self, patience: Duration) {
        let _ = rustix::net::shutdown(self.socket.get_ref(), Shutdown::Write);
        match &mut self.child {
            Some(child) => {
                if timeout(patience, child.wait()).await.is_err() {
                    let _ = child.start_kill();
                    let _ = child.wait().await;
                }
            }
            // The kernel closes the other end once the helper has exited.
            None => while self.receive(&mut [0]).await.is_ok_and(|length| length > 0) {},
        }
    }
}
