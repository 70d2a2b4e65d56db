//! `nvshare-hibernate`: saves sleeping programs to disk and restores them. Standard input is a socket to
//! the scheduler, which sends the requests. The crate's library describes the packets.
//!
//! The section "Hibernation" of ARCHITECTURE.md explains the steps, and what happens if an actor dies.
//!
//! - `owner`: CRIU runs as the owner of the program, so that a restore gives no one a right.
//! - `process`: which processes can be saved; stopping them. `criu`: CRIU's command lines.
//! - `store`: images, their signatures, and what killed helpers have left. `scope`: restored programs as
//!   units.
//!
//! The helper runs as root with the capabilities to become the owner (`CAP_SETUID`, `CAP_SETGID`), to
//! give CRIU its capabilities (`CAP_CHECKPOINT_RESTORE`, `CAP_SETPCAP`), to take CRIU's files
//! (`CAP_CHOWN`, `CAP_FOWNER`, `CAP_DAC_OVERRIDE`), and to read and stop the program
//! (`CAP_SYS_PTRACE`, `CAP_KILL`).

mod criu;
mod owner;
mod process;
mod scope;
mod store;

use clap::Parser;
use nvshare_hibernate::{IDLE, Image, MAX_PACKET, Reply, Request};
use process::{Credentials, Identity, Tree};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, UCred, recvmsg, send},
};
use std::{
    ffi::CString,
    fmt,
    fs::OpenOptions,
    io::{IoSliceMut, stdin},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::PathBuf,
    process::ExitCode,
};
use store::{Entry, Manifest, Stage, Store};

/// Saves sleeping programs to disk and restores them, for the nvshare-scheduler connected to standard input.
#[derive(Debug, Parser)]
#[command(name = "nvshare-hibernate", version)]
struct Arguments {
    /// Name or numeric ID of the scheduler's user
    #[arg(long, value_name = "USER", default_value = "0")]
    scheduler: String,
    /// Directory of the images
    #[arg(long, value_name = "DIR", env = "NVSHARE_IMAGES", default_value = "/var/lib/nvshare-hibernate")]
    images: PathBuf,
    /// Only check whether this process may open a file
    #[arg(long, value_name = "FILE", hide = true)]
    probe: Option<PathBuf>,
    #[arg(long, hide = true)]
    writable: bool,
}

/// The reason why a request is not carried out, in words for the user.
#[derive(Debug)]
pub struct Refusal(String);

impl Refusal {
    pub fn new(why: impl Into<String>) -> Self {
        Self(why.into())
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(path) = arguments.probe {
        let mut options = OpenOptions::new();
        let opened =
            options.read(!arguments.writable).write(arguments.writable).custom_flags(libc::O_NONBLOCK).open(path);
        return if opened.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let stdin = stdin();
    let socket = stdin.as_fd();
    if !user(&arguments.scheduler).is_some_and(|uid| is_scheduler(socket, uid)) {
        eprintln!("nvshare-hibernate must be started by the scheduler, with a socket as its standard input");
        return ExitCode::FAILURE;
    }
    // Each file and directory is created with a mode of its own.
    rustix::process::umask(rustix::fs::Mode::empty());
    let store = Store::open(&arguments.images);
    if let Ok(store) = &store {
        store.settle();
    }
    while let Some((request, pidfd)) = receive(socket) {
        let perform = |store: &Store| perform(store, request, pidfd, socket);
        let reply = match &store {
            Ok(store) => perform(store).unwrap_or_else(|Refusal(why)| Reply::Refused(why)),
            Err(Refusal(why)) => Reply::Refused(why.clone()),
        };
        if send(socket, &reply.encode(), SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
    ExitCode::SUCCESS
}

/// Returns the user with this name or numeric ID.
fn user(name: &str) -> Option<u32> {
    if let Ok(uid) = name.parse() {
        return Some(uid);
    }
    let name = CString::new(name).ok()?;
    // SAFETY: `name` is a string. The result is read before any other call that could change it, and this
    // process has one thread.
    unsafe { libc::getpwnam(name.as_ptr()).as_ref() }.map(|user| user.pw_uid)
}

/// Returns true if the peer of the socket is the scheduler's user or root.
fn is_scheduler(socket: BorrowedFd<'_>, scheduler: u32) -> bool {
    let is_allowed = |peer: UCred| peer.uid.is_root() || peer.uid.as_raw() == scheduler;
    rustix::net::sockopt::socket_peercred(socket).is_ok_and(is_allowed)
}

/// Receives one request, and its pidfd. Returns `None` if no request arrives within `IDLE`.
fn receive(socket: BorrowedFd<'_>) -> Option<(Request, Option<OwnedFd>)> {
    let limit = Timespec { tv_sec: IDLE.as_secs() as i64, tv_nsec: 0 };
    poll(&mut [PollFd::new(&socket, PollFlags::IN)], Some(&limit)).ok().filter(|ready| *ready > 0)?;
    let mut packet = vec![0; MAX_PACKET];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut packet)];
    let received = recvmsg(socket, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC).ok()?;
    let pidfd = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    Some((Request::decode(packet.get(..received.bytes)?)?, pidfd))
}

/// Returns true if the scheduler no longer waits for an answer.
fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(&socket, PollFlags::RDHUP)], Some(&Timespec::default())) != Ok(0)
}

