//! Hibernation: programs leave the machine's memory for an image on disk, and are restored. The helper
//! `nvshare-hibernate` keeps the images and runs CRIU. ARCHITECTURE.md has the steps and what happens
//! if an actor dies.
//!
//! The helper is a service of systemd that has its own socket. Without systemd, programs cannot be saved,
//! because CRIU and restored programs run in scopes.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvshare_hibernate::{Image, MAX_LISTED, MAX_PACKET, Reply, Request, decode, encode};
use nvshare_wire::client::LeaveAnswer;
use rustix::net::{Shutdown, shutdown};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::sync::oneshot;
use tokio::task::{spawn_blocking, spawn_local};
use tokio::time::{sleep, timeout};
use tracing::{info, warn};
use zbus::fdo;

use crate::daemon::core::{Candidate, Core, Departure};
use crate::daemon::systemd;
use crate::daemon::tenants::{Budget, Share, What};
use crate::daemon::transport::peer;
use crate::scheduler::ClientId;
use crate::sys::{credentials, descriptors, socket};

/// The socket of the helper. systemd starts a helper for each connection.
const SOCKET: &str = "/run/nvshare-hibernate/hibernate.sock";
const PROGRAM: &str = "nvshare-hibernate";

const CANCELLED: &str = "it was cancelled";

/// Exists if a program was saved or restored since the host was booted. Otherwise, no helper has left anything
/// that a daemon must settle when it starts.
const USED: &str = "/run/nvshare/hibernated";

/// Maximum time until a program sleeps. Its preparation takes at most 40 s.
const SLEEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time until a sleeping client has left.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time until the helper answers. systemd ends the helper earlier (`RuntimeMaxSec=`).
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1300);
/// Maximum number of ancestors of a process that are looked at.
const MAX_DEPTH: usize = 64;
/// Interval of the checks of the program.
const LOOK: Duration = Duration::from_millis(10);
/// Interval and maximum number of the requests to settle what a killed helper has left. CRIU may still be
/// at work, without the helper.
const SETTLE_PERIOD: Duration = Duration::from_secs(1);
const MAX_SETTLES: usize = 600;

/// The programs of a process and of its descendants.
#[derive(Debug)]
pub struct Tree {
    root: u32,
    /// The pidfd of the root, which need not use a GPU itself: a notebook server only starts kernels. `None` if it
    /// could not be opened.
    process: Option<OwnedFd>,
    /// The programs, with their process IDs.
    clients: BTreeMap<ClientId, u32>,
    /// The users accountable for the programs.
    pub users: BTreeSet<u32>,
}

/// A started helper.
struct Helper {
    /// `None` only while this value is dropped.
    socket: Option<AsyncFd<OwnedFd>>,
    place: Option<Share>,
}

impl Drop for Helper {
    /// Cancels the request. The caller's place is taken until the helper has ended: otherwise, a caller that leaves
    /// again and again would start any number of helpers.
    fn drop(&mut self) {
        self.cancel();
        if let (Some(socket), Some(place)) = (self.socket.take(), self.place.take()) {
            spawn_local(async move {
                let mut packet = vec![0; MAX_PACKET];
                let ended = async {
                    let mut receive = |fd: &OwnedFd| socket::receive(fd.as_fd(), &mut packet, 0, &mut Vec::new());
                    while socket.async_io(Interest::READABLE, &mut receive).await.is_ok_and(|length| length > 0) {}
                };
                let _ = timeout(ANSWER_TIMEOUT, ended).await; // by then, systemd has ended it
                drop(place);
            });
        }
    }
}

impl Helper {
    /// Starts a helper for a caller, once fewer than the limit run for its tenant. `None`: for the daemon.
    async fn start(budget: Option<&Arc<Budget>>) -> io::Result<Self> {
        if !is_there() {
            return Err(io::Error::other("systemd or nvshare-hibernate.socket is missing"));
        }
        let mut place = None;
        if let Some(budget) = budget {
            place = Some(budget.wait_for(What::Helpers).await);
            budget.wait_for_token(What::Helpers).await;
        }
        let own = socket::connect(Path::new(SOCKET), socket::Kind::Packets)?;
        Ok(Self { socket: Some(descriptors::watch(own)?), place })
    }

