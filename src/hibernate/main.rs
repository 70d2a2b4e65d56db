//! `nvshare-hibernate`: saves sleeping programs to disk and restores them. Standard input is a socket to
//! the scheduler, which sends the requests. The crate's library describes the packets.
//!
//! The section "Hibernation" of ARCHITECTURE.md explains the steps, and what happens if an actor dies.
//!
//! - `worker`: CRIU runs as the owner of the program, so that a restore gives no one a right. `scope`: it
//!   runs in the user's slice. `rights`: what a restored program may have. `criu`: CRIU's command lines.
//! - `process`: which processes can be saved; stopping them. `shared`: what they share with other programs.
//! - `claims`: the rights that an image claims for its tasks.
//! - `needs`, `files`: what a program needs from the host.
//! - `sending`: images for other hosts.
//! - `store`: images, their signatures, their room, and what killed helpers have left. `record`: where the program is.
//!
//! The helper runs as root with the capabilities to become the owner (`CAP_SETUID`, `CAP_SETGID`), to
//! give CRIU its capabilities (`CAP_CHECKPOINT_RESTORE`, `CAP_SETPCAP`), to take CRIU's files
//! (`CAP_CHOWN`, `CAP_FOWNER`, `CAP_DAC_OVERRIDE`), and to read and stop the program
//! (`CAP_SYS_PTRACE`, `CAP_KILL`).

mod claims;
mod criu;
mod files;
mod needs;
mod process;
mod record;
mod rights;
mod scope;
mod sending;
mod shared;
mod store;
mod worker;

use clap::Parser;
use criu::Job;
use needs::{Needs, REAPED, System};
use nvshare_hibernate::{IDLE, Image, MAX_PACKET, Reply, Request, decode, encode};
use process::{Identity, Tree, gone, unreadable};
use record::Stage;
use rights::Credentials;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, UCred, recvmsg, send},
};
use scope::{PATIENCE, Scope};
use std::{
    ffi::CString,
    fmt,
    io::{IoSliceMut, stdin},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Instant,
};
use store::{Entry, Manifest, Store};
use worker::{Limit, TIMEOUT, Unfit};

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
    /// Carry out the task on standard input
    #[arg(long, hide = true)]
    worker: bool,
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
    if arguments.worker {
        return if worker::work().is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
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
    let mut prepared = None;
    while let Some((request, pidfd)) = receive(socket) {
        let reply = match &store {
            Ok(store) => {
                let helper = Helper { store, socket, deadline: Instant::now() + TIMEOUT };
                let reply = helper.perform(request, pidfd, &mut prepared);
                reply.unwrap_or_else(|Refusal(why)| Reply::Refused(why))
            }
            Err(Refusal(why)) => Reply::Refused(why.clone()),
        };
        if send(socket, &encode(&reply), SendFlags::NOSIGNAL).is_err() {
            break;
        }
    }
    if let Some(Prepared { entry, .. }) = prepared {
        let _ = entry.delete(); // otherwise, the next helper deletes it
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
    Some((decode(packet.get(..received.bytes)?)?, pidfd))
}

/// Returns true if the scheduler no longer waits for an answer.
fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(&socket, PollFlags::RDHUP)], Some(&Timespec::default())) != Ok(0)
}

/// A program that can be saved, and its image, which is still empty.
struct Prepared {
    program: String,
    process: Identity,
    entry: Entry,
    scope: Scope,
    /// The estimated size of the image, in bytes.
    expected: u64,
    /// The kind of each GPU that the program has used.
    gpus: Vec<String>,
    /// The restore closes the program's network connections.
    closes_connections: bool,
}

/// The work for one request.
struct Helper<'a> {
    store: &'a Store,
    socket: BorrowedFd<'a>,
    deadline: Instant,
}

