//! Clients' processes are taken off their GPUs and put back by `nvshare-checkpoint`, a program of its own for each process, because a
//! call of the driver may take seconds, and for ever while the process is stopped. Here one is started and asked. Whatever becomes
//! of it, there is an answer in bounded time.
//!
//! It initialises the driver as soon as it is started, which takes 0.2 s for each GPU that nobody has open [H100]. So one is started
//! when its client is told to prepare, and one whose client is to come back at once, to another GPU, is asked for that as well.

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::future::pending;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Arc, Weak};
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

use crate::identity::Tenant;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, socket};

/// Where one is started for each connection: by systemd (`nvshare-checkpoint.socket`), in a pod by a container (`--listen`).
pub const SOCKET: &str = "/run/nvshare-checkpoint/checkpoint.sock";
const PROGRAM: &str = "nvshare-checkpoint";

/// The most that are waited for at a time. Each has the driver loaded and initialised, which takes host memory and processor time, and
/// what they move goes over the same links.
const MAX_HELPERS: usize = 8;
/// The most for processes of one tenant, late ones included: who stops a process keeps its helper from ending. `MaxConnections=` of
/// the socket has room for those of many tenants.
const MAX_HELPERS_OF_TENANT: usize = 4;
/// The most that wait to be asked; beyond these one is started when it is asked.
const MAX_PREPARED: usize = 8;
/// How long a lock waits for calls and work of the process to end. It has been prepared, so none is expected.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);

/// How long requests wait.
#[derive(Debug, Clone, Copy)]
struct Patience {
    /// For a place among those that run.
    place: Duration,
    /// For the answer to a sleep or a wake. Of a process whose memory was moved out before, each takes less than a second
    /// (`bench/RESULTS.md`); one whose memory could not be moved takes 0.5 s for each GiB.
    answer: Duration,
    /// For the answer to `Settle`, which waits for a call that is still under way.
    settled: Duration,
    /// For the end of a child after it was hung up on: it undoes what it has begun. To systemd `RuntimeMaxSec=` says the same.
    end: Duration,
}

/// `RuntimeMaxSec=` of the service is longer than two of `answer`, the waits before them ([`IDLE`]), and `end` together.
const PATIENCE: Patience = Patience {
    place: Duration::from_secs(60),
    answer: Duration::from_secs(60),
    settled: Duration::from_secs(10),
    end: Duration::from_secs(10),
};

/// How a helper is started.
#[derive(Debug)]
enum Start {
    /// By whoever listens there, for a connection to this socket.
    Connect(PathBuf),
    /// As a child, with the user of this process: it reaches processes of that user alone.
    Child(PathBuf),
}

/// What came of a request.
#[derive(Debug)]
pub struct Answer {
    /// In which state the process is. [`Outcome::Unknown`] is to be followed by [`Operation::Settle`], until the state is known.
    pub outcome: Outcome,
    /// Why it was not done.
    pub failure: Option<Failure>,
}

/// Why a request was not carried out. Displayed, it completes a line that says what was to be done.
#[derive(Debug)]
pub enum Failure {
    /// All helpers were taken for too long.
    Busy,
    /// No helper could be started.
    NotStarted(io::Error),
    /// It ended without an answer.
    Died,
    /// It did not answer in time.
    TimedOut,
    /// There is no driver, or one without these calls.
    NoCalls,
    /// The process is another user's.
    OtherUser,
    /// A call of the driver failed, with this error of the driver.
    Driver { call: &'static str, error: u32 },
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => write!(f, "other programs are on their way off or onto their GPUs"),
            Self::NotStarted(e) => write!(f, "{PROGRAM} cannot be started: {e}"),
            Self::Died => write!(f, "{PROGRAM} ended without an answer"),
            Self::TimedOut => write!(f, "{PROGRAM} did not answer in time"),
            Self::NoCalls => write!(f, "there is no driver that can do it, which 570 and newer can"),
            Self::OtherUser => write!(f, "its process has changed its user"),
            Self::Driver { call, error } => write!(f, "{call} failed with error {error}"),
        }
    }
}

