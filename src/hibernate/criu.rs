//! Runs CRIU as the owner of a program.

use crate::{
    Refusal,
    owner::{Purpose, run_as},
    process::{Credentials, Identity},
    store::Entry,
};
use std::{
    ffi::OsStr,
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    process::{Command, Stdio},
};

/// The oldest version of CRIU that works. Debian 12's 3.17.1 does not know the kernels that Debian 13's
/// 4.1.1 does.
const OLDEST: (u32, u32) = (4, 1);
const CRIU: &str = "criu";
const NEEDED: &str = "CRIU 4.1 or newer is needed. Install the package criu, for example of Debian 13";

/// Checks that a new enough CRIU is installed.
///
/// # Errors
/// It is not.
pub fn check() -> Result<(), Refusal> {
    let mut command = Command::new(CRIU);
    command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").arg("--version").stdin(Stdio::null());
    let output = command.output().map_err(|_| Refusal::new(NEEDED))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text.lines().find_map(|line| line.strip_prefix("Version: ")).unwrap_or_default().trim();
    let mut parts = version.split('.').map(|part| part.parse::<u32>().unwrap_or(0));
    if (parts.next().unwrap_or(0), parts.next().unwrap_or(0)) >= OLDEST {
        return Ok(());
    }
    Err(Refusal::new(format!("{NEEDED}. This host has version {version}")))
}

fn run(entry: &Entry, owner: &Credentials, purpose: Purpose, arguments: &[&str], log: &str) -> Result<(), Refusal> {
    let images = entry.part("criu").map_err(|e| Refusal::new(format!("cannot open the image: {e}")))?;
    let mut command = Command::new(CRIU);
    command.args(arguments).args(["--unprivileged", "--no-default-config", "--manage-cgroups=ignore"]);
    command.args(["--images-dir", ".", "--work-dir", "../work", "--log-file", log, "-v1"]);
    run_as(&mut command, owner, purpose, images.as_fd());
    keep_open(&mut command, &entry.lock);
    let words = |e: io::Error| Refusal::new(format!("cannot run {CRIU}: {e}"));
    let mut child = command.spawn().map_err(words)?;
    // If this fails, CRIU continues: stopping it is more dangerous than to forget it.
    if let Some(process) = Identity::of(child.id() as i32)
        && let Err(e) = entry.begin(process, owner.uid)
    {
        eprintln!("nvshare-hibernate: cannot record the process of {CRIU}: {e}");
    }
    let status = child.wait().map_err(words)?;
    if status.success() {
        return Ok(());
    }
    entry.end_leftovers();
    let why = entry.error_in(log).unwrap_or_else(|| status.to_string());
    Err(Refusal::new(format!("CRIU fails: {why}")))
}

/// Lets CRIU hold the lock of the image, even if this helper is killed.
pub fn keep_open(command: &mut Command, lock: &OwnedFd) {
    let lock = lock.as_raw_fd();
    // SAFETY: the closure only makes a system call.
    unsafe {
        command.pre_exec(move || match libc::fcntl(lock, libc::F_SETFD, 0) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
}

/// Saves the tree below a stopped process. The processes stay stopped, whatever happens.
///
/// # Errors
/// CRIU fails.
pub fn dump(entry: &Entry, owner: &Credentials, root: i32) -> Result<(), Refusal> {
    let arguments =
        ["dump", "--leave-stopped", "--file-locks", "--ghost-limit", "268435456", "--tree", &root.to_string()];
    run(entry, owner, Purpose::Dump, &arguments, "dump.log")
}

/// Restores the processes of a checked image. The processes are stopped, as when they were saved.
///
/// # Errors
/// CRIU fails. It has then ended the processes.
pub fn restore(entry: &Entry, owner: &Credentials) -> Result<(), Refusal> {
    run(entry, owner, Purpose::Restore, &["restore", "--file-locks", "--restore-detached"], "restore.log")
}

/// Returns the first of these files that the owner may not open.
pub fn first_closed<'a>(owner: &Credentials, files: &'a [(std::path::PathBuf, bool)]) -> Option<&'a std::path::Path> {
    let root = std::fs::File::open("/").ok()?;
    let is_closed = |(path, is_written): &&(std::path::PathBuf, bool)| {
        let mut command = Command::new("/proc/self/exe");
        command.arg("--probe").arg(path).args(is_written.then_some(OsStr::new("--writable")));
        run_as(&mut command, owner, Purpose::Probe, root_of(&root));
        !command.status().is_ok_and(|status| status.success())
    };
    files.iter().find(is_closed).map(|(path, _)| path.as_path())
}

fn root_of(root: &std::fs::File) -> BorrowedFd<'_> {
    root.as_fd()
}
