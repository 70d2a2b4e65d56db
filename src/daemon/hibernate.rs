//! Hibernation: programs leave the machine's memory for an image on disk, and are restored. The helper
//! `nvshare-hibernate` keeps the images and runs CRIU. ARCHITECTURE.md has the steps and what happens
//! if an actor dies.
//!
//! With systemd, the helper is a service that has its own socket. Without systemd, it is a child of the
//! daemon, and can save programs only if the daemon runs as root.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::rc::Rc;
use std::time::{Duration, Instant};

use nvshare_hibernate::{Image, MAX_PACKET, Reply, Request};
use nvshare_wire::client::LeaveAnswer;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::process::{Child, Command};
use tokio::sync::oneshot;
use tokio::task::spawn_local;
use tokio::time::{sleep, timeout};
use tracing::{info, warn};
use zbus::fdo;

use crate::daemon::core::{Candidate, Core, Departure, Sleeps};
use crate::daemon::systemd;
use crate::sys::{descriptors, socket};

/// The socket of the helper. systemd starts a helper for each connection.
const SOCKET: &str = "/run/nvshare-hibernate/hibernate.sock";
const PROGRAM: &str = "nvshare-hibernate";

/// Maximum time until a program sleeps. Its preparation takes at most 40 s.
const SLEEP_TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum time until a sleeping client has left.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the checks of the program.
const LOOK: Duration = Duration::from_millis(10);
/// Interval and maximum number of the requests to settle what a killed helper has left. CRIU may still be
/// at work, without the helper.
const SETTLE_PERIOD: Duration = Duration::from_secs(1);
const MAX_SETTLES: usize = 600;

/// A request of the D-Bus object, whose caller is already authorized.
#[derive(Debug)]
pub enum HibernationRequest {
    /// Saves the program with this process ID, which belongs to one of these users, and ends it.
    Save {
        pid: u32,
        users: BTreeSet<u32>,
    },
    /// Restores the program of an image of this user.
    Restore {
        uid: u32,
        image: String,
    },
    List,
    Delete {
        uid: u32,
        image: String,
    },
}

/// The answer to a [`HibernationRequest`].
#[derive(Debug)]
pub enum Done {
    Saved(Image),
    Restored(u32),
    Listed(Vec<Image>),
    Deleted,
}

/// Carries out a request, and sends the answer.
pub fn answer(core: &Rc<RefCell<Core>>, request: HibernationRequest, reply: oneshot::Sender<fdo::Result<Done>>) {
    let core = core.clone();
    spawn_local(async move {
        let done = match request {
            HibernationRequest::Save { pid, users } => save(&core, pid, &users).await.map(Done::Saved),
            HibernationRequest::Restore { uid, image } => restore(uid, image).await.map(Done::Restored),
            HibernationRequest::List => list().await.map(Done::Listed),
            HibernationRequest::Delete { uid, image } => delete(uid, image).await.map(|()| Done::Deleted),
        };
        let _ = reply.send(done); // the caller may have left
    });
}

/// A started helper. Dropping this value closes its socket.
struct Helper {
    socket: AsyncFd<OwnedFd>,
    _child: Option<Child>,
}

impl Helper {
    fn start() -> io::Result<Self> {
        if systemd::is_there() && Path::new(SOCKET).exists() {
            let own = socket::connect(Path::new(SOCKET), socket::Kind::Packets)?;
            return Ok(Self { socket: descriptors::watch(own)?, _child: None });
        }
        let (own, its) = socket::packet_pair()?;
        rustix::io::ioctl_fionbio(&its, false)?;
        let own_path = std::env::current_exe()?;
        let beside = own_path.with_file_name(PROGRAM);
        let installed = own_path.parent().and_then(Path::parent).map(|prefix| prefix.join("libexec").join(PROGRAM));
        let program = installed.filter(|path| !beside.exists() && path.exists()).unwrap_or(beside);
        let mut command = Command::new(program);
        command.stdin(Stdio::from(its)).stdout(Stdio::null()).env("NVSHARE_DISABLE", "1");
        command.arg("--scheduler").arg(rustix::process::geteuid().as_raw().to_string());
        let child = command.spawn()?;
        Ok(Self { socket: descriptors::watch(own)?, _child: Some(child) })
    }

    /// Sends a request, and waits for its answer. `None`: the helper has exited.
    async fn ask(&self, request: &Request, process: Option<&OwnedFd>) -> Option<Reply> {
        let descriptors: Vec<&OwnedFd> = process.into_iter().collect();
        socket::send_with(self.socket.get_ref().as_fd(), &request.encode(), &descriptors).ok()?;
        let mut packet = vec![0; MAX_PACKET];
        // Received file descriptors are closed.
        let receive = |fd: &OwnedFd| socket::receive(fd.as_fd(), &mut packet, 0, &mut Vec::new());
        let length = self.socket.async_io(Interest::READABLE, receive).await.ok()?;
        Reply::decode(packet.get(..length)?)
    }
}

fn failed(what: &str, why: impl std::fmt::Display) -> fdo::Error {
    fdo::Error::Failed(format!("cannot {what}: {why}"))
}