impl Failure {
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

/// Starts helpers. It lives on one thread, in a `LocalSet`, and never blocks it.
#[derive(Debug)]
pub struct Helpers {
    start: Start,
    patience: Patience,
    all: Arc<Semaphore>,
    tenants: RefCell<HashMap<Tenant, Weak<Semaphore>>>,
}

/// A helper's right to run.
struct Place {
    of_tenant: OwnedSemaphorePermit,
    of_all: OwnedSemaphorePermit,
}

impl Helpers {
    /// Has whoever listens at [`SOCKET`] start helpers.
    pub fn by_socket() -> Self {
        Self::new(Start::Connect(SOCKET.into()), PATIENCE)
    }

    /// Starts helpers as children: the program that is installed with this one.
    ///
    /// # Errors
    /// If the path of this program is not known.
    pub fn of_children() -> io::Result<Self> {
        let own = std::env::current_exe()?;
        let beside = own.with_file_name(PROGRAM);
        let installed = own.parent().and_then(Path::parent).map(|prefix| prefix.join("libexec").join(PROGRAM));
        let program = installed.filter(|path| !beside.exists() && path.exists()).unwrap_or(beside);
        Ok(Self::new(Start::Child(program), PATIENCE))
    }

    fn new(start: Start, patience: Patience) -> Self {
        Self { start, patience, all: Arc::new(Semaphore::new(MAX_HELPERS)), tenants: RefCell::default() }
    }

    /// Starts one that is to be asked soon. It ends by itself if it is not.
    pub fn prepare(&self) -> Option<Helper> {
        self.start().ok() // whoever asks hears of it
    }

    /// Has a process taken off its GPUs or put back. Dropped before it is done, it is taken back as far as that is possible, and the
    /// state of the process is to be settled.
    ///
    /// `prepared`: one that was started before. `process`: a pidfd. `uid`: the user that one which is to sleep must be of. `tenant`: whose process it is. `pairs`: for a wake,
    /// on which GPU to restore what was on each that the process sees; none for where it was, at most `MAX_PAIRS`.
    ///
    /// The answer comes after 130 seconds at the latest. A process that was to sleep, and that no helper has touched, runs. If it
    /// sleeps, the helper can be asked again.
    pub async fn ask(
        &self,
        prepared: Option<Helper>,
        operation: Operation,
        process: OwnedFd,
        uid: u32,
        tenant: &Tenant,
        pairs: Vec<(Uuid, Uuid)>,
    ) -> (Answer, Option<Helper>) {
        let untouched = if operation == Operation::Sleep { Outcome::Runs } else { Outcome::Unknown };
        let not_begun = |failure| Answer { outcome: untouched, failure: Some(failure) };
        let Ok(place) = timeout(self.patience.place, self.place(tenant)).await else {
            return (not_begun(Failure::Busy), None);
        };
        let helper = match self.send(prepared, operation, &[process], uid, pairs) {
            Ok(helper) => helper,
            Err(e) => return (not_begun(Failure::NotStarted(e)), None),
        };
        let patience = match operation {
            Operation::Settle => self.patience.settled,
            Operation::Sleep | Operation::Wake => self.patience.answer,
        };
        let (mut asker, answer) = oneshot::channel();
        let end = self.patience.end;
        // The caller does not wait for its end, and may have gone before, but its place does.
        spawn_local(async move {
            let Place { of_tenant: _of_tenant, of_all } = place;
            let answer = select! {
                answer = timeout(patience, helper.answer()) => answer.ok(),
                () = asker.closed() => None,
            };
            // One that is late may never end, and keeps only others of its tenant from theirs.
            let _of_all = answer.is_some().then_some(of_all);
            let has_slept = |answer: nvshare_checkpoint::Reply| answer.outcome == Outcome::Asleep;
            let goes_on = operation == Operation::Sleep && answer.flatten().is_some_and(has_slept);
            let (kept, done) = if goes_on { (Some(helper), None) } else { (None, Some(helper)) };
            let not_taken = asker.send((answer, kept)).err().and_then(|(_, helper)| helper);
            if let Some(helper) = done.or(not_taken) {
                helper.end(end).await;
            }
        });
        let unknown = |failure| Answer { outcome: Outcome::Unknown, failure: Some(failure) };
        let (answer, helper) = answer.await.unwrap_or_default();
        let answer = match answer {
            None => unknown(Failure::TimedOut),
            Some(None) => unknown(Failure::Died),
            Some(Some(answer)) => match Failure::of(answer.failed, answer.error) {
                // It cannot tell the state, but has done nothing.
                Some(failure) if answer.failed == Step::Driver => not_begun(failure),
                failure => Answer { outcome: answer.outcome, failure },
            },
        };
        (answer, helper)
    }

