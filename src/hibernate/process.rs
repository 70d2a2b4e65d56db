//! A tree of processes: whether it can be saved, and stopping it.

use crate::{
    Refusal,
    rights::{Credentials, Rights, Status, login, tasks},
    scope, shared,
};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::MetadataExt,
    },
    path::{Path, PathBuf},
    thread::sleep,
    time::{Duration, Instant},
};

/// The attempts to stop a tree whose processes start others at the same time.
const ATTEMPTS: usize = 50;
/// Maximum time until a process has stopped, unless it waits for a disk or a driver.
const STOP: Duration = Duration::from_secs(5);
/// Interval of the checks.
const LOOK: Duration = Duration::from_millis(2);
/// Namespaces that a program must share with the helper, because CRIU without privileges cannot save or
/// restore namespaces.
const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];

/// The remedy for a program that shares something with the programs around it.
pub const START: &str = "Start it with: nvsharectl run --portable=LOG -- COMMAND";

/// Identifies a process of a user, also after the process has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub pid: i32,
    /// The user, if all user IDs of the process are equal.
    pub uid: Option<u32>,
    /// Start time in clock ticks since boot.
    pub started: u64,
    pub boot: String,
}

/// The kernel's ID of the present boot.
pub fn boot() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

/// Tells a process that has ended (`None`) from one that cannot be read, for example because the system has
/// no file descriptors left. What is decided for a process that has ended would destroy a living one.
fn unless_ended<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(found) => Ok(Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ESRCH) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Why nothing can be said about a process.
pub fn unreadable(e: io::Error) -> Refusal {
    Refusal::new(format!("cannot read the state of its processes: {e}"))
}

pub fn gone() -> Refusal {
    Refusal::new("the program has ended")
}

/// The fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy)]
struct Stat {
    state: char,
    parent: i32,
    group: i32,
    session: i32,
    terminal: i32,
    started: u64,
}

impl Stat {
    fn of(pid: i32) -> io::Result<Option<Self>> {
        Self::read(&directory(pid))
    }

    /// Reads the file of a process or thread. `directory`: its directory in `/proc`. `None`: it has ended.
    fn read(directory: &Path) -> io::Result<Option<Self>> {
        let Some(text) = unless_ended(fs::read_to_string(directory.join("stat")))? else { return Ok(None) };
        Ok(Some(Self::parse(&text).ok_or(io::ErrorKind::InvalidData)?))
    }

    fn parse(text: &str) -> Option<Self> {
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |at: usize| fields.get(at - 3)?.parse::<i64>().ok();
        Some(Self {
            state: fields.first()?.chars().next()?,
            parent: number(4)? as i32,
            group: number(5)? as i32,
            session: number(6)? as i32,
            terminal: number(7)? as i32,
            started: number(22)? as u64,
        })
    }
}

impl Identity {
    /// Returns the identity of a process. `None`: it has ended.
    ///
    /// # Errors
    /// The process cannot be read.
    pub fn of(pid: i32) -> io::Result<Option<Self>> {
        let Some(status) = unless_ended(Status::read(&directory(pid)))? else { return Ok(None) };
        let Some(Stat { started, .. }) = Stat::of(pid)? else { return Ok(None) };
        let uid = status.credentials().map(|credentials| credentials.uid);
        Ok(Some(Self { pid, uid, started, boot: boot()? }))
    }

    /// # Errors
    /// The process cannot be read.
    pub fn lives(&self) -> io::Result<bool> {
        Ok(Self::of(self.pid)?.as_ref() == Some(self))
    }
}

#[derive(Debug)]
struct Member {
    identity: Identity,
    pidfd: OwnedFd,
}

impl Member {
    /// Opens a process. The process had this identity after it was opened and still lived, so the pidfd is
    /// that of this process. `None`: it has ended.
    fn open(pid: i32) -> io::Result<Option<Self>> {
        let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
        let opened = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
        let Some(pidfd) = unless_ended(opened)? else { return Ok(None) };
        let Some(identity) = Identity::of(pid.as_raw_nonzero().get())? else { return Ok(None) };
        Ok(is_alive(&pidfd).then_some(Self { identity, pidfd }))
    }
}

