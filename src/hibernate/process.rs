//! A tree of processes: who it belongs to, whether it can be saved, and stopping it.

use crate::Refusal;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
};

/// The attempts to stop a tree whose processes start others at the same time.
const ATTEMPTS: usize = 50;
/// Namespaces that a program must share with the helper, because CRIU without privileges cannot save or
/// restore namespaces.
const NAMESPACES: [&str; 7] = ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"];

/// The users and groups of a program. All its user IDs are equal, and so are all its group IDs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Credentials {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

/// Identifies a process, also after the process has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub pid: i32,
    /// Start time in clock ticks since boot.
    pub started: u64,
    pub boot: String,
}

/// The kernel's ID of the present boot.
pub fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// The fields of `/proc/PID/stat`.
#[derive(Debug, Clone, Copy)]
struct Stat {
    parent: i32,
    group: i32,
    session: i32,
    terminal: i32,
    started: u64,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let fields: Vec<&str> = text.rsplit_once(')')?.1.split_whitespace().collect();
        let number = |at: usize| fields.get(at - 3)?.parse::<i64>().ok();
        Some(Self {
            parent: number(4)? as i32,
            group: number(5)? as i32,
            session: number(6)? as i32,
            terminal: number(7)? as i32,
            started: number(22)? as u64,
        })
    }
}

impl Identity {
    pub fn of(pid: i32) -> Option<Self> {
        Some(Self { pid, started: Stat::of(pid)?.started, boot: boot() })
    }

    pub fn lives(&self) -> bool {
        Self::of(self.pid).as_ref() == Some(self)
    }
}

#[derive(Debug)]
struct Member {
    pid: i32,
    pidfd: OwnedFd,
}

/// A process and all its descendants.
#[derive(Debug)]
pub struct Tree {
    root: i32,
    members: Vec<Member>,
}

/// Returns the fields of `/proc/PID/status` that begin with `name`, as numbers of this base.
fn status(pid: i32, name: &str, base: u32) -> Option<Vec<u64>> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = status.lines().find_map(|line| line.strip_prefix(name))?;
    field.split_whitespace().map(|number| u64::from_str_radix(number, base).ok()).collect()
}

/// Returns the process of a pidfd, if it lives.
pub fn of_pidfd(pidfd: &OwnedFd) -> Option<i32> {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pid = info.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok().filter(|pid| *pid > 0)?;
    (status(pid, "Tgid:", 10)? == [pid as u64] && is_alive(pidfd)).then_some(pid)
}

fn is_alive(pidfd: &OwnedFd) -> bool {
    poll(&mut [PollFd::new(pidfd, PollFlags::IN)], Some(&Timespec::default())) == Ok(0)
}

/// Returns the descendants of a process, and the process itself first.
fn tree(root: i32) -> Vec<i32> {
    let mut children: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
    for pid in pids() {
        if let Some(stat) = Stat::of(pid) {
            children.entry(stat.parent).or_default().push(pid);
        }
    }
    let mut found = vec![root];
    let mut at = 0;
    while let Some(pid) = found.get(at).copied() {
        found.extend(children.remove(&pid).unwrap_or_default());
        at += 1;
    }
    found
}

impl Tree {
    /// Returns the tree below a process, or `None` if the process has ended.
    pub fn of(root: i32) -> Option<Self> {
        let open = |pid| Some(Member { pid, pidfd: pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()? });
        let members: Vec<Member> = tree(root).into_iter().filter_map(open).collect();
        let has_root = members.first().is_some_and(|member| member.pid == root && is_alive(&member.pidfd));
        has_root.then_some(Self { root, members })
    }

    pub fn root(&self) -> i32 {
        self.root
    }

    pub fn pids(&self) -> Vec<i32> {
        self.members.iter().map(|member| member.pid).collect()
    }

    /// Returns the IDs of all threads, the root first.
    pub fn threads(&self) -> Vec<i32> {
        let threads = |pid: &i32| {
            let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
            let mut threads: Vec<i32> = tasks
                .filter_map(|task| task.file_name().to_str()?.parse().ok())
                .filter(|thread| thread != pid)
                .collect();
            threads.insert(0, *pid);
            threads
        };
        self.pids().iter().flat_map(threads).collect()
    }

    /// The memory of all processes in bytes.
    pub fn memory(&self) -> u64 {
        self.pids().into_iter().map(memory).sum()
    }

    fn signal(&self, signal: Signal) {
        for member in &self.members {
            let _ = pidfd_send_signal(&member.pidfd, signal); // fails if the process has ended
        }
    }

    /// Stops all processes of the tree below a process.
    ///
    /// # Errors
    /// The process has ended, or its processes start others faster than they are stopped. The processes
    /// then continue.
    pub fn stop(root: i32) -> Result<Self, Refusal> {
        let gone = || Refusal::new("the program has ended");
        let mut stopped = Self::of(root).ok_or_else(gone)?;
        for _ in 0..ATTEMPTS {
            stopped.signal(Signal::STOP);
            let now = Self::of(root).ok_or_else(gone)?;
            if now.pids() == stopped.pids() {
                return Ok(stopped);
            }
            stopped = now;
        }
        stopped.resume();
        Err(Refusal::new("its processes start others without end"))
    }

    pub fn resume(&self) {
        self.signal(Signal::CONT);
    }