async fn ask(what: &str, request: Request) -> fdo::Result<Reply> {
    let helper = Helper::start().map_err(|e| failed(what, format_args!("cannot start {PROGRAM}: {e}")))?;
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

async fn list() -> fdo::Result<Vec<Image>> {
    let what = "list images";
    match ask(what, Request::List).await? {
        Reply::Images(images) => Ok(images),
        _ => Err(unexpected(what)),
    }
}

async fn delete(uid: u32, image: String) -> fdo::Result<()> {
    let what = format!("delete image {image:?}");
    ask(&what, Request::Delete { uid, image }).await.map(drop)
}

async fn restore(uid: u32, image: String) -> fdo::Result<u32> {
    let what = format!("restore image {image:?}");
    match ask(&what, Request::Restore { uid, image: image.clone() }).await? {
        Reply::Restored { pid } => {
            info!(pid, uid, image, "restored image {image} as process {pid}");
            Ok(pid.try_into().unwrap_or(0))
        }
        _ => Err(unexpected(&what)),
    }
}

/// Saves a program. The program is paused until it was saved. If it cannot be saved, it continues.
async fn save(core: &Rc<RefCell<Core>>, pid: u32, users: &BTreeSet<u32>) -> fdo::Result<Image> {
    let propose =
        |core: &mut Core| core.with_host(|host, model, events| host.departures.propose(model, events, pid, users));
    let candidate = propose(&mut core.borrow_mut())?;
    let (name, since) = (&candidate.name, Instant::now());
    let saved = save_candidate(core, &candidate).await;
    if let Err(why) = &saved {
        warn!(pid, "cannot save {name} to disk: {why}");
        core.borrow_mut().with_host(|host, model, events| host.departures.give_up(model, events, &candidate));
    } else {
        let seconds = since.elapsed().as_secs_f64();
        info!(pid, seconds, "saved {name} to disk after {seconds:.1} s");
    }
    saved.map_err(|why| failed(&format!("hibernate process {pid}"), why))
}

async fn save_candidate(core: &Rc<RefCell<Core>>, candidate: &Candidate) -> Result<Image, String> {
    let clients = core.borrow().model.client_pids().into_values().filter_map(|pid| pid.try_into().ok()).collect();
    let request = Request::Check { uid: candidate.uid, clients };
    let helper = Helper::start().map_err(|e| format!("cannot start {PROGRAM}: {e}"))?;
    let check = |reply: Option<Reply>| match reply {
        Some(Reply::Done) => Ok(()),
        Some(Reply::Refused(why)) => Err(why),
        _ => Err(format!("{PROGRAM} ended without a reply. Try again")),
    };
    wait_until_asleep(core, candidate).await?;
    check(helper.ask(&request, Some(&candidate.process)).await)?;
    leave(core, candidate).await?;
    match helper.ask(&Request::Save { uid: candidate.uid }, Some(&candidate.process)).await {
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

/// Lets programs continue that an earlier daemon and its helper have left stopped.
pub fn settle_at_start() {
    // A child of the daemon ends soon after the daemon, and leaves what the next request settles.
    if systemd::is_there() && Path::new(SOCKET).exists() {
        spawn_local(settle());
    }
}

/// Waits until no killed helper has left processes stopped, or no helper can tell.
async fn settle() {
    for _ in 0..MAX_SETTLES {
        let reply = match Helper::start() {
            Ok(helper) => helper.ask(&Request::Settle, None).await,
            Err(_) => return,
        };
        if !matches!(reply, None | Some(Reply::Busy)) {
            return;
        }
        sleep(SETTLE_PERIOD).await;
    }
}

async fn wait_until_asleep(core: &Rc<RefCell<Core>>, candidate: &Candidate) -> Result<(), String> {
    let asleep = async {
        loop {
            let sleeps = core.borrow().model.sleeps(candidate.client);
            match sleeps {
                Sleeps::Yes => return Ok(()),
                Sleeps::No(why) => return Err(format!("it does not sleep: {why}")),
                Sleeps::NotYet => sleep(LOOK).await,
            }
        }
    };
    timeout(SLEEP_TIMEOUT, asleep).await.unwrap_or_else(|_| Err("it does not fall asleep".into()))
}

/// Waits until a sleeping client has closed its connection.
async fn leave(core: &Rc<RefCell<Core>>, candidate: &Candidate) -> Result<(), String> {
    core.borrow_mut().with_host(|host, model, _| host.departures.ask_to_leave(model, candidate.client));
    let left = async {
        loop {
            let departure = core.borrow().host.departures.departure(candidate.client);
            match departure {
                Some(Departure::Left(_)) => return Ok(()),
                Some(Departure::Refused(LeaveAnswer::SwapFile)) => {
                    return Err(
                        "it has a swap file, which cannot be saved. Start it while `file` in `[swap]` is not set"
                            .into(),
                    );
                }
                Some(Departure::Refused(_)) => return Err("it was woken. Try again".into()),
                Some(Departure::Asked | Departure::Preparing) => sleep(LOOK).await,
                None => return Err("it has ended".into()),
            }
        }
    };
    timeout(LEAVE_TIMEOUT, left).await.unwrap_or_else(|_| Err("it does not answer".into()))
}