fn perform(store: &Store, request: Request, pidfd: Option<OwnedFd>, socket: BorrowedFd<'_>) -> Result<Reply, Refusal> {
    let root = || pidfd.as_ref().and_then(process::of_pidfd).ok_or_else(|| Refusal::new("the program has ended"));
    match request {
        Request::Check { uid, clients } => {
            let tree = Tree::of(root()?).ok_or_else(|| Refusal::new("the program has ended"))?;
            if let Some(pid) = tree.pids().iter().skip(1).find(|pid| clients.contains(pid)) {
                let name = process::name(*pid);
                return Err(Refusal::new(format!(
                    "process {pid} ({name}), which it has started, uses a GPU, too. End it"
                )));
            }
            check(store, &tree, uid).map(|_| Reply::Done)
        }
        Request::Save { uid } => save(store, root()?, uid, socket),
        Request::Restore { uid, image } => restore(store, &image, uid),
        Request::List => Ok(Reply::Images(store.list())),
        Request::Delete { uid, image } => {
            let Some(entry) = store.lock(&image)? else { return Ok(Reply::Busy) };
            // Only root's manifest is missing or damaged.
            if uid != 0 {
                store.owned(&entry, uid)?;
            }
            entry.delete().map_err(|e| Refusal::new(format!("cannot delete image {image}: {e}")))?;
            Ok(Reply::Done)
        }
        Request::Settle => Ok(if store.settle() { Reply::Done } else { Reply::Busy }),
    }
}

/// Checks that a program can be saved. Changes nothing.
fn check(store: &Store, tree: &Tree, uid: u32) -> Result<Credentials, Refusal> {
    criu::check()?;
    let owner = tree.check(uid)?;
    let files = tree.files();
    if let Some(path) = criu::first_closed(&owner, &files) {
        let path = path.display();
        return Err(Refusal::new(format!(
            "it has {path} open, which its user may not open. Start it with: nvsharectl run --portable -- COMMAND"
        )));
    }
    store.check_room(tree.memory())?;
    Ok(owner)
}

/// Saves a program. The record is written before the program is stopped, and is removed after the program
/// continues. So a program that a killed helper has left stopped always has a record.
fn save(store: &Store, root: i32, uid: u32, socket: BorrowedFd<'_>) -> Result<Reply, Refusal> {
    let gone = || Refusal::new("the program has ended");
    let tree = Tree::of(root).ok_or_else(gone)?;
    let owner = tree.check(uid)?;
    let program = process::name(root);
    let process = Identity::of(root).ok_or_else(gone)?;
    let entry = store.create(&program, &process, &owner)?;
    let saved = Tree::stop(root).and_then(|tree| save_stopped(store, &entry, &tree, &program, uid, socket));
    match saved {
        Ok(image) => {
            // If this fails, the next helper ends the process.
            if let Err(e) = entry.end(&process) {
                eprintln!("nvshare-hibernate: cannot write the record of image {}: {e}", entry.name);
            }
            Ok(Reply::Saved { image })
        }
        Err(why) => {
            // The record may say that the image is the program although it could not be synced.
            let image_counts = !matches!(entry.stage(), Some(Stage::Saving { .. }));
            let done = if image_counts { entry.end(&process) } else { entry.give_up(&process) };
            done.map_err(|e| Refusal::new(format!("{why}, and its record cannot be written: {e}")))?;
            Err(why)
        }
    }
}