impl Helper<'_> {
    fn perform(
        &self,
        request: Request,
        pidfd: Option<OwnedFd>,
        prepared: &mut Option<Prepared>,
    ) -> Result<Reply, Refusal> {
        let store = self.store;
        match request {
            Request::Check { uid, clients, gpus, closes_connections } => {
                let root = pidfd.as_ref().and_then(process::of_pidfd).ok_or_else(gone)?;
                *prepared = Some(self.check(root, uid, &clients, gpus, closes_connections)?);
                Ok(Reply::Done)
            }
            Request::Save => {
                let prepared = prepared.take().ok_or_else(|| Refusal::new("it was not checked"))?;
                self.save(&prepared).map(|image| Reply::Saved { image })
            }
            Request::Restore { uid, image, gpus } => {
                let Some(entry) = store.lock(&image)? else { return Ok(Reply::Busy) };
                self.restore(&entry, uid, &gpus)
            }
            Request::Compare { uid, image, gpus } => {
                let Some(entry) = store.lock(&image)? else { return Ok(Reply::Busy) };
                entry.check_restorable()?;
                Ok(Reply::Lacks(self.compare(&store.verify(&entry, uid)?, &gpus)?))
            }
            Request::Send { uid, image, host } => {
                let Some(entry) = store.lock(&image)? else { return Ok(Reply::Busy) };
                store.owned(&entry, uid)?;
                entry.send(uid, host)
            }
            Request::Claim { uid, image } => {
                let Some(entry) = store.lock(&image)? else { return Ok(Reply::Busy) };
                store.owned(&entry, uid)?;
                entry.claim(uid)
            }
            Request::List { uid, skip } => store.list(uid, skip).map(Reply::Images),
            Request::Find { image } => Ok(Reply::Images(store.find(&image).into_iter().collect())),
            Request::Delete { uid, image } => {
                let Some(entry) = store.lock(&image)? else { return Ok(Reply::Busy) };
                store.delete(&entry, uid)
            }
            Request::Settle => Ok(if store.settle() { Reply::Done } else { Reply::Busy }),
        }
    }

    /// Checks that a program can be saved, and prepares its image. Does not change the program.
    fn check(
        &self,
        root: i32,
        uid: u32,
        clients: &[i32],
        gpus: Vec<String>,
        closes_connections: bool,
    ) -> Result<Prepared, Refusal> {
        let process = Identity::of(root).map_err(unreadable)?.ok_or_else(gone)?;
        let tree = Tree::of(&process).map_err(unreadable)?.ok_or_else(gone)?;
        if let Some(pid) = tree.pids().iter().skip(1).find(|pid| clients.contains(pid)) {
            let process = process::describe(*pid);
            return Err(Refusal::new(format!(
                "{process}, which it has started, has just begun to use a GPU. Try again"
            )));
        }
        criu::check()?;
        let rights = tree.check(uid, closes_connections)?;
        // Otherwise, the image could not be restored.
        check_groups(&rights.owner)?;
        tree.check_running()?;
        self.check_files(&tree, &rights)?;
        let expected = tree.memory();
        self.store.check_room(uid, expected)?;
        let program = process::name(root);
        let (entry, scope) = self.store.create(&program, &process, &rights, expected)?;
        Ok(Prepared { program, process, entry, scope, expected, gpus, closes_connections })
    }

    /// Why the request is not worth any work.
    fn cancelled(&self) -> Option<String> {
        has_hung_up(self.socket).then(|| "it was cancelled".to_owned())
    }

    /// Checks that the owner may open the files of a program, and writes their data to the disk.
    fn check_files(&self, tree: &Tree, rights: &rights::Rights) -> Result<(), Refusal> {
        let limit = Limit { deadline: self.deadline, obstacle: &|| self.cancelled() };
        // A restore opens mapped files too.
        let mapped = files::mappings(tree).into_iter().map(|(path, _)| (path.into(), false));
        let files = tree.files().into_iter().chain(mapped).collect();
        let why = match worker::first_unfit(rights, files, limit)? {
            None => return Ok(()),
            Some(Unfit::Closed(path)) => format!("has {path:?} open or mapped, which its user may not open"),
            Some(Unfit::HalfOpen(path, is_written)) => {
                let others = shared::describe_others(Path::new(&path), is_written, &tree.pids());
                format!("shares the FIFO {path:?} with {others}, which would not be saved")
            }
        };
        Err(Refusal::new(format!("it {why}. {}", process::START)))
    }

    /// Saves a program. The record was written before the program is stopped, and is removed after the
    /// program continues. So a program that a killed helper has left stopped always has a record.
    fn save(&self, prepared: &Prepared) -> Result<Image, Refusal> {
        let Prepared { process, entry, .. } = prepared;
        let failed = |e| Refusal::new(format!("cannot write the record of image {}: {e}", entry.name));
        let uid = process.uid.ok_or_else(gone)?;
        let saved = Tree::stop(process).and_then(|tree| self.save_stopped(prepared, &tree, uid));
        match saved.and_then(|image| {
            entry.record(uid, &Stage::Ending { process: process.clone() }).map_err(failed)?;
            Ok(image)
        }) {
            Ok(image) => {
                // If this fails, the next helper ends the process.
                if let Err(e) = entry.end(uid, process, Instant::now() + PATIENCE) {
                    eprintln!("nvshare-hibernate: {}", failed(e));
                }
                Ok(image)
            }
            Err(why) => {
                // The disk may have either record if the one above could not be synced. So the program only
                // continues when the disk says for sure that the image does not count.
                let (scope, expected) = (prepared.scope.clone(), prepared.expected);
                let stage = Stage::Saving { process: process.clone(), scope, expected };
                let given_up = entry.record(uid, &stage).and_then(|()| entry.give_up(process));
                given_up
                    .map_err(|e| Refusal::new(format!("{why}. It stays stopped until its record is written: {e}")))?;
                Err(why)
            }
        }
    }

    fn job<'b>(&'b self, entry: &'b Entry, scope: &'b Scope, manifest: &'b Manifest, deadline: Instant) -> Job<'b> {
        let Manifest { rights, closes_connections, .. } = manifest;
        Job { store: self.store, entry, scope, rights, closes_connections: *closes_connections, deadline }
    }

    /// Completes the image of a stopped program.
    fn save_stopped(&self, prepared: &Prepared, tree: &Tree, uid: u32) -> Result<Image, Refusal> {
        let Prepared { program, process, entry, scope, gpus, closes_connections, .. } = prepared;
        let closes_connections = *closes_connections;
        // Only now can the program not change any more.
        let rights = tree.check(uid, closes_connections)?;
        self.check_files(tree, &rights)?;
        let cancelled = || self.cancelled();
        let limit = Limit { deadline: self.deadline, obstacle: &cancelled };
        let needs = Needs::of(tree, &rights, gpus.clone(), limit)?;
        let mut manifest = Manifest::new(program, rights, process, tree, needs);
        manifest.closes_connections = closes_connections;
        let job = self.job(entry, scope, &manifest, self.deadline);
        job.dump(process.pid, &cancelled)?;
        let image = self.store.complete(entry, &manifest, &|| self.cancelled().is_some())?;
        cancelled().map_or(Ok(image), |why| Err(Refusal(why)))
    }

    /// Lists everything that this host lacks for a restore of a checked image, each with the remedy.
    ///
    /// # Errors
    /// The files of the program cannot be examined.
    fn compare(&self, manifest: &Manifest, gpus: &[String]) -> Result<Vec<String>, Refusal> {
        let owner = &manifest.rights.owner;
        let user = needs::user_name(owner.uid);
        let mut lacks: Vec<String> = criu::check().err().map(|Refusal(why)| why).into_iter().collect();
        lacks.extend(needs::missing_control_groups());
        lacks.extend(manifest.needs.missing(&System::present(), gpus, user.as_deref()));
        lacks.extend(needs::taken(&manifest.threads, REAPED));
        match check_groups(owner) {
            // Only a user that exists here can have files.
            Err(Refusal(why)) => lacks.push(why),
            Ok(()) => {
                // Reading an image of any size does not count.
                let limit = Limit { deadline: Instant::now() + TIMEOUT, obstacle: &|| self.cancelled() };
                lacks.extend(files::compare(&manifest.rights, &manifest.needs.files, limit)?);
            }
        }
        Ok(lacks)
    }

    fn restore(&self, entry: &Entry, uid: u32, gpus: &[String]) -> Result<Reply, Refusal> {
        let image = &entry.name;
        let words = |e: std::io::Error| Refusal::new(format!("cannot restore image {image}: {e}"));
        entry.check_restorable()?;
        let manifest = self.store.verify(entry, uid)?;
        let lacks = self.compare(&manifest, gpus)?;
        if !lacks.is_empty() {
            return Err(Refusal::new(lacks.join("\n")));
        }
        let scope = Scope::new(image, uid).map_err(words)?;
        entry.record(uid, &Stage::Restoring { scope: scope.clone() }).map_err(words)?;
        // An image of any size must be restorable, so reading it above does not count.
        let deadline = Instant::now() + TIMEOUT;
        let job = self.job(entry, &scope, &manifest, deadline);
        let begun = job.restore().and_then(|()| begin(&job, &manifest));
        let process = match begun {
            Ok(process) => process,
            Err(why) => {
                entry.end_restore(uid, &scope, Instant::now() + PATIENCE).map_err(words)?;
                return Err(why);
            }
        };
        // If this fails, the next helper lets the program continue.
        if let Err(e) = entry.go_on(uid, process, &scope) {
            eprintln!("nvshare-hibernate: cannot continue the program of image {image}: {e}");
        }
        Ok(Reply::Restored { pid: manifest.root })
    }
}

