//! Trials: runs real programs with the library, and reports failures.
//!
//! - `/bin/true` is little more than the loader and the C library. A defect that breaks `/bin/true`
//!   breaks all programs.
//! - A shell that starts `/bin/true` adds a fork.
//! - `/bin/cat /proc/self/maps` shows whether the library was loaded.
//! - For a setuid program, the loader ignores `LD_PRELOAD` but reads `/etc/ld.so.preload`.

use std::io::Read;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::fs::CWD;
use rustix::mount::{
    MountFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags, mount, mount_change, move_mount, open_tree,
};
use rustix::process::{Pid, Signal, kill_process_group};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use wait_timeout::ChildExt;

use super::file::FILE;
use crate::ctl::progress::Progress;

/// The time limit of a trial. The programs run for only milliseconds, but the machine may be busy.
const LIMIT: Duration = Duration::from_secs(20);
/// Maximum number of bytes that are read from a program's output.
const OUTPUT_MAX: u64 = 256 << 10;
/// The user and group `nobody`, which have this id on every Linux.
const NOBODY: u32 = 65534;

/// Flags that clone the mount of a directory, recursively.
const CLONE: OpenTreeFlags =
    OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::AT_RECURSIVE).union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// How a trial program loads the library.
#[derive(Debug, Clone, Copy)]
pub enum By<'a> {
    /// The program loads the library through `LD_PRELOAD`.
    Environment(&'a Path),
    /// The program reads the actual `/etc/ld.so.preload`.
    File,
    /// The program reads an `/etc/ld.so.preload` with this text, which only the programs of this
    /// trial see.
    Rehearsal(&'a [u8]),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum User {
    Caller,
    Nobody,
}

impl User {
    fn name(self) -> &'static str {
        match self {
            Self::Nobody => "nobody",
            Self::Caller if rustix::process::geteuid().is_root() => "root",
            Self::Caller => "you",
        }
    }
}

/// A description of a trial, and its result.
#[derive(Debug)]
pub struct Trial {
    pub what: String,
    pub result: Result<(), String>,
}

/// Runs the trials as each of the users, up to the first failure.
///
/// # Errors
/// The trials cannot be set up.
pub fn all(by: By, library: &Path, users: &[User]) -> Result<Vec<Trial>, String> {
    let By::Rehearsal(text) = by else { return Ok(each(by, library, users)) };
    // The trials run in a new thread, because a mount namespace applies to a thread and its child
    // processes.
    std::thread::scope(|scope| {
        let rehearsal = scope.spawn(|| {
            stage(text).map_err(|e| format!("cannot create a mount namespace: {e}"))?;
            Ok(each(by, library, users))
        });
        rehearsal.join().unwrap_or_else(|_| Err("cannot create a mount namespace".into()))
    })
}

/// Gives this thread a private `/etc` with one changed file.
fn stage(text: &[u8]) -> std::io::Result<()> {
    // SAFETY: without `FILES`, `unshare` keeps descriptors shared, so every descriptor stays valid.
    // Only the thread's root, working directory, umask and mounts become private.
    unsafe { unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS)? };
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    let real = open_tree(CWD, "/etc", CLONE)?;
    mount("tmpfs", "/etc", "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=0755"))?;
    let etc = Path::new("/etc");
    let mirror = etc.join(".etc");
    std::fs::create_dir(&mirror)?;
    move_mount(&real, "", CWD, &mirror, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?;
    for entry in std::fs::read_dir(&mirror)? {
        let name = entry?.file_name();
        if Path::new("/etc").join(&name) != Path::new(FILE) {
            symlink(Path::new(".etc").join(&name), etc.join(&name))?;
        }
    }
    std::fs::write(FILE, text)?;
    std::fs::set_permissions(FILE, PermissionsExt::from_mode(0o644))
}

