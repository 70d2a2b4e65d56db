//! The process at the other end of a connection, as the kernel describes it: user, process, command
//! line, systemd unit and container. The client itself provides only the name and the reason of a lock
//! acquired over D-Bus.
//!
//! The kernel records the process that *connected*. That process may have exited, and its PID may
//! belong to another process. So the daemon uses data from `/proc` only if a pidfd shows, before and
//! after the read, that the process still runs. A process that has exited, or whose `/proc` entry is
//! unreadable, counts as unknown, and gets no privileges.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Duration;

use tracing::warn;

use crate::identity::{self, Cgroup, Identity, Owners, Place, Tenant};
use crate::sys::{clock, credentials};

/// Maximum number of a client's groups that rules consider. A process with the capability
/// `CAP_SETGID`, such as root of a container, can join 65,536 groups. It gains nothing by exceeding
/// the maximum, because it can also leave groups.
const MAX_GROUPS: usize = 1024;

/// The identity of the process at the other end, and its pidfd. The pidfd becomes readable when the
/// process exits.
pub fn identify(socket: BorrowedFd<'_>) -> std::io::Result<(Identity, Option<OwnedFd>)> {
    let credentials = credentials::credentials(socket)?;
    let (pidfd, is_exact) = credentials::pidfd(socket, credentials.pid)?;
    let mut groups = credentials::groups(socket, credentials.gid)?;
    groups.truncate(MAX_GROUPS);
    groups.shrink_to_fit();
    let process = Process { pid: credentials.pid.max(0), uid: credentials.uid, pidfd, is_exact };
    Ok((process.describe(groups), process.pidfd))
}

/// Quick guesses at the tenants of processes that connect. A guess may be wrong if the process has exited
/// or has moved to another control group.
///
/// A guess is kept for a second at most. All programs' connections wait in one queue, and the control
/// group's file takes most of the time that a refused connection costs. So a process that connects in a
/// loop would delay all programs that start.
#[derive(Debug, Default)]
pub struct PresumedTenants {
    known: HashMap<(i32, u32), Tenant>,
    since: Duration,
}

impl PresumedTenants {
    /// How long guesses are kept.
    const LIFETIME: Duration = Duration::from_secs(1);
    /// Maximum number of guesses that are kept.
    const MOST: usize = 1024;

    /// The presumed tenant of the process at the other end.
    pub fn of(&mut self, socket: BorrowedFd<'_>) -> Tenant {
        let Ok(credentials::Credentials { pid, uid, .. }) = credentials::credentials(socket) else {
            return Tenant::default();
        };
        let now = clock::now();
        if now.saturating_sub(self.since) > Self::LIFETIME || self.known.len() >= Self::MOST {
            self.known.clear();
            self.since = now;
        }
        self.known.entry((pid, uid)).or_insert_with(|| presume(pid, uid)).clone()
    }
}

/// The presumed tenant of the process at the other end. See [`PresumedTenants`].
pub fn presumed_tenant(socket: BorrowedFd<'_>) -> Tenant {
    PresumedTenants::default().of(socket)
}

fn presume(pid: i32, uid: u32) -> Tenant {
    let cgroup = std::fs::read(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let cgroup = Cgroup::read(&String::from_utf8_lossy(&cgroup));
    let place = Place { cgroup: &cgroup, on_host: true, own_ids: true, login: None };
    Tenant::of(uid, place, own_cgroup(), Owners { cgroup: &|_| None, ..OWNERS }).0
}

/// A process that connected.
#[derive(Debug)]
pub struct Process {
    /// 0 if the process is not visible in this PID namespace.
    pub pid: i32,
    pub uid: u32,
    /// `None` if the process has exited or is not visible.
    pidfd: Option<OwnedFd>,
    /// The pidfd surely belongs to the process, and not to another process that has reused the PID.
    is_exact: bool,
}

/// The location of a process, relative to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In the daemon's PID namespace.
    Host,
    /// In another PID namespace, for example in a container.
    Elsewhere,
    /// The process has ended.
    Ended,
    /// `/proc` does not show the process, for example because of the mount option `hidepid`.
    Hidden,
}