/// Checks a restored program, and records that **from now on, the program is the process**. The program is
/// frozen, so that it cannot change, whatever signals its owner sends.
fn begin(job: &Job<'_>, manifest: &Manifest) -> Result<Identity, Refusal> {
    let words = |e: std::io::Error| Refusal::new(format!("cannot check the restored program: {e}"));
    job.scope.freeze().map_err(words)?;
    let pids = job.scope.pids().map_err(words)?;
    // Also the processes outside of the tree.
    manifest.rights.check(Path::new("/proc"), &pids).map_err(|why| {
        Refusal::new(format!("a restored program must have no more rights than when it was saved, but {why}"))
    })?;
    let process = Identity::of(manifest.root).map_err(words)?.filter(|process| pids.contains(&process.pid));
    let process = process.ok_or_else(|| Refusal::new("the program ended while it was restored"))?;
    let uid = manifest.rights.owner.uid;
    let stage = Stage::Continuing { process: process.clone(), scope: job.scope.clone() };
    job.entry.record(uid, &stage).map_err(words)?;
    Ok(process)
}

/// Checks that the owner has the user and the groups that the program has.
///
/// # Errors
/// The user is gone, or is not in one of the groups.
fn check_groups(owner: &Credentials) -> Result<(), Refusal> {
    let now = groups_of(owner.uid).ok_or_else(|| Refusal::new(format!("there is no user {} any more", owner.uid)))?;
    match owner.groups.iter().chain([&owner.gid]).find(|group| !now.contains(group)) {
        Some(group) => Err(Refusal::new(format!("its user is not a member of group {group}"))),
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