/// Runs the trials up to the first failure.
fn each(by: By, library: &Path, users: &[User]) -> Vec<Trial> {
    let mut programs: Vec<(&[&str], Prints)> = vec![
        (&["/bin/true"], Prints::Nothing),
        (&["/bin/sh", "-c", "/bin/true; exit $?"], Prints::Nothing),
        (&["/bin/cat", "/proc/self/maps"], Prints::WhatIsLoaded),
    ];
    let setuid = setuid_program().map(|program| [program, "--version"]);
    let mut trials = Vec::new();
    let mut progress = Progress::new();
    for user in users {
        if let (User::Nobody, By::File | By::Rehearsal(_), Some(words)) = (user, by, &setuid) {
            programs.push((words, Prints::Something));
        }
        for (words, prints) in &programs {
            progress.show(&format!("runs {} with the library, as {}", words.join(" "), user.name()));
            let result = output(by, *user, words).and_then(|output| output.check(*prints, library));
            let failed = result.is_err();
            trials.push(Trial { what: format!("{} as {}", words.join(" "), user.name()), result });
            if failed {
                return trials;
            }
        }
    }
    trials
}

/// Returns a setuid-root program that has a harmless option to print its version.
fn setuid_program() -> Option<&'static str> {
    ["/usr/bin/su", "/bin/su", "/usr/bin/mount", "/bin/mount"].into_iter().find(|program| {
        let metadata = Path::new(program).symlink_metadata();
        metadata.is_ok_and(|m| m.is_file() && m.uid() == 0 && m.mode() & 0o4001 == 0o4001)
    })
}

/// The expected standard output of a program. The program's standard error must be empty.
#[derive(Debug, Clone, Copy)]
enum Prints {
    Nothing,
    Something,
    WhatIsLoaded,
}

#[derive(Debug)]
struct Output {
    status: ExitStatus,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Output {
    fn check(&self, prints: Prints, library: &Path) -> Result<(), String> {
        match (self.status.success(), &*self.stderr) {
            (true, []) => match prints {
                Prints::Nothing if !self.stdout.is_empty() => Err(format!("printed {}", quote(&self.stdout))),
                Prints::WhatIsLoaded if !contains(&self.stdout, library) => {
                    Err(format!("did not load {}: the loader ignored it or is not glibc's", library.display()))
                }
                _ => Ok(()),
            },
            (true, said) => Err(format!("printed {}", quote(said))),
            (false, []) => Err(format!("ended with {}", self.status)),
            (false, said) => Err(format!("ended with {} and printed {}", self.status, quote(said))),
        }
    }
}

fn output(by: By, user: User, words: &[&str]) -> Result<Output, String> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env_clear().current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    if let By::Environment(library) = by {
        command.env("LD_PRELOAD", library);
    }
    if user == User::Nobody {
        // Setting the uid also drops root's supplementary groups.
        command.uid(NOBODY).gid(NOBODY);
    }
    let until = Instant::now() + LIMIT;
    let mut child = command.spawn().map_err(|e| format!("cannot be started: {e}"))?;
    let stdout = reader(child.stdout.take());
    let stderr = reader(child.stderr.take());
    let status = child.wait_timeout(LIMIT).map_err(|e| format!("cannot be waited for: {e}"))?;
    let Some(status) = status else {
        if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = child.wait();
        return Err(format!("did not end within {} s", LIMIT.as_secs()));
    };
    // A leftover child process may keep the pipes open, so reading has a time limit.
    let read = |from: Receiver<Vec<u8>>| {
        let left = until.saturating_duration_since(Instant::now());
        from.recv_timeout(left).map_err(|_| "left a background process that keeps its output open".to_owned())
    };
    Ok(Output { status, stdout: read(stdout)?, stderr: read(stderr)? })
}

fn reader(pipe: Option<impl Read + Send + 'static>) -> Receiver<Vec<u8>> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = pipe.map(|pipe| pipe.take(OUTPUT_MAX).read_to_end(&mut bytes));
        let _ = send.send(bytes);
    });
    receive
}

fn contains(maps: &[u8], library: &Path) -> bool {
    let maps = String::from_utf8_lossy(maps);
    maps.lines().any(|line| line.splitn(6, ' ').nth(5).is_some_and(|path| Path::new(path.trim_start()) == library))
}

/// Returns the first line, shortened and escaped for a terminal.
fn quote(said: &[u8]) -> String {
    let said = String::from_utf8_lossy(said);
    let line: String = said.lines().next().unwrap_or_default().chars().take(300).collect();
    format!("{line:?}")
}