impl Member {
    /// Waits until all threads have stopped or ended, if this is a process of the user. Returns `false` if
    /// they do not.
    fn stops(&self, uid: Option<u32>) -> bool {
        let until = Instant::now() + STOP;
        let has_stopped = |task: PathBuf| {
            Stat::read(&task).is_ok_and(|stat| stat.is_none_or(|stat| matches!(stat.state, 'T' | 't' | 'Z' | 'X')))
        };
        let all_have_stopped = || {
            unless_ended(tasks(&directory(self.identity.pid)))
                .is_ok_and(|tasks| tasks.into_iter().flatten().all(has_stopped))
        };
        while self.identity.uid == uid && !all_have_stopped() {
            if Instant::now() > until {
                return false;
            }
            sleep(LOOK);
        }
        true
    }
}

/// A process and all its descendants.
#[derive(Debug)]
pub struct Tree {
    members: Vec<Member>,
}

/// Returns the process of a pidfd, if it lives.
pub fn of_pidfd(pidfd: &OwnedFd) -> Option<i32> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok().filter(|pid| *pid > 0)?;
    let is_process = Status::read(&directory(pid)).ok()?.number("Tgid") == Some(pid as u64);
    (is_process && is_alive(pidfd)).then_some(pid)
}

/// The directory of a process in `/proc`.
fn directory(pid: i32) -> PathBuf {
    PathBuf::from(format!("/proc/{pid}"))
}

fn is_alive(pidfd: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Timespec::default())) == Ok(0)
}