    /// Cancels the request, which is still answered.
    fn cancel(&self) {
        if let Some(socket) = &self.socket {
            let _ = shutdown(socket.get_ref(), Shutdown::Write); // fails if the helper has ended
        }
    }

    /// Sends a request, and waits for its answer. `None`: the helper has exited, or does not answer.
    async fn ask(&self, request: &Request, process: Option<&OwnedFd>) -> Option<Reply> {
        let socket = self.socket.as_ref()?;
        let descriptors: Vec<&OwnedFd> = process.into_iter().collect();
        socket::send_with(socket.get_ref().as_fd(), &encode(request), &descriptors).ok()?;
        let mut packet = vec![0; MAX_PACKET];
        // Received file descriptors are closed.
        let receive = |fd: &OwnedFd| socket::receive(fd.as_fd(), &mut packet, 0, &mut Vec::new());
        let length = timeout(ANSWER_TIMEOUT, socket.async_io(Interest::READABLE, receive)).await.ok()?.ok()?;
        decode(packet.get(..length)?)
    }
}

fn failed(what: &str, why: impl std::fmt::Display) -> fdo::Error {
    fdo::Error::Failed(format!("cannot {what}: {why}"))
}

/// Returns true if helpers can be started.
fn is_there() -> bool {
    systemd::is_there() && Path::new(SOCKET).exists()
}

async fn ask(budget: &Arc<Budget>, what: &str, request: Request) -> fdo::Result<Reply> {
    let start = Helper::start(Some(budget)).await;
    let helper = start.map_err(|e| failed(what, format_args!("cannot start {PROGRAM}: {e}")))?;
    match helper.ask(&request, None).await {
        Some(Reply::Refused(why)) => Err(failed(what, why)),
        Some(Reply::Busy) => Err(failed(what, "it is being saved or restored. Try again later")),
        Some(reply) => Ok(reply),
        None => Err(failed(what, format_args!("{PROGRAM} ended without a reply. Try again"))),
    }
}

fn unexpected(what: &str) -> fdo::Error {
    failed(what, format_args!("unexpected reply of {PROGRAM}"))
}

/// Lists the images of this user, or of all users. `budget`: the caller's, which limits its helpers.
///
/// # Errors
/// No helper can be started, or it ends without a reply. The other functions fail likewise.
pub async fn list(budget: Arc<Budget>, uid: Option<u32>) -> fdo::Result<Vec<Image>> {
    let what = "list images";
    let mut images: Vec<Image> = Vec::new();
    loop {
        match ask(&budget, what, Request::List { uid, skip: images.len() }).await? {
            Reply::Images(page) => {
                let is_last = page.len() < MAX_LISTED;
                images.extend(page);
                if is_last {
                    return Ok(images);
                }
            }
            _ => return Err(unexpected(what)),
        }
    }
}

/// Finds the image with this name.
///
/// # Errors
/// Fails like [`list`].
pub async fn find(budget: Arc<Budget>, image: String) -> fdo::Result<Vec<Image>> {
    let what = format!("find image {image:?}");
    match ask(&budget, &what, Request::Find { image }).await? {
        Reply::Images(images) => Ok(images),
        _ => Err(unexpected(&what)),
    }
}

/// Changes an image or its record. `what`: completes the message "cannot ...".
///
/// # Errors
/// Fails like [`list`], or the helper refuses the change.
pub async fn change(budget: Arc<Budget>, what: String, change: Request) -> fdo::Result<()> {
    ask(&budget, &what, change).await.map(drop)
}

/// Lists everything that this host lacks for a restore of an image of this user.
///
/// # Errors
/// Fails like [`list`], or the image cannot be read.
pub async fn compare(
    core: Rc<RefCell<Core>>,
    budget: Arc<Budget>,
    uid: u32,
    image: String,
) -> fdo::Result<Vec<String>> {
    let what = format!("check image {image:?}");
    let gpus = core.borrow().model.kinds_of_host();
    match ask(&budget, &what, Request::Compare { uid, image, gpus }).await? {
        Reply::Lacks(lacks) => Ok(lacks),
        _ => Err(unexpected(&what)),
    }
}