    async fn place(&self, tenant: &Tenant) -> Place {
        let of_tenant = {
            let mut tenants = self.tenants.borrow_mut();
            tenants.retain(|_, places| places.strong_count() > 0);
            let places = tenants.get(tenant).and_then(Weak::upgrade);
            let places = places.unwrap_or_else(|| Arc::new(Semaphore::new(MAX_HELPERS_OF_TENANT)));
            tenants.insert(tenant.clone(), Arc::downgrade(&places));
            places
        };
        // Waiting for others with a place of one's own keeps nobody else from theirs.
        match (of_tenant.acquire_owned().await, self.all.clone().acquire_owned().await) {
            (Ok(of_tenant), Ok(of_all)) => Place { of_tenant, of_all },
            _ => pending().await, // neither is ever closed
        }
    }

    /// Asks one, which is started if there is none, or the one that there was has ended since.
    fn send(
        &self,
        prepared: Option<Helper>,
        operation: Operation,
        process: &[OwnedFd],
        uid: u32,
        pairs: Vec<(Uuid, Uuid)>,
    ) -> io::Result<Helper> {
        if pairs.len() > MAX_PAIRS {
            return Err(io::Error::other(format!("{} GPUs are too many", pairs.len())));
        }
        let request = Request { operation, uid, lock_timeout_ms: LOCK_TIMEOUT.as_millis() as u32, pairs }.encode();
        let ask = |helper: &Helper| socket::send_with(helper.socket.get_ref().as_fd(), &request, process);
        if let Some(helper) = prepared.filter(|helper| ask(helper).is_ok()) {
            return Ok(helper);
        }
        let helper = self.start()?;
        ask(&helper)?;
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

/// Helpers that wait to be asked, each for what becomes of one client.
#[derive(Debug, Default)]
pub struct Prepared(Vec<(ClientId, Instant, Helper)>);

impl Prepared {
    /// Keeps the one that this returns, or does not call it: a client that is told to prepare again and again, and refuses, does not
    /// have one started each time.
    pub fn keep(&mut self, now: Instant, client: ClientId, helper: impl FnOnce() -> Option<Helper>) {
        self.0.retain(|(_, since, _)| now < *since + IDLE); // others have ended
        if self.0.len() < MAX_PREPARED && self.0.iter().all(|(other, ..)| *other != client) {
            self.0.extend(helper().map(|helper| (client, now, helper)));
        }
    }

    pub fn take(&mut self, client: ClientId) -> Option<Helper> {
        let at = self.0.iter().position(|(other, ..)| *other == client)?;
        Some(self.0.swap_remove(at).2)
    }
}

/// One that was started. Dropped, it is hung up on, and undoes what it can; the runtime waits for a child's end.
#[derive(Debug)]
pub struct Helper {
    socket: AsyncFd<OwnedFd>,
    child: Option<Child>,
}

impl Helper {
    /// `None` if it ended, or said what is no answer.
    async fn answer(&self) -> Option<nvshare_checkpoint::Reply> {
        let mut packet = [0; ANSWER];
        let length = self.receive(&mut packet).await.ok()?;
        nvshare_checkpoint::Reply::decode(packet.get(..length)?)
    }

    async fn receive(&self, packet: &mut [u8]) -> io::Result<usize> {
        // Descriptors that come are closed.
        self.socket.async_io(Interest::READABLE, |fd| socket::receive(fd.as_fd(), packet, &mut Vec::new())).await
    }

    /// Hangs up, and waits until it has ended. A child that does not end is killed after this time, others by whoever started them; whoever
    /// settles the process then undoes what is left.
    async fn end(mut self, patience: Duration) {
        let _ = rustix::net::shutdown(self.socket.get_ref(), Shutdown::Write);
        match &mut self.child {
            Some(child) => {
                if timeout(patience, child.wait()).await.is_err() {
                    let _ = child.start_kill();
                    let _ = child.wait().await;
                }
            }
            // Nobody has the other end any more when the process is gone.
            None => while self.receive(&mut [0]).await.is_ok_and(|length| length > 0) {},
        }
    }
}