/// Returns the descendants of a process, and the process itself first.
fn tree(root: i32) -> io::Result<Vec<i32>> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for pid in pids()? {
        if let Some(stat) = Stat::of(pid)? {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied() {
        found.extend(children.remove(&pid).unwrap_or_default());
        at += 1;
    }
    Ok(found)
}

impl Tree {
    /// Returns the tree below a process, or `None` if the process has ended.
    ///
    /// # Errors
    /// A process cannot be read.
    pub fn of(root: &Identity) -> io::Result<Option<Self>> {
        let tree = Self::of_all(&tree(root.pid)?)?;
        Ok(tree.members.first().is_some_and(|member| member.identity == *root).then_some(tree))
    }

    /// Returns those of these processes that have not ended.
    ///
    /// # Errors
    /// A process cannot be read.
    pub fn of_all(pids: &[i32]) -> io::Result<Self> {
        let members: io::Result<Vec<_>> = pids.iter().filter_map(|pid| Member::open(*pid).transpose()).collect();
        Ok(Self { members: members? })
    }

    pub fn pids(&self) -> Vec<i32> {
        self.members.iter().map(|member| member.identity.pid).collect()
    }

    /// Returns the IDs of all threads, the root first.
    pub fn threads(&self) -> Vec<i32> {
        let threads = |pid: &i32| {
            let tasks = tasks(&directory(*pid)).into_iter().flatten();
            let mut threads: Vec<i32> = tasks
                .filter_map(|task| task.file_name()?.to_str()?.parse().ok())
                .filter(|thread| thread != pid)
                .collect();
            threads.insert(0, *pid);
            threads
        };
        self.pids().iter().flat_map(threads).collect()
    }

    /// The memory of all processes that CRIU saves, in bytes: the private memory of each process, and each
    /// piece of shared memory once. Unlinked files elsewhere and pipes are not counted, because a file system
    /// of the owner may never answer.
    pub fn memory(&self) -> u64 {
        let shared: BTreeMap<(u64, u64), u64> = self.pids().into_iter().flat_map(shared_memory).collect();
        let private: u64 = self.pids().into_iter().map(private_memory).sum();
        private + shared.values().sum::<u64>()
    }

    /// Sends a signal to the processes of the root's user. The helper may signal all processes, but the
    /// owner of a program may not.
    fn signal(&self, uid: Option<u32>, signal: Signal) {
        let is_meant = |member: &&Member| uid.is_some() && member.identity.uid == uid;
        for member in self.members.iter().filter(is_meant) {
            let _ = pidfd_send_signal(&member.pidfd, signal); // fails if the process has ended
        }
    }

    /// Stops all processes of the tree below a process, and waits until all their threads have stopped.
    ///
    /// # Errors
    /// The process has ended, its processes start others faster than they are stopped, or one does not
    /// stop. The processes then continue.
    pub fn stop(root: &Identity) -> Result<Self, Refusal> {
        let mut stopped = Self::of(root).map_err(unreadable)?.ok_or_else(gone)?;
        for _ in 0..ATTEMPTS {
            stopped.signal(root.uid, Signal::STOP);
            // Until then, a thread may start a process that the list lacks.
            if let Some(member) = stopped.members.iter().find(|member| !member.stops(root.uid)) {
                stopped.resume(root.uid);
                let pid = member.identity.pid;
                return Err(Refusal::new(format!("{} does not stop", describe(pid))));
            }
            let now = match Self::of(root) {
                Ok(now) => now.ok_or_else(gone)?,
                Err(e) => {
                    stopped.resume(root.uid);
                    return Err(unreadable(e));
                }
            };
            if now.pids() == stopped.pids() {
                return Ok(stopped);
            }
            stopped = now;
        }
        stopped.resume(root.uid);
        Err(Refusal::new("its processes start others without end"))
    }

    pub fn resume(&self, uid: Option<u32>) {
        self.signal(uid, Signal::CONT);
    }

    /// Ends all processes of a user, and waits until they have ended.
    ///
    /// # Errors
    /// A process has not ended at this time.
    pub fn kill(&self, uid: Option<u32>, until: Instant) -> io::Result<()> {
        self.signal(uid, Signal::KILL);
        for member in self.members.iter().filter(|member| uid.is_some() && member.identity.uid == uid) {
            let left = until.saturating_duration_since(Instant::now());
            let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            if poll(&mut [PollFd::new(&member.pidfd, PollFlags::IN)], Some(&limit))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Checks whether CRIU can save the tree as a program of this user, and restore it. Returns its rights.
    /// `closes`: the restore closes network connections.
    ///
    /// # Errors
    /// The reason why not, with the remedy.
    pub fn check(&self, uid: u32, closes: bool) -> Result<Rights, Refusal> {
        if uid == 0 {
            return Err(Refusal::new("it runs as root. Start it as another user"));
        }
        let root = self.members.first().ok_or_else(gone)?.identity.pid;
        let owner = credentials(root).ok_or_else(gone)?;
        let member = Kin { owner, login: login(&directory(root)), members: self.pids().into_iter().collect() };
        for pid in &member.members {
            let refuse = |why: String| Refusal::new(format!("{} {why}", describe(*pid)));
            member.check(*pid, uid).and_then(|()| check_files(*pid, closes)).map_err(refuse)?;
        }
        shared::check(&member.members).map_err(|(pid, why)| Refusal::new(format!("{} {why}", describe(pid))))?;
        let directories: Vec<PathBuf> = self.pids().into_iter().map(directory).collect();
        Rights::of(member.owner, member.login, &directories).map_err(|_| gone())
    }

    /// Checks that no process is stopped. A dump that fails would continue the process.
    ///
    /// # Errors
    /// The process that is stopped.
    pub fn check_running(&self) -> Result<(), Refusal> {
        let is_stopped = |pid: &i32| !matches!(Stat::of(*pid), Ok(stat) if stat.is_none_or(|stat| stat.state != 'T'));
        match self.pids().into_iter().find(is_stopped) {
            Some(pid) => Err(Refusal::new(format!("{} is stopped. Continue it first", describe(pid)))),
            None => Ok(()),
        }
    }

    /// Returns the files that the processes have open by a name, and whether each is open for writing. A file
    /// that is open for reading and writing is returned for each. Does not touch the files, because a file
    /// system of the owner may never answer.
    pub fn files(&self) -> Vec<(PathBuf, bool)> {
        let of = |pid: i32| {
            open_files(pid).flat_map(move |(descriptor, path)| {
                let is_named = path.is_absolute() && !path.to_string_lossy().ends_with(" (deleted)");
                let (reads, writes) = access(pid, &descriptor).filter(|_| is_named).unwrap_or_default();
                let uses = [reads.then(|| (path.clone(), false)), writes.then_some((path, true))];
                uses.into_iter().flatten()
            })
        };
        self.pids().into_iter().flat_map(of).collect()
    }
}

/// What all processes of a tree must have in common.
struct Kin {
    owner: Credentials,
    login: Option<u32>,
    members: BTreeSet<i32>,
}

impl Kin {
    /// Checks that CRIU can save a process of this user, and that a restore gives the process nothing that
    /// it lacks, and takes no restriction from it.
    fn check(&self, pid: i32, uid: u32) -> Result<(), String> {
        let ended = "has ended";
        let place = scope::place(pid).ok_or("is in no control group of version 2, where it would be restored")?;
        check_place(&place, uid)?;
        let is_restored = scope::is_of_restored(&place, uid);
        for task in tasks(&directory(pid)).map_err(|_| ended)? {
            check_task(&task, uid, &self.owner, is_restored)?;
        }
        let stat = Stat::of(pid).ok().flatten().ok_or(ended)?;
        if stat.state == 't' {
            return Err("is being debugged. Detach the debugger".into());
        }
        if login(&directory(pid)) != self.login {
            return Err("belongs to another login".into());
        }
        if let Some(kind) = NAMESPACES.iter().find(|kind| !shares_namespace(pid, kind)) {
            return Err(format!("is in another {kind} namespace, such as a container's or a unit's"));
        }
        if label(&pid.to_string()) != label("self") {
            return Err("is confined by a security module, which cannot be saved".into());
        }
        if stat.terminal != 0 {
            return Err("has a terminal. Start it with: nvsharectl run --portable -- COMMAND".into());
        }
        if !self.members.contains(&stat.session) || !self.members.contains(&stat.group) {
            let why = "belongs to a session of another program. Start it with: nvsharectl run --portable -- COMMAND";
            return Err(why.into());
        }
        Ok(())
    }
}

/// Checks a thread. CRIU restores the restrictions of the thread group's leader only.
fn check_task(task: &Path, uid: u32, owner: &Credentials, is_restored: bool) -> Result<(), String> {
    let status = Status::read(task).map_err(|_| "has ended")?;
    let own = status.credentials().ok_or("runs under several users or groups")?;
    if own.uid != uid || own != *owner {
        return Err("has another user or group".into());
    }
    if status.has_capabilities() {
        return Err("has capabilities. Start it without privileges".into());
    }
    if status.is_filtered() {
        let why = "has a filter of system calls (seccomp), which cannot be saved. Start it without the filter";
        return Err(why.into());
    }
    // Landlock cannot be seen from outside, and cannot be saved. Users cannot use it without this flag.
    if status.has_no_new_privileges() && !is_restored {
        let why = "may restrict itself (NoNewPrivs, as sandboxes set it), which cannot be saved. Start it without";
        return Err(format!("{why} the sandbox"));
    }
    if status.number("TracerPid").is_some_and(|tracer| tracer != 0) {
        return Err("is being debugged. Detach the debugger".into());
    }
    Ok(())
}

/// Checks that a process belongs to its user's slice, because it is restored there. Limits of other
/// control groups, such as those of a service or of a batch system, would be lost; and a service may be
/// started again.
fn check_place(place: &str, uid: u32) -> Result<(), String> {
    let Some(rest) = place.strip_prefix(&format!("/user.slice/user-{uid}.slice/")) else {
        return Err(format!(
            "is outside of the slice of its user, in control group {place:?}. Start it from a login of the user"
        ));
    };
    let mut units = rest.split('/').filter(|unit| *unit != format!("user@{uid}.service"));
    match units.find(|unit| unit.ends_with(".service")) {
        Some(unit) => {
            let remedy = "Start it with: systemd-run --user --scope nvsharectl run --portable -- COMMAND";
            Err(format!("is of the service {unit:?}, which systemd may start again. {remedy}"))
        }
        None => Ok(()),
    }
}

/// Returns the label that a security module has given to a process.
fn label(pid: &str) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/attr/current")).ok()
}

/// Returns the credentials of a process whose user IDs are equal, and whose group IDs are equal.
fn credentials(pid: i32) -> Option<Credentials> {
    Status::read(&directory(pid)).ok()?.credentials()
}

/// Returns all processes.
pub fn pids() -> io::Result<impl Iterator<Item = i32>> {
    let entries: io::Result<Vec<_>> = fs::read_dir("/proc")?.collect();
    Ok(entries?.into_iter().filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// The private memory of a process in bytes, without unchanged pages of files.
fn private_memory(pid: i32) -> u64 {
    let status = Status::read(&directory(pid));
    status.map_or(0, |status| ["RssAnon", "VmSwap"].iter().filter_map(|name| status.bytes(name)).sum())
}

/// The shared memory that a process has mapped or open: the device and the inode, and the size in bytes.
fn shared_memory(pid: i32) -> impl Iterator<Item = ((u64, u64), u64)> {
    let maps = fs::read_to_string(directory(pid).join("maps")).unwrap_or_default();
    let mapped: Vec<PathBuf> = maps.lines().filter_map(|line| shared_mapping(pid, line)).collect();
    let open = open_files(pid).filter(|(_, path)| is_saved_memory(&path.to_string_lossy()));
    let open = open.map(move |(descriptor, _)| directory(pid).join("fd").join(descriptor));
    let size = |path: PathBuf| {
        let metadata = fs::metadata(path).ok()?;
        Some(((metadata.dev(), metadata.ino()), metadata.blocks() * 512))
    };
    mapped.into_iter().chain(open).filter_map(size)
}

/// Returns the file of a mapping in `/proc`, from its line in `maps`, if the mapping is shared memory.
fn shared_mapping(pid: i32, line: &str) -> Option<PathBuf> {
    let mut fields = line.splitn(6, ' ');
    let (range, access) = (fields.next()?, fields.next()?);
    let path = fields.nth(3)?.trim_start();
    let range: Vec<&str> = range.split('-').map(|address| address.trim_start_matches('0')).collect();
    let is_shared = access.ends_with('s') && is_saved_memory(path);
    is_shared.then(|| directory(pid).join("map_files").join(range.join("-")))
}

/// Returns true if this is the path of shared memory that no file system has a name for, so that CRIU saves
/// its contents. The kernel's own file systems always answer.
fn is_saved_memory(path: &str) -> bool {
    path.starts_with("/memfd:")
        || ((path.starts_with("/dev/zero") || path.starts_with("/SYSV") || path.starts_with("/dev/shm/"))
            && path.ends_with(" (deleted)"))
}

/// The name of a process, with no characters but letters, digits, `.`, `_` and `-`.
pub fn name(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    name.trim().chars().map(allowed).collect()
}

/// Names a process in a sentence.
pub fn describe(pid: i32) -> String {
    format!("process {pid} ({})", name(pid))
}

fn shares_namespace(pid: i32, kind: &str) -> bool {
    let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let own = link("self");
    own.is_some() && link(&pid.to_string()) == own
}

/// Returns the parent of a process, unless the process has ended.
pub fn parent(pid: i32) -> Option<i32> {
    Some(Stat::of(pid).ok()??.parent)
}

/// True if a process has ended, and its parent has not reaped it.
pub fn has_ended(pid: i32) -> bool {
    let is_zombie = matches!(Stat::of(pid), Ok(Some(stat)) if stat.state == 'Z');
    // The first thread may have ended before the others.
    is_zombie && tasks(&directory(pid)).is_ok_and(|tasks| tasks.len() == 1)
}

/// Returns the descriptors of a process, and the paths or descriptions of their files.
pub fn open_files(pid: i32) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, fs::read_link(entry.path()).ok()?)))
}