impl Process {
    /// The process at the other end of a socket.
    ///
    /// # Errors
    /// The daemon has no free file descriptors.
    pub fn of_socket(socket: BorrowedFd<'_>) -> std::io::Result<Self> {
        let credentials::Credentials { pid, uid, .. } = credentials::credentials(socket)?;
        let (pidfd, is_exact) = credentials::pidfd(socket, pid)?;
        Ok(Self { pid: pid.max(0), uid, pidfd, is_exact })
    }

    /// A process with these credentials, as reported by another process. If `pidfd` is missing, uses the
    /// process that now has this PID.
    pub fn named(pid: i32, uid: u32, pidfd: Option<BorrowedFd<'_>>) -> Self {
        let own = pidfd.and_then(|fd| fd.try_clone_to_owned().ok());
        let pidfd = own.or_else(|| credentials::pidfd_of(pid).ok().flatten());
        Self { pid: pid.max(0), uid, pidfd, is_exact: false }
    }

    /// The present location of the process.
    pub fn place(&self) -> Where {
        match self.status() {
            Ok(status) if status.depth == 1 => Where::Host,
            Ok(_) => Where::Elsewhere,
            Err(_) if self.pid == 0 => Where::Elsewhere,
            Err(why) => why,
        }
    }

    fn runs(&self) -> bool {
        self.pid > 0 && self.pidfd.as_ref().is_some_and(|pidfd| !credentials::has_ended(pidfd.as_fd()))
    }

    /// The status of the process, if a pidfd proves that the status belongs to it.
    fn status(&self) -> Result<Status, Where> {
        let exact = self.pidfd.as_ref().filter(|_| self.is_exact);
        let status = match exact.and_then(|pidfd| depth(pidfd.as_fd())) {
            // Does not read `/proc/PID/status`: it lists the process's groups, and for 65,536
            // groups the kernel takes 20 ms.
            Some(depth) if is_visible(self.pid) => Some(Status { uids: vec![self.uid], depth }),
            Some(_) => None,
            None => Status::read(self.pid),
        };
        if !self.runs() {
            return Err(Where::Ended);
        }
        status.ok_or(Where::Hidden)
    }

    /// The identity of the process. `groups`: the process's own groups.
    pub fn describe(&self, groups: Vec<u32>) -> Identity {
        let mut identity = Identity { groups, ..self.describe_user() };
        // A process can give up its owner's groups, but the rules for these groups still apply.
        identity.groups.extend(identity.owner.map(identity::groups).unwrap_or_default());
        identity
    }

    fn describe_user(&self) -> Identity {
        let &Self { pid, uid, .. } = self;
        let user = identity::accountable(uid);
        let owner = (user != uid).then_some(user);
        let unknown = Identity { pid, uid, owner, tenant: Tenant::User(user), ..Identity::default() };
        if pid == 0 {
            return unknown;
        }
        let read = |file: &str| read(pid, file);
        let (name, command, cgroup) = (read("comm"), read("cmdline"), read("cgroup"));
        let own_ids = read("uid_map") == own_ids();
        let login = String::from_utf8_lossy(&read("loginuid")).trim().parse().ok().filter(|uid| *uid != u32::MAX);
        let status = match self.status() {
            // On kernels before 6.5, the pidfd may refer to another process that has reused the PID of the
            // connecting process.
            Ok(status) if status.uids.contains(&uid) => status,
            Ok(_) => return unknown,
            Err(Where::Hidden) => {
                log_hidden();
                return unknown;
            }
            Err(_) => return unknown,
        };
        let mut identity = Identity { name: printable(&name), command: command_line(&command), ..unknown };
        if !cgroup.is_empty() {
            let cgroup = Cgroup::read(&String::from_utf8_lossy(&cgroup));
            place(&mut identity, Place { cgroup: &cgroup, on_host: status.depth == 1, own_ids, login });
        }
        identity
    }
}

/// The first [`MAX_PROC_FILE`] bytes of a file in `/proc/PID`. Empty if the file cannot be read.
fn read(pid: i32, file: &str) -> Vec<u8> {
    let mut text = Vec::new();
    let read =
        File::open(format!("/proc/{pid}/{file}")).and_then(|file| file.take(MAX_PROC_FILE).read_to_end(&mut text));
    read.map_or_else(|_| Vec::new(), |_| text)
}

