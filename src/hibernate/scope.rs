//! The scopes of systemd in which CRIU and restored programs run: control groups in the slice of the
//! program's user, whose limits apply to them, as the user's sessions are.
//!
//! Each operation has a scope of its own, with a new name. So a control group contains exactly the
//! processes of one operation, whichever helper looks, and can be ended as a whole.

use crate::Refusal;
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use std::{
    fs, io,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// Maximum time until systemd has created a scope, or the kernel has frozen or ended one.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Interval of the checks.
const LOOK: Duration = Duration::from_millis(5);

/// A scope, which may exist or not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scope {
    name: String,
    uid: u32,
}

/// Returns eight random hexadecimal digits.
///
/// # Errors
/// The kernel has no random numbers.
pub fn random() -> io::Result<String> {
    let mut bytes = [0; 4];
    getrandom(&mut bytes, GetRandomFlags::empty())?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Returns the place of a process among the control groups of version 2.
pub fn place(pid: i32) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// Returns true if this place is the scope of a restored program of this user. Only systemd's manager of
/// the system can create such a scope.
pub fn is_of_restored(place: &str, uid: u32) -> bool {
    let rest = place.strip_prefix(&format!("/user.slice/user-{uid}.slice/nvshare-"));
    rest.is_some_and(|rest| rest.ends_with(".scope") && !rest.contains('/'))
}

/// Returns the directory of the control groups of version 2.
///
/// # Errors
/// The host has none.
pub fn mount() -> io::Result<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo")?;
    let of_cgroups = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup2 ").then(|| mount.split(' ').nth(4).map(PathBuf::from)).flatten()
    };
    text.lines().find_map(of_cgroups).ok_or_else(|| io::Error::other("the host has no control groups of version 2"))
}

impl Scope {
    /// Returns a new scope for processes of this user, which does not exist yet.
    ///
    /// # Errors
    /// The kernel has no random numbers.
    pub fn new(what: &str, uid: u32) -> io::Result<Self> {
        Ok(Self { name: format!("nvshare-{what}-{}.scope", random()?), uid })
    }

    fn place(&self) -> String {
        format!("/user.slice/user-{}.slice/{}", self.uid, self.name)
    }

    fn directory(&self) -> io::Result<PathBuf> {
        Ok(mount()?.join(self.place().trim_start_matches('/')))
    }

    /// Creates the scope, and waits until this process, which waits for the helper, is in it.
    ///
    /// # Errors
    /// systemd does not create the scope, or the process has ended.
    pub fn start(&self, pid: i32, has_ended: impl Fn() -> bool) -> Result<(), Refusal> {
        let Self { name, uid } = self;
        let mut command = Command::new("busctl");
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").stdin(Stdio::null()).stdout(Stdio::null());
        let manager = ["org.freedesktop.systemd1", "/org/freedesktop/systemd1", "org.freedesktop.systemd1.Manager"];
        command.args(["--system", "--quiet", "--timeout=10", "call"]).args(manager);
        // `replace`: the slice may be about to be stopped, because its last process has just ended.
        command.args(["StartTransientUnit", "ssa(sv)a(sa(sv))", name, "replace", "4"]);
        command.args(["Description", "s", "program saved or restored by nvshare"]);
        command.args(["Slice", "s", &format!("user-{uid}.slice"), "CollectMode", "s", "inactive-or-failed"]);
        command.args(["PIDs", "au", "1", &pid.to_string(), "0"]);
        let failed = |why: &str| Refusal::new(format!("systemd creates no scope for it: {why}"));
        match command.output() {
            Ok(output) if output.status.success() => {}
            Ok(output) => return Err(failed(String::from_utf8_lossy(&output.stderr).trim())),
            Err(e) => return Err(failed(&format!("busctl: {e}"))),
        }
        // The answer only says that systemd has queued a job.
        let expected = self.place();
        let is_there = || match place(pid).as_ref() == Some(&expected) {
            false if has_ended() => Err(io::Error::other("the worker was killed")),
            is_there => Ok(is_there),
        };
        wait(is_there).map_err(|e| failed(&e.to_string()))
    }