/// Restores the program of an image of this user. Returns its process ID.
///
/// # Errors
/// Fails like [`list`], or the program cannot be restored.
pub async fn restore(core: Rc<RefCell<Core>>, budget: Arc<Budget>, uid: u32, image: String) -> fdo::Result<u32> {
    let what = format!("restore image {image:?}");
    record_use().map_err(|why| failed(&what, why))?;
    let gpus = core.borrow().model.kinds_of_host();
    match ask(&budget, &what, Request::Restore { uid, image: image.clone(), gpus }).await? {
        Reply::Restored { pid } => {
            info!(pid, uid, image, "restored image {image} as process {pid}");
            Ok(pid.try_into().unwrap_or(0))
        }
        _ => Err(unexpected(&what)),
    }
}

/// Finds the programs of a process and of its descendants. Waits until those are back whose hibernation has just
/// failed: they connect again after a second.
///
/// # Errors
/// `InvalidArgs` if none of these processes is a program under nvshare.
pub async fn find_tree(core: &RefCell<Core>, root: u32) -> fdo::Result<Tree> {
    // Opened before the search. If the process has not ended afterwards, the programs are its descendants, and not
    // descendants of an earlier process with the same PID.
    let process = i32::try_from(root).ok().and_then(|pid| credentials::pidfd_of(pid).ok().flatten());
    let mut pids: BTreeSet<u32> = core.borrow().model.program_pids().into_values().collect();
    // Reads /proc for each client and its ancestors, which would delay the scheduling loop.
    let search = move || {
        pids.retain(|pid| *pid == root || is_descendant(*pid, root));
        pids
    };
    let pids = spawn_blocking(search).await.unwrap_or_default();
    let programs = |core: &Core| {
        let all = core.model.program_pids().into_iter();
        all.filter(|(_, pid)| pids.contains(pid)).collect::<BTreeMap<ClientId, u32>>()
    };
    let is_any = |is_so: &dyn Fn(&Core, ClientId) -> bool| {
        let core = &*core.borrow();
        programs(core).into_keys().any(|client| is_so(core, client))
    };
    let is_returning = |core: &Core, client| core.host.departures.is_returning(client);
    if is_any(&is_returning) {
        let back = async {
            while is_any(&|core, client| is_returning(core, client) || !core.model.uses_gpu(client)) {
                sleep(LOOK).await;
            }
        };
        let _ = timeout(LEAVE_TIMEOUT, back).await; // if one is not back, `propose` refuses it
    }
    let core = core.borrow();
    let clients = programs(&core);
    let users: BTreeSet<u32> = clients.keys().filter_map(|client| core.model.user_of(*client)).collect();
    if users.is_empty() { Err(no_programs(root)) } else { Ok(Tree { root, process, clients, users }) }
}

fn no_programs(root: u32) -> fdo::Error {
    fdo::Error::InvalidArgs(format!("neither process {root} nor its descendants are programs under nvshare"))
}

/// Saves the programs of a tree to disk, and ends them. Sends the answer. If the caller leaves before they are
/// saved, the programs continue. `closes_connections`: the restore closes their network connections. Otherwise, none
/// may exist.
pub fn save(
    core: &Rc<RefCell<Core>>,
    budget: Arc<Budget>,
    tree: Tree,
    closes_connections: bool,
    mut reply: oneshot::Sender<fdo::Result<Image>>,
) {
    let core = core.clone();
    spawn_local(async move {
        let saved = {
            let cancelled = pin!(reply.closed());
            save_tree(&core, &budget, &tree, closes_connections, cancelled).await
        };
        reply.send(saved)
    });
}