/// Sets a process's control group, and the tenant and user derived from `place`.
pub fn place(identity: &mut Identity, place: Place<'_>) {
    let Place { cgroup, .. } = place;
    let (tenant, user) = Tenant::of(identity.uid, place, own_cgroup(), OWNERS);
    identity.tenant = tenant;
    identity.owner = (user != identity.uid).then_some(user);
    identity.placed = true;
    identity.unit = cgroup.unit().to_owned();
    identity.slice = cgroup.slice().to_owned();
    identity.container = cgroup.container().to_owned();
    identity.pod.uid = cgroup.of_system().pod.map_or_else(String::new, |(_, uid)| uid);
    identity.cgroup = cgroup.clone();
}

/// The short name of a process. `None` if the process has exited.
pub fn name(pid: i32) -> Option<String> {
    Some(printable(&std::fs::read(format!("/proc/{pid}/comm")).ok()?)).filter(|_| pid > 0)
}

/// Logs once that `/proc` hides processes.
pub fn log_hidden() {
    static LOGGED: OnceLock<()> = OnceLock::new();
    LOGGED.get_or_init(|| {
        warn!(
            name: "processes-hidden",
            "/proc hides processes of other users (mount option hidepid). Rules that name units, slices, containers or \
             pods do not apply to their programs, and settings cannot be changed. See nvshare.service(8)"
        );
    });
}

/// The contents of `/proc/PID/status`.
struct Status {
    /// The real, effective, saved and file system user IDs.
    uids: Vec<u32>,
    /// Depth of the process's PID namespace, relative to the daemon. 1 stands for the daemon's own
    /// namespace.
    depth: usize,
}

impl Status {
    fn read(pid: i32) -> Option<Self> {
        // A process's name may contain any bytes, so invalid UTF-8 is replaced.
        Self::parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/status")).ok()?))
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).map(str::split_whitespace);
        Some(Self {
            uids: field("Uid:")?.filter_map(|uid| uid.parse().ok()).collect(),
            depth: field("NSpid:")?.count(),
        })
    }
}

/// Depth of a process's PID namespace, as in [`Status`]. `None` if the kernel does not report it for a
/// pidfd.
fn depth(pidfd: BorrowedFd<'_>) -> Option<usize> {
    let text = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).ok()?;
    let pids = text.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    Some(pids.split_whitespace().count())
}

/// True if `/proc` shows the process. The mount option `hidepid` can hide it.
fn is_visible(pid: i32) -> bool {
    File::open(format!("/proc/{pid}/stat")).is_ok()
}

/// The daemon's own control group.
fn own_cgroup() -> &'static Cgroup {
    static OWN: OnceLock<Cgroup> = OnceLock::new();
    OWN.get_or_init(|| Cgroup::read(&std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default()))
}

/// The daemon's user ID mapping. `/proc` shows the same mapping for all processes in the same user
/// namespace.
fn own_ids() -> &'static [u8] {
    static OWN: OnceLock<Vec<u8>> = OnceLock::new();
    OWN.get_or_init(|| std::fs::read("/proc/self/uid_map").unwrap_or_default())
}

const OWNERS: Owners<'static> = Owners { cgroup: &owner, uid: &identity::accountable };

/// The owner of a control group. `None` if the group is not visible.
fn owner(path: &str) -> Option<u32> {
    let roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/systemd", "/sys/fs/cgroup/unified"];
    let relative = path.trim_start_matches('/');
    roots.iter().find_map(|root| std::fs::metadata(Path::new(root).join(relative)).ok()).map(|found| found.uid())
}

/// True if the process is stopped, by a signal or a debugger. False if it has exited.
pub fn is_stopped(pid: i32) -> bool {
    matches!(stat(pid, 3).as_deref(), Some("T" | "t"))
}

/// The start time of a process, from `/proc/PID/stat`. No two processes have both the same PID and the
/// same start time.
pub fn start_time(pid: i32) -> Option<u64> {
    stat(pid, 22)?.parse().ok()
}