    /// Ends all processes, and waits until they have ended.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        for member in &self.members {
            let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
            let _ = poll(&mut [PollFd::new(&member.pidfd, PollFlags::IN)], Some(&limit));
        }
    }

    /// Checks whether CRIU can save the tree as a program of this user, and restore it.
    ///
    /// # Errors
    /// The reason why not, with the remedy.
    pub fn check(&self, uid: u32) -> Result<Credentials, Refusal> {
        if uid == 0 {
            return Err(Refusal::new("it runs as root. Start it as another user"));
        }
        let gone = || Refusal::new("the program has ended");
        let root = credentials(self.root).ok_or_else(gone)?;
        let members: BTreeSet<i32> = self.pids().into_iter().collect();
        for pid in &members {
            let name = name(*pid);
            let refuse = |why: &str| Err(Refusal::new(format!("process {pid} ({name}) {why}")));
            let Some(own) = credentials(*pid) else { return refuse("runs under several users or groups") };
            let Some(stat) = Stat::of(*pid) else { return Err(gone()) };
            if own.uid != uid || own != root {
                return refuse("has another user or group");
            }
            let capabilities = ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"];
            if capabilities.iter().any(|set| status(*pid, set, 16) != Some(vec![0])) {
                return refuse("has capabilities. Start it without privileges");
            }
            if status(*pid, "Seccomp:", 10).is_some_and(|mode| mode != [0]) {
                return refuse(
                    "has a filter of system calls (seccomp), which cannot be saved. Start it without the filter",
                );
            }
            if status(*pid, "TracerPid:", 10).is_some_and(|tracer| tracer != [0]) {
                return refuse("is being debugged. Detach the debugger");
            }
            if let Some(kind) = NAMESPACES.iter().find(|kind| !shares_namespace(*pid, kind)) {
                return refuse(&format!("is in another {kind} namespace, such as a container's or a unit's"));
            }
            if stat.terminal != 0 {
                return refuse("has a terminal. Start it with: nvsharectl run --portable -- COMMAND");
            }
            if !members.contains(&stat.session) || !members.contains(&stat.group) {
                return refuse(
                    "belongs to a session of another program. Start it with: nvsharectl run --portable -- COMMAND",
                );
            }
            check_files(*pid).map_err(|why| Refusal::new(format!("process {pid} ({name}) {why}")))?;
        }
        Ok(root)
    }

    /// Returns the regular files that the processes have open, and whether each is open for writing.
    pub fn files(&self) -> Vec<(PathBuf, bool)> {
        let of = |pid: i32| {
            open_files(pid).filter_map(move |(descriptor, path)| {
                let is_regular = fs::metadata(format!("/proc/{pid}/fd/{descriptor}")).ok()?.is_file();
                let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).ok()?;
                let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?.trim();
                let is_written = u32::from_str_radix(flags, 8).ok()? & libc::O_ACCMODE as u32 != 0;
                let is_named = path.is_absolute() && !path.to_string_lossy().ends_with(" (deleted)");
                (is_regular && is_named).then_some((path, is_written))
            })
        };
        self.pids().into_iter().flat_map(of).collect()
    }
}

/// Returns the credentials of a process whose user IDs are equal, and whose group IDs are equal.
fn credentials(pid: i32) -> Option<Credentials> {
    let same = |name: &str| {
        let ids = status(pid, name, 10)?;
        let first = *ids.first()?;
        ids.iter().all(|id| *id == first).then_some(first as u32)
    };
    let groups = status(pid, "Groups:", 10)?.into_iter().map(|group| group as u32).collect();
    Some(Credentials { uid: same("Uid:")?, gid: same("Gid:")?, groups })
}

/// The user of a process, if all its user IDs are equal.
pub fn owner(pid: i32) -> Option<u32> {
    credentials(pid).map(|credentials| credentials.uid)
}

/// Ends all processes for which `is_meant` returns true, and waits until they have ended.
pub fn kill_all(is_meant: impl Fn(i32) -> bool) {
    let open = |pid| Some(Member { pid, pidfd: pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()? });
    // Checked while the pidfd is open, so that the PID belongs to the process that is ended.
    let members = pids().filter_map(open).filter(|member| is_meant(member.pid)).collect();
    Tree { root: 0, members }.kill();
}

/// Whether a process has this file or directory open.
pub fn has_open(pid: i32, path: &Path) -> bool {
    open_files(pid).any(|(_, open)| open == path)
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// The control groups of a process.
pub fn cgroups(pid: i32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()
}

/// The memory of a process in bytes, as far as it is saved.
fn memory(pid: i32) -> u64 {
    let kib = |name: &str| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
        let field = status.lines().find_map(|line| line.strip_prefix(name))?;
        field.split_whitespace().next()?.parse::<u64>().ok()
    };
    ["VmRSS:", "VmSwap:"].iter().filter_map(|name| kib(name)).sum::<u64>() << 10
}

/// The name of a process, with no characters but letters, digits, `.`, `_` and `-`.
pub fn name(pid: i32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '_' || c == '-' { c } else { '_' };
    name.trim().chars().map(allowed).collect()
}

fn shares_namespace(pid: i32, kind: &str) -> bool {
    let link = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).ok();
    let own = link("self");
    own.is_some() && link(&pid.to_string()) == own
}

fn open_files(pid: i32) -> impl Iterator<Item = (String, PathBuf)> {
    let entries = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    entries.filter_map(|entry| Some((entry.file_name().into_string().ok()?, fs::read_link(entry.path()).ok()?)))
}

/// Checks for open files and sockets that prevent a dump. CRIU finds the other ones, and the program
/// then continues.
fn check_files(pid: i32) -> Result<(), String> {
    let connected = tcp_connections(pid);
    for (descriptor, path) in open_files(pid) {
        let text = path.to_string_lossy();
        if is_gpu_device(&path) {
            return Err("is still on a GPU".into());
        }
        let inode = text.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']')?.parse::<u64>().ok());
        if inode.is_some_and(|inode| connected.contains(&inode)) {
            return Err(format!("has a network connection (descriptor {descriptor}). Close the connection"));
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