/// Saves the programs of a tree. All are paused until they were saved. If they cannot be saved, or `cancelled`
/// completes before they are, they continue.
async fn save_tree(
    core: &Rc<RefCell<Core>>,
    budget: &Arc<Budget>,
    tree: &Tree,
    closes_connections: bool,
    cancelled: Pin<&mut impl Future<Output = ()>>,
) -> fdo::Result<Image> {
    let (since, pid) = (Instant::now(), tree.root);
    let mut candidates = Vec::new();
    let saved = match propose(core, tree, &mut candidates) {
        Ok(root) => {
            let saved = save_candidates(core, budget, &root, &candidates, closes_connections, cancelled).await;
            saved.map_err(|why| {
                warn!(pid, "cannot save process {pid} to disk: {why}");
                failed(&format!("hibernate process {pid}"), why)
            })
        }
        Err(e) => Err(e),
    };
    if saved.is_err() {
        core.borrow_mut().with_host(|host, model, events| {
            for candidate in &candidates {
                host.departures.give_up(model, events, candidate);
            }
        });
    } else if let Some(Candidate { name, .. }) = candidates.first() {
        let seconds = since.elapsed().as_secs_f64();
        info!(pid, seconds, "saved {name} to disk after {seconds:.1} s");
    }
    saved
}

/// Puts the programs of a tree to sleep. Returns a pidfd of the root.
///
/// # Errors
/// One of the programs cannot be hibernated, or the root has ended. The earlier ones are in `candidates`.
fn propose(core: &RefCell<Core>, tree: &Tree, candidates: &mut Vec<Candidate>) -> fdo::Result<OwnedFd> {
    for (client, pid) in &tree.clients {
        let mut core = core.borrow_mut();
        let candidate = core.with_host(|host, model, events| host.departures.propose(model, events, *client, *pid));
        candidates.push(candidate?);
    }
    // A client's own pidfd also identifies the process that has connected.
    let own = candidates.iter().find(|candidate| candidate.pid == tree.root).map(|candidate| &candidate.process);
    let process = own.or(tree.process.as_ref()).and_then(|process| process.try_clone().ok());
    process.filter(|process| !credentials::has_ended(process.as_fd())).ok_or_else(|| no_programs(tree.root))
}

/// Returns true if a process was started by another one, or by its descendants.
fn is_descendant(pid: u32, root: u32) -> bool {
    let parent = |pid: &i32| peer::parent(*pid).filter(|parent| *parent > 0);
    let (Ok(pid), Ok(root)) = (i32::try_from(pid), i32::try_from(root)) else { return false };
    std::iter::successors(parent(&pid), parent).take(MAX_DEPTH).any(|ancestor| ancestor == root)
}

/// `root`: the pidfd of the process to save with its descendants.
async fn save_candidates(
    core: &Rc<RefCell<Core>>,
    budget: &Arc<Budget>,
    root: &OwnedFd,
    candidates: &[Candidate],
    closes_connections: bool,
    mut cancelled: Pin<&mut impl Future<Output = ()>>,
) -> Result<Image, String> {
    let helper = tokio::select! {
        helper = prepare(core, budget, root, candidates, closes_connections) => helper?,
        () = &mut cancelled => return Err(CANCELLED.into()),
    };
    let reply = {
        let mut saving = pin!(helper.ask(&Request::Save, None));
        tokio::select! {
            biased; // sends the request first
            reply = &mut saving => reply,
            () = cancelled => {
                helper.cancel();
                saving.await
            }
        }
    };
    match reply {
        Some(Reply::Saved { image }) => Ok(image),
        Some(Reply::Refused(why)) => Err(why),
        _ => {
            drop(helper);
            settle().await;
            Err(format!(
                "{PROGRAM} ended before it replied. If `nvsharectl hibernated` lists the program, it was saved"
            ))
        }
    }
}

