//! The D-Bus object, on the bus and on the control socket. Runs on its own thread and runtime, so that
//! no call can delay a hand-over. Exchanges messages with the scheduling loop through channels.
//!
//! - `connections`: the bus and the control socket.
//! - `object`: methods and properties; `served`: their dispatch by zbus; `failure`: their errors;
//!   `options`: their dictionaries of options.
//! - `announce`: PropertiesChanged and the signals.
//! - `suspend`: follows logind, and evicts programs' memory before the host suspends.
//! - `gate`: admits calls; `callers`: identifies and authorizes callers.
//! - `authority`: polkit, which authorizes users other than root.

mod announce;
mod authority;
mod callers;
mod connections;
mod failure;
mod gate;
mod object;
mod options;
mod served;
mod suspend;

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::{self as blocking, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio::task::{LocalSet, spawn_local};
use tracing::debug;
use zbus::fdo;

use crate::config::rules::Addition;
use crate::daemon::connections::lock::{LockRequest, Lockable};
use crate::daemon::core::bundle::Snapshot;
use crate::daemon::core::claims::Claims;
use crate::daemon::core::pods::{Pods, Refused};
use crate::daemon::core::{ClientPids, GpuStates, Holders, NamedGpu, Present, RoomRequest, View};
use crate::daemon::hibernate::HibernationRequest;
use crate::daemon::tenants::{Budget, Budgets};
use crate::daemon::usage::{Query, UsageAnswer};
use crate::recorder::follow::Follower;
use crate::scheduler::{AntiThrash, PolicyName, Settings};
use connections::{serve_bus, serve_peers};
pub use failure::Failure;

/// Time for which a stopping daemon waits for this thread.
const STOP_PATIENCE: Duration = Duration::from_millis(300);

/// A request from the object to the scheduling loop.
#[derive(Debug)]
pub enum Request {
    /// The next view of the scheduler's state.
    View(oneshot::Sender<Arc<View>>),
    /// The recorded usage.
    Usage(Query, oneshot::Sender<UsageAnswer>),
    /// Changes a setting. The string describes the caller for the log, here and in the other requests.
    Set(Change, String, oneshot::Sender<Result<(), Failure>>),
    SetRule(Box<Addition>, String, oneshot::Sender<Result<(), Failure>>),
    /// Replaces the list of this node's pods. The answer lists the refused rules.
    SetPods(Pods, oneshot::Sender<Refused>),
    /// Replaces the list of this node's claims. The answer lists the refused claims, or is an error if the
    /// daemon serves no claims.
    SetClaims(Claims, oneshot::Sender<fdo::Result<Refused>>),
    /// Checks a lock request as far as the scheduling loop can. Authorization is separate.
    CheckLock(LockRequest, oneshot::Sender<fdo::Result<Lockable>>),
    Lock(LockRequest, oneshot::Sender<fdo::Result<OwnedFd>>),
    /// Checks a request for a room as far as the scheduling loop can. The answer is the room's GPU.
    CheckRoom(RoomRequest, oneshot::Sender<fdo::Result<NamedGpu>>),
    /// Makes a room. The answer is sent when the memory has been freed.
    Room(RoomRequest, oneshot::Sender<fdo::Result<OwnedFd>>),
    /// Ends this client's lock, on an administrator's order.
    TerminateLock(u64, oneshot::Sender<fdo::Result<()>>),
    /// The users of the program with this process ID.
    UsersOf(u32, oneshot::Sender<fdo::Result<BTreeSet<u32>>>),
    /// The users of the programs of the process with this ID and of its descendants.
    UsersOfTree(u32, oneshot::Sender<fdo::Result<BTreeSet<u32>>>),
    /// Pauses the program with this process ID (`true`), or resumes it (`false`). The program must belong
    /// to one of these users.
    Pause {
        pid: u32,
        is_paused: bool,
        users: BTreeSet<u32>,
        reply: oneshot::Sender<fdo::Result<()>>,
    },
    /// Saves a program to disk, restores it, or changes the images. With the caller's budget.
    Hibernation(HibernationRequest, Arc<Budget>),
    /// Moves the program with this process ID to this GPU. The program must belong to one of these users.
    /// The answer is sent once the move has succeeded or failed.
    Migrate {
        pid: u32,
        gpu: String,
        users: BTreeSet<u32>,
        reply: oneshot::Sender<fdo::Result<()>>,
    },
    /// Drains a GPU (`true`), or allows its use again (`false`).
    Drain(String, bool, oneshot::Sender<fdo::Result<()>>),
    /// Collects the contents of a debug bundle, including this view.
    Debug(Arc<View>, oneshot::Sender<Box<Snapshot>>),
    /// Releases the driver for at most this time. The answer lists the programs that still use it.
    ReleaseDriver(Duration, oneshot::Sender<Vec<u64>>),
    /// Handles an imminent suspend of the host (`true`), or its end (`false`). The answer is sent once all
    /// evictable memory has been evicted from the GPUs.
    Suspend(bool, oneshot::Sender<()>),
    Reload(String, oneshot::Sender<Result<(), String>>),
    /// Discards all settings that were changed at run time.
    Reset(String, oneshot::Sender<Result<(), Failure>>),
}

/// A change of a setting whose caller is already authorized.
#[derive(Debug, Clone, Copy)]
pub enum Change {
    TimeQuantum(Duration),
    MaxWait(Duration),
    AntiThrash(AntiThrash),
    Policy(PolicyName),
}

impl Change {
    pub fn apply(self, settings: &mut Settings) {
        match self {
            Self::TimeQuantum(quantum) => settings.time_quantum = quantum,
            Self::MaxWait(most) => settings.max_wait = most,
            Self::AntiThrash(mode) => settings.anti_thrash = mode,
            Self::Policy(policy) => settings.policy = policy,
        }
    }
}

/// The thread that serves the object.
#[derive(Debug)]
pub struct BusServer {
    stop: oneshot::Sender<()>,
    stopped: blocking::Receiver<()>,
}

impl BusServer {
    /// Starts the thread. The receiver completes after the first attempt to connect to the bus, even if the
    /// attempt failed.
    pub fn start(
        bus: Bus,
        control: Option<OwnedFd>,
        requests: mpsc::UnboundedSender<Request>,
        followed: Followed,
        budgets: Arc<Budgets>,
    ) -> std::io::Result<(Self, oneshot::Receiver<()>)> {
        let (attempted, first) = oneshot::channel();
        let (stop, asked) = oneshot::channel();
        let (done, stopped) = blocking::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        thread::Builder::new().name("dbus".into()).spawn(move || {
            let shared = Shared {
                requests,
                bundling: Arc::default(),
                drawing: Arc::default(),
                following: Arc::default(),
                reading_usage: Arc::default(),
                budgets,
                followed,
            };
            LocalSet::new().block_on(&runtime, async {
                if let Some(control) = control {
                    spawn_local(serve_peers(control, shared.clone()));
                }
                spawn_local(serve_bus(bus, shared, attempted));
                let _ = asked.await;
            });
            drop(runtime);
            drop(done);
        })?;
        Ok((Self { stop, stopped }, first))
    }

    /// Leaves the bus and disconnects the peers.
    pub fn stop(self) {
        let _ = self.stop.send(());
        if self.stopped.recv_timeout(STOP_PATIENCE) == Err(RecvTimeoutError::Timeout) {
            debug!("the D-Bus thread does not end, exiting without it");
        }
    }
}

/// The bus to connect to.
#[derive(Debug, Clone)]
pub enum Bus {
    None,
    System,
    Address(String),
}

/// Values that the scheduling loop publishes for the object.
#[derive(Debug, Clone)]
pub struct Followed {
    pub settings: watch::Receiver<Settings>,
    pub problems: watch::Receiver<Vec<String>>,
    pub holders: watch::Receiver<Holders>,
    pub clients: watch::Receiver<ClientPids>,
    pub states: watch::Receiver<GpuStates>,
    pub gpus: watch::Receiver<Present>,
    /// True if any program has a GPU attached.
    pub attached: watch::Receiver<bool>,
}

/// The state of live timelines, which all readers share.
#[derive(Debug, Default)]
struct Following {
    follower: Option<Follower>,
    /// The number of timelines so far. If it does not change for a while, the follower is dropped.
    drawn: u64,
}

#[derive(Debug, Clone)]
struct Shared {
    requests: mpsc::UnboundedSender<Request>,
    /// Held while a debug bundle is created. Bundles take memory, so only one is created at a time.
    bundling: Arc<Mutex<()>>,
    /// Held while a timeline is drawn, and for a pause afterwards.
    drawing: Arc<Mutex<()>>,
    /// The reader of the recording for live timelines. Held while one is drawn.
    following: Arc<Mutex<Following>>,
    /// Held while usage records are read, because records can be large.
    reading_usage: Arc<Mutex<()>>,
    budgets: Arc<Budgets>,
    followed: Followed,
}

fn seconds(duration: Duration) -> u32 {
    u32::try_from(duration.as_secs()).unwrap_or(u32::MAX)
}