/// Completes the image of a stopped program.
fn save_stopped(
    store: &Store,
    entry: &Entry,
    tree: &Tree,
    program: &str,
    uid: u32,
    socket: BorrowedFd<'_>,
) -> Result<Image, Refusal> {
    // Only now can the program not change any more.
    let manifest = Manifest::new(program, tree.check(uid)?, tree);
    criu::dump(entry, &manifest.owner, tree.root())?;
    if has_hung_up(socket) {
        return Err(Refusal::new("it was cancelled"));
    }
    let process = Identity::of(tree.root()).ok_or_else(|| Refusal::new("the program has ended"))?;
    store.complete(entry, &manifest, process)
}

fn restore(store: &Store, image: &str, uid: u32) -> Result<Reply, Refusal> {
    criu::check()?;
    let Some(entry) = store.lock(image)? else { return Ok(Reply::Busy) };
    let stage = entry.stage().ok_or_else(|| Refusal::new(format!("image {image} is not complete")))?;
    if let Some(pid) = stage.process() {
        return Err(Refusal::new(format!("image {image} was restored, and runs as process {pid}")));
    }
    let manifest = store.verify(&entry, uid)?;
    check_groups(&manifest.owner)?;
    let taken = manifest.threads.iter().find(|pid| PathBuf::from(format!("/proc/{pid}")).exists());
    if let Some(pid) = taken {
        return Err(Refusal::new(format!(
            "another process has its process ID {pid}. Restore it when that process has ended"
        )));
    }
    let words = |e: std::io::Error| Refusal::new(format!("cannot restore image {image}: {e}"));
    let own = std::process::id() as i32;
    let helper = Identity::of(own).ok_or_else(|| Refusal::new("cannot read /proc"))?;
    let cgroups = process::cgroups(own).unwrap_or_default();
    entry.record(&Stage::Restoring { helper: helper.clone(), cgroups: cgroups.clone() }).map_err(words)?;
    let restored = criu::restore(&entry, &manifest.owner).and_then(|()| begin(&entry, &manifest));
    if restored.is_err() {
        entry.end_restore(&manifest, &helper, &cgroups).map_err(words)?;
    }
    restored
}

/// Lets a restored program continue. **From the first record on, the program is the process.**
fn begin(entry: &Entry, manifest: &Manifest) -> Result<Reply, Refusal> {
    let words = |e: std::io::Error| Refusal::new(format!("cannot write the record of image {}: {e}", entry.name));
    let process = Identity::of(manifest.root).ok_or_else(|| Refusal::new("the program ended while it was restored"))?;
    entry.record(&Stage::Continuing { process: process.clone() }).map_err(words)?;
    if let Err(e) = entry.go_on(process) {
        eprintln!("nvshare-hibernate: cannot write the record of image {}: {e}", entry.name);
    }
    Ok(Reply::Restored { pid: manifest.root })
}

/// Checks that the owner still has the user and the groups that the program has.
///
/// # Errors
/// The user is gone, or has left one of the groups.
fn check_groups(owner: &Credentials) -> Result<(), Refusal> {
    let now = groups_of(owner.uid).ok_or_else(|| Refusal::new(format!("there is no user {} any more", owner.uid)))?;
    match owner.groups.iter().chain([&owner.gid]).find(|group| !now.contains(group)) {
        Some(group) => Err(Refusal::new(format!("its user is no longer a member of group {group}"))),
        None => Ok(()),
    }
}

/// Returns the present groups of a user, or `None` if there is no such user.
fn groups_of(uid: u32) -> Option<Vec<u32>> {
    // SAFETY: the result is read before any other call that could change it, and this process has one thread.
    let user = unsafe { libc::getpwuid(uid).as_ref() }?;
    let mut groups = vec![0; 65536];
    let mut count = groups.len() as i32;
    // SAFETY: `pw_name` is a string, and `groups` has room for `count` groups.
    let result = unsafe { libc::getgrouplist(user.pw_name, user.pw_gid, groups.as_mut_ptr(), &raw mut count) };
    groups.truncate(usize::try_from(count).ok().filter(|_| result >= 0)?);
    Some(groups)
}