/// The parent of the process: the process that started it, or the process that adopted it.
pub fn parent(pid: i32) -> Option<i32> {
    stat(pid, 4)?.parse().ok()
}

/// A field of `/proc/PID/stat` after the process's name. The first such field, the state, has the number 3.
fn stat(pid: i32, number: usize) -> Option<String> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    field(&stat, number).map(str::to_owned)
}

/// The name is in parentheses, and may itself contain parentheses and invalid UTF-8.
fn field(stat: &[u8], number: usize) -> Option<&str> {
    let end = stat.iter().rposition(|b| *b == b')')?;
    std::str::from_utf8(stat.get(end + 2..)?).ok()?.split(' ').nth(number - 3)
}

/// Maximum length of a stored command line, in bytes.
const MAX_COMMAND: usize = 512;
/// Maximum number of bytes that are read from a file in `/proc/PID`. The files are shorter, except for
/// the command line: a process can choose any region of its memory as its command line, and the region
/// can have terabytes.
const MAX_PROC_FILE: u64 = 64 << 10;

fn command_line(raw: &[u8]) -> String {
    let words: Vec<String> = raw.split(|b| *b == 0).filter(|w| !w.is_empty()).map(printable).collect();
    let mut line = words.join(" ");
    if line.len() > MAX_COMMAND {
        line.truncate(line.floor_char_boundary(MAX_COMMAND));
        line.push('…');
    }
    line
}

/// Makes text safe for terminals and logs. A process can choose any name and command line.
fn printable(raw: &[u8]) -> String {
    identity::printable(String::from_utf8_lossy(raw).trim_end_matches('\n'))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_peers_groups_include_its_supplementary_groups() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let (identity, _) = identify(ours.as_fd()).expect("an identity");
        let mut expected = nix::unistd::getgroups().expect("groups");
        expected.push(nix::unistd::getegid());
        let expected: std::collections::BTreeSet<u32> = expected.into_iter().map(|gid| gid.as_raw()).collect();
        assert_eq!(identity.groups.into_iter().collect::<std::collections::BTreeSet<_>>(), expected);
        drop(theirs);
    }

    #[test]
    fn a_process_is_located_only_while_it_runs() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep");
        let (pid, uid) = (child.id() as i32, nix::unistd::getuid().as_raw());
        let process = Process::named(pid, uid, None);
        assert_eq!(process.place(), Where::Host);
        assert!(process.describe(vec![]).placed);
        assert!(!Process::named(pid, uid + 1, None).describe(vec![]).placed, "it is another user's");
        child.kill().expect("it runs");
        child.wait().expect("its end");
        assert_eq!(process.place(), Where::Ended);
        assert_eq!(process.describe(vec![]), Identity { pid, uid, tenant: Tenant::User(uid), ..Identity::default() });
        assert_eq!(Process::named(0, uid, None).place(), Where::Elsewhere);
    }

    #[test]
    fn a_proc_status_without_nspid_is_rejected() {
        let text = "Name:\ta\nUid:\t0\t1\t2\t3\nNSpid:\t4711\t1\n";
        let status = Status::parse(text).expect("a status");
        assert_eq!((status.uids, status.depth), (vec![0, 1, 2, 3], 2));
        assert!(Status::parse("Uid:\t0\n").is_none() && Status::parse("").is_none());
    }

    #[test]
    fn the_process_state_follows_the_last_parenthesis() {
        assert_eq!(field(b"17 (a) T (b) S 1 2 3", 3), Some("S"));
        assert_eq!(field(b"17 (sh\xff) T 1 2 3", 4), Some("1"));
        assert_eq!((field(b"", 3), field(b"17 (sh)", 3)), (None, None));
    }

    #[test]
    fn control_characters_in_a_command_line_are_replaced() {
        assert_eq!(command_line(b"python\0-c\0print('\x1b[2J')\0"), "python -c print('?[2J')");
        let long = command_line(&[b'x'; 10_000]);
        assert_eq!(long.chars().count(), MAX_COMMAND + 1);
    }
}