    /// Stops all processes, and prevents them from being continued by signals.
    ///
    /// # Errors
    /// The scope does not exist.
    pub fn freeze(&self) -> io::Result<()> {
        let directory = self.directory()?;
        fs::write(directory.join("cgroup.freeze"), "1")?;
        wait(|| event(&directory, "frozen 1"))
    }

    /// Lets the processes continue, unless signals have stopped them.
    ///
    /// # Errors
    /// The scope does not exist.
    pub fn thaw(&self) -> io::Result<()> {
        fs::write(self.directory()?.join("cgroup.freeze"), "0")
    }

    /// Returns the processes of the scope, and of scopes within.
    ///
    /// # Errors
    /// The scope does not exist.
    pub fn pids(&self) -> io::Result<Vec<i32>> {
        let mut found = Vec::new();
        let mut left = vec![self.directory()?];
        while let Some(directory) = left.pop() {
            let text = fs::read_to_string(directory.join("cgroup.procs"))?;
            found.extend(text.lines().filter_map(|pid| pid.parse::<i32>().ok()));
            for entry in fs::read_dir(&directory)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    left.push(entry.path());
                }
            }
        }
        Ok(found)
    }

    /// Returns true if the scope has processes.
    ///
    /// # Errors
    /// The control groups cannot be read.
    pub fn is_populated(&self) -> io::Result<bool> {
        event(&self.directory()?, "populated 1")
    }

    /// Ends all processes, and waits until they have ended. A scope that does not exist has none.
    ///
    /// # Errors
    /// A process has not ended at this time.
    pub fn kill(&self, until: Instant) -> io::Result<()> {
        match fs::write(self.directory()?.join("cgroup.kill"), "1") {
            Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
            _ => {}
        }
        wait_until(until, || self.is_populated().map(|is_populated| !is_populated))
    }
}

/// Returns true if the events of a control group contain a line. The events of a group that does not
/// exist contain none.
fn event(directory: &Path, line: &str) -> io::Result<bool> {
    match fs::read_to_string(directory.join("cgroup.events")) {
        Ok(text) => Ok(text.lines().any(|found| found == line)),
        // ENODEV: the group was removed while its file was open.
        Err(e) if e.kind() == io::ErrorKind::NotFound || e.raw_os_error() == Some(libc::ENODEV) => Ok(false),
        Err(e) => Err(e),
    }
}

fn wait(is_done: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    wait_until(Instant::now() + PATIENCE, is_done)
}

/// Waits until a condition holds.
///
/// # Errors
/// The condition does not hold at this time, or cannot be checked.
pub fn wait_until(until: Instant, is_done: impl Fn() -> io::Result<bool>) -> io::Result<()> {
    while !is_done()? {
        if Instant::now() > until {
            return Err(io::ErrorKind::TimedOut.into());
        }
        sleep(LOOK);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_scopes_of_the_system_in_the_users_slice_are_those_of_restored_programs() {
        assert!(is_of_restored("/user.slice/user-1000.slice/nvshare-a-1-2-0a.scope", 1000));
        for place in [
            "/user.slice/user-1000.slice/user@1000.service/nvshare-a.scope",
            "/user.slice/user-1000.slice/nvshare-a.scope/inner",
            "/user.slice/user-1001.slice/nvshare-a.scope",
            "/user.slice/user-1000.slice/session-1.scope",
        ] {
            assert!(!is_of_restored(place, 1000), "{place}");
        }
    }

    #[test]
    fn a_scope_that_does_not_exist_has_no_processes() {
        let scope = Scope::new("test", 1).expect("random numbers");
        let Ok(false) = scope.is_populated() else { return test_support::skip("control groups of version 2") };
        scope.kill(Instant::now()).expect("it has none");
        assert!(scope.freeze().is_err() && scope.thaw().is_err() && scope.pids().is_err());
        assert_ne!(scope, Scope::new("test", 1).expect("random numbers"), "each operation has its own");
    }
}