/// Prepares programs so that the returned helper can save them: they sleep, were checked, and have left.
async fn prepare(
    core: &Rc<RefCell<Core>>,
    budget: &Arc<Budget>,
    root: &OwnedFd,
    candidates: &[Candidate],
    closes_connections: bool,
) -> Result<Helper, String> {
    // The helper checks that all processes of the tree belong to this user.
    let uid = candidates.first().ok_or("it has ended")?.uid;
    for candidate in candidates {
        wait_until_asleep(core, candidate).await?;
    }
    // Only now, because the program may take long to sleep, and the helper does not wait for a request so
    // long.
    let helper = Helper::start(Some(budget)).await.map_err(|e| format!("cannot start {PROGRAM}: {e}"))?;
    record_use()?;
    let leaves = |pid: &u32| candidates.iter().any(|candidate| candidate.pid == *pid);
    let others = core.borrow().model.client_pids().into_values().filter(|pid| !leaves(pid));
    let clients = others.filter_map(|pid| pid.try_into().ok()).collect();
    let gpus = candidates.iter().flat_map(|candidate| candidate.gpus.iter().copied()).collect();
    let gpus = core.borrow().model.kinds_of(&gpus);
    let request = Request::Check { uid, clients, gpus, closes_connections };
    match helper.ask(&request, Some(root)).await {
        Some(Reply::Done) => {}
        Some(Reply::Refused(why)) => return Err(why),
        _ => return Err(format!("{PROGRAM} ended without a reply. Try again")),
    }
    leave(core, candidates).await?;
    Ok(helper)
}

/// Lets programs continue that an earlier daemon and its helper have left stopped.
pub fn settle_at_start() {
    if is_there() && Path::new(USED).exists() {
        spawn_local(settle());
    }
}

/// Records that programs may be stopped from now on.
fn record_use() -> Result<(), String> {
    std::fs::write(USED, "").map_err(|e| format!("cannot write {USED}: {e}"))
}

/// Waits until no killed helper has left processes stopped.
async fn settle() {
    for _ in 0..MAX_SETTLES {
        // A helper that cannot be started now may be started later.
        if let Ok(helper) = Helper::start(None).await
            && !matches!(helper.ask(&Request::Settle, None).await, None | Some(Reply::Busy))
        {
            return;
        }
        sleep(SETTLE_PERIOD).await;
    }
    warn!("cannot settle what {PROGRAM} has left: a program may be stopped. See: nvsharectl hibernated");
}

async fn wait_until_asleep(core: &Rc<RefCell<Core>>, candidate: &Candidate) -> Result<(), String> {
    let asleep = async {
        loop {
            let sleeps = core.borrow().model.sleeps(candidate.client);
            if sleeps.map_err(|why| format!("it does not sleep: {why}"))? {
                return Ok(());
            }
            sleep(LOOK).await;
        }
    };
    timeout(SLEEP_TIMEOUT, asleep).await.unwrap_or_else(|_| Err("it does not fall asleep".into()))
}

/// Waits until the sleeping clients have closed their connections. All leave at the same time, because each
/// comes back after a second.
async fn leave(core: &Rc<RefCell<Core>>, candidates: &[Candidate]) -> Result<(), String> {
    core.borrow_mut().with_host(|host, model, _| {
        for candidate in candidates {
            host.departures.ask_to_leave(model, candidate.client);
        }
    });
    let left = async {
        for candidate in candidates {
            wait_until_left(core, candidate).await?;
        }
        Ok(())
    };
    timeout(LEAVE_TIMEOUT, left).await.unwrap_or_else(|_| Err("it does not answer".into()))
}

async fn wait_until_left(core: &Rc<RefCell<Core>>, candidate: &Candidate) -> Result<(), String> {
    loop {
        let departure = core.borrow().host.departures.departure(candidate.client);
        match departure {
            Some(Departure::Left(_) | Departure::Returning(_)) => return Ok(()),
            Some(Departure::Refused(LeaveAnswer::SwapFile)) => {
                return Err(
                    "it has a swap file, which cannot be saved. Start it while `file` in `[swap]` is not set".into()
                );
            }
            Some(Departure::Refused(_)) => return Err("it was woken. Try again".into()),
            Some(Departure::Asked | Departure::Preparing) => sleep(LOOK).await,
            None => return Err("it has ended".into()),
        }
    }
}