/// Returns a field of a descriptor. `name`: with its colon.
pub fn descriptor_field(pid: i32, descriptor: &str, name: &str) -> Option<String> {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
    Some(info.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
}

/// Returns whether a descriptor is open for reading, and for writing.
pub fn access(pid: i32, descriptor: &str) -> Option<(bool, bool)> {
    let flags = i32::from_str_radix(&descriptor_field(pid, descriptor, "flags:")?, 8).ok()?;
    let mode = flags & libc::O_ACCMODE;
    Some((mode != libc::O_WRONLY, mode != libc::O_RDONLY))
}

/// Checks for open files and sockets that prevent a dump. CRIU finds the other ones, and the program
/// then continues. `closes`: the restore closes network connections.
fn check_files(pid: i32, closes: bool) -> Result<(), String> {
    let connected = if closes { BTreeSet::new() } else { tcp_connections(pid) };
    for (descriptor, path) in open_files(pid) {
        let text = path.to_string_lossy();
        if is_gpu_device(&path) {
            return Err("is still on a GPU".into());
        }
        let inode = text.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse::<u64>().ok());
        if inode.is_some_and(|inode| connected.contains(&inode)) {
            let remedy = "Close the connection, or hibernate the program with --close-connections";
            return Err(format!("has a network connection (descriptor {descriptor}). {remedy}"));
        }
    }
    Ok(())
}

fn is_gpu_device(path: &Path) -> bool {
    path.parent() == Some(Path::new("/dev"))
        && path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"nvidia"))
}

/// Returns the inodes of TCP sockets that are neither listening nor closed.
fn tcp_connections(pid: i32) -> BTreeSet<u64> {
    let lines = ["tcp", "tcp6"].map(|kind| fs::read_to_string(format!("/proc/{pid}/net/{kind}")).unwrap_or_default());
    let inode = |line: &str| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let is_idle = matches!(*fields.get(3)?, "0A" | "07");
        fields.get(9)?.parse().ok().filter(|_| !is_idle)
    };
    lines.iter().flat_map(|text| text.lines().skip(1)).filter_map(inode).collect()
}

#[cfg(test)]
mod tests;
