//! Creates cgroups that look like systemd's units, without systemd. The module also mounts cgroup
//! version 2 where the scheduler looks for it.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::kill;

/// The mount point of cgroups that the scheduler uses.
const ROOT: &str = "/sys/fs/cgroup";

/// The time limit for killed processes to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A cgroup in each relevant hierarchy. If systemd's hierarchy of version 1 exists, it determines a
/// process's unit. The cgroup has the same path in version 2.
#[derive(Debug)]
pub struct Unit {
    /// The path from the root of the hierarchy.
    pub path: String,
    directories: Vec<PathBuf>,
}

impl Unit {
    /// Returns `None` and prints the reason if the cgroup cannot be created.
    pub fn new(name: &str) -> Option<Self> {
        let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let of = |kind: &str| {
            let own = cgroups.lines().find(|line| line.contains(kind))?;
            Some(own.rsplit(':').next().unwrap_or("/").trim_end_matches('/').to_owned())
        };
        let (systemd, version_2) = (mounted("name=systemd").zip(of(":name=systemd:")), mounted(" - cgroup2 "));
        let path = format!("{}/{name}", systemd.as_ref().map(|(_, own)| own.clone()).or_else(|| of("0::"))?);
        let roots = systemd.map(|(root, _)| root).into_iter().chain(version_2);
        let mut unit = Self { path, directories: Vec::new() };
        for root in roots {
            let directory = root.join(unit.path.trim_start_matches('/'));
            if fs::create_dir(&directory).is_err() {
                break;
            }
            unit.directories.push(directory);
        }
        if unit.directories.first().is_none_or(|path| !path.join("cgroup.procs").exists()) {
            crate::skip("the right to create control groups");
            return None;
        }
        Some(unit)
    }

    /// The file that moves a process into the cgroup when its pid is written there.
    pub fn procs(&self) -> PathBuf {
        self.directories[0].join("cgroup.procs")
    }

    /// Moves this process into the cgroup until the returned value is dropped.
    pub fn enter(&self) -> Stay {
        let before = self.directories[0].parent().expect("it is below another").join("cgroup.procs");
        let pid = std::process::id().to_string();
        fs::write(self.procs(), &pid).expect("it can be entered");
        Stay(before)
    }

    /// The cgroup's directory.
    pub fn directory(&self) -> PathBuf {
        Path::new(ROOT).join(self.path.trim_start_matches('/'))
    }
}

impl Drop for Unit {
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        for directory in &self.directories {
            while fs::remove_dir(directory).is_err() && Instant::now() < end {
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// A cgroup with a memory limit. Remaining processes are killed when this value is dropped.
#[derive(Debug)]
pub struct Limited {
    directory: PathBuf,
    /// The files of the limit, the usage, and the number of out-of-memory kills.
    files: [&'static str; 3],
}

impl Limited {
    /// Returns `None` and prints the reason if the cgroup cannot be created.
    pub fn new(name: &str, limit: u64) -> Option<Self> {
        let cgroups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        let own = |kind: &str| {
            let line = cgroups.lines().find(|line| line.contains(kind))?;
            Some(line.rsplit(':').next().unwrap_or("/").trim_matches('/').to_owned())
        };
        let version_1 = ["memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control"];
        let version_2 = ["memory.max", "memory.current", "memory.events"];
        let of = |root: Option<PathBuf>, own: Option<String>, files| Some((root?.join(own?).join(name), files));
        // If both versions are mounted, only one of them has the memory controller.
        let places = [
            of(mounted(" - cgroup cgroup rw,memory"), own(":memory:"), version_1),
            of(mounted(" - cgroup2 "), own("0::"), version_2),
        ];
        let made = places.into_iter().flatten().find_map(|(directory, files)| {
            fs::create_dir(&directory).ok()?;
            let group = Self { directory, files };
            fs::write(group.directory.join(group.files[0]), limit.to_string()).is_ok().then_some(group)
        });
        if made.is_none() {
            crate::skip("the right to create control groups with a memory limit");
        }
        made
    }

    /// The file that moves a process into the cgroup when its pid is written there.
    pub fn procs(&self) -> PathBuf {
        self.directory.join("cgroup.procs")
    }

    /// Changes the memory limit.
    pub fn set_limit(&self, bytes: u64) {
        fs::write(self.directory.join(self.files[0]), bytes.to_string()).expect("a limit");
    }

    /// The used bytes, without the memory that the kernel can reclaim.
    pub fn used(&self) -> u64 {
        let number = |name: &str| fs::read_to_string(self.directory.join(name)).ok()?.trim().parse::<u64>().ok();
        let all = number(self.files[1]).expect("what it has");
        let stat = fs::read_to_string(self.directory.join("memory.stat")).expect("what that is");
        let field = |names: [&str; 2]| names.iter().find_map(|name| value(&stat, name)).unwrap_or(0);
        let cached = field(["total_inactive_file", "inactive_file"]) + field(["total_active_file", "active_file"]);
        all.saturating_sub(cached)
    }

    /// The number of out-of-memory kills.
    pub fn kills(&self) -> u64 {
        let text = fs::read_to_string(self.directory.join(self.files[2])).expect("its events");
        value(&text, "oom_kill").expect("the kills")
    }
}

impl Drop for Limited {
    fn drop(&mut self) {
        let end = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.directory).is_err() && Instant::now() < end {
            let left = fs::read_to_string(self.procs()).unwrap_or_default();
            left.lines().filter_map(|pid| pid.parse().ok()).for_each(|pid| kill(pid, libc::SIGKILL));
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the number that follows a name.
fn value(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// Keeps this process in a unit's cgroup until it is dropped.
#[derive(Debug)]
pub struct Stay(PathBuf);

impl Drop for Stay {
    fn drop(&mut self) {
        let _ = fs::write(&self.0, std::process::id().to_string());
    }
}

/// Lets a command find cgroups of version 2 at their usual mount point. Requires root if they are
/// mounted elsewhere.
pub fn finds_version_2(command: &mut Command) {
    if mounted(" - cgroup2 ").as_deref() != Some(Path::new(ROOT)) {
        finds(command, c"cgroup2");
    }
}

/// Lets a command find another file system at the usual mount point of cgroup version 2. Requires
/// root.
pub fn finds_no_version_2(command: &mut Command) {
    finds(command, c"tmpfs");
}

fn finds(command: &mut Command, kind: &'static std::ffi::CStr) {
    let mount = move || {
        let (nothing, all) = (std::ptr::null(), libc::MS_REC | libc::MS_PRIVATE);
        // SAFETY: all pointers are null or to strings that end with NUL.
        let done = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(nothing, c"/".as_ptr(), nothing, all, nothing.cast()) == 0
                && libc::mount(kind.as_ptr(), c"/sys/fs/cgroup".as_ptr(), kind.as_ptr(), 0, nothing.cast()) == 0
        };
        if done { Ok(()) } else { Err(io::Error::last_os_error()) }
    };
    // SAFETY: `mount` makes only system calls, which are async-signal-safe.
    unsafe { command.pre_exec(mount) };
}

/// Returns the mount point of a hierarchy. `kind` is a part of its line in `mountinfo`.
fn mounted(kind: &str) -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let line = mounts.lines().find(|line| line.contains(kind))?;
    Some(PathBuf::from(line.split(' ').nth(4)?))
}
