//! Runs CRIU as the owner of a program.

use crate::{
    Refusal,
    rights::Rights,
    scope::Scope,
    store::{Entry, Store},
    worker::{self, CAP_CHECKPOINT_RESTORE, CAP_SETPCAP, Limit, Task},
};
use std::{
    io,
    os::fd::AsFd,
    process::{Command, Stdio},
    time::Instant,
};

/// The oldest version of CRIU that works. Debian 12's 3.17.1 does not know the kernels that Debian 13's
/// 4.1.1 does.
const OLDEST: (u32, u32) = (4, 1);
const CRIU: &str = "criu";
const NEEDED: &str = "CRIU 4.1 or newer is needed. Install the package criu, for example of Debian 13";

/// Parts of CRIU's messages, each with the remedy.
const REMEDIES: [(&str, &str); 2] = [
    // SO_PASSCRED. Linux 6.18 does not have it for network sockets, and CRIU 4.1.1 reads it for all sockets.
    ("Can't get 1:16 opt", ". With this kernel, a program that has a network socket needs CRIU 4.2 or newer"),
    ("External socket is used", ". The program has a Unix socket whose peer is another program. Close the socket"),
];

/// Parts of errors in CRIU's logs after which CRIU continues.
const HARMLESS: [&str; 1] = [
    // CRIU wants as many descriptors as the host allows, and continues with its own limit.
    "Can't setup RLIMIT_NOFILE for self",
];

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

/// Describes a failure of CRIU, with the remedy if it is known.
fn failure(why: &str) -> String {
    let remedy = REMEDIES.iter().find(|(known, _)| why.contains(known)).map_or("", |(_, remedy)| remedy);
    format!("CRIU fails: {why}{remedy}")
}

/// An image, and how CRIU works on it.
#[derive(Debug, Clone, Copy)]
pub struct Job<'a> {
    pub store: &'a Store,
    pub entry: &'a Entry,
    pub scope: &'a Scope,
    pub rights: &'a Rights,
    /// Restores the program's network connections as closed.
    pub closes_connections: bool,
    pub deadline: Instant,
}

impl Job<'_> {
    fn run(
        &self,
        arguments: &[&str],
        capabilities: &[u32],
        survives_limit: bool,
        log: &str,
        obstacle: &dyn Fn() -> Option<String>,
    ) -> Result<(), Refusal> {
        let images =
            self.entry.part("criu").map_err(|e: io::Error| Refusal::new(format!("cannot open the image: {e}")))?;
        let common = ["--unprivileged", "--no-default-config", "--manage-cgroups=ignore"];
        let places = ["--images-dir", ".", "--work-dir", "../work", "--log-file", log, "-v1"];
        let arguments = arguments.iter().chain(self.connections()).chain(&common).chain(&places);
        let arguments = arguments.map(|argument| (*argument).to_owned()).collect();
        let task = Task::Execute { program: CRIU.into(), arguments, capabilities: capabilities.into(), survives_limit };
        let limit = Limit { deadline: self.deadline, obstacle };
        let done = worker::run(self.scope, self.rights, task, images.as_fd(), limit)?;
        if done.status.success() {
            return Ok(());
        }
        let why = self.entry.error_in(log, &HARMLESS).unwrap_or_else(|| done.status.to_string());
        Err(Refusal::new(failure(&why)))
    }

    /// The option that saves and restores network connections as closed.
    fn connections(&self) -> &[&str] {
        if self.closes_connections { &["--tcp-close"] } else { &[] }
    }

    /// Saves the tree below a stopped process. The processes stay stopped, whatever happens.
    ///
    /// CRIU executes code in the processes, and would damage them if it were killed then. So if the image
    /// becomes too large, or `cancelled` returns a reason, its writes fail, and it ends by itself.
    ///
    /// # Errors
    /// CRIU fails.
    pub fn dump(&self, root: i32, cancelled: &dyn Fn() -> Option<String>) -> Result<(), Refusal> {
        let arguments =
            ["dump", "--leave-stopped", "--file-locks", "--ghost-limit", "268435456", "--tree", &root.to_string()];
        // Only once: reading the manifests of many images takes long, and this image is looked at often.
        let others = self.store.room_of_others(self.entry, self.rights.owner.uid)?;
        self.run(&arguments, &[CAP_CHECKPOINT_RESTORE], true, "dump.log", &|| {
            // The image may be larger than the memory that was counted.
            let checked = self.store.check_written(self.entry, others);
            cancelled().or_else(|| checked.err().map(|Refusal(why)| why))
        })
    }

    /// Restores the processes of a checked image. The processes are stopped, as when they were saved.
    ///
    /// # Errors
    /// CRIU fails. It may have left processes in the scope.
    pub fn restore(&self) -> Result<(), Refusal> {
        let arguments = ["restore", "--file-locks", "--restore-detached"];
        self.run(&arguments, &[CAP_CHECKPOINT_RESTORE, CAP_SETPCAP], false, "restore.log", &|| None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_with_a_remedy_name_it() {
        let why = failure("sockets: Can't get 1:16 opt: Operation not supported");
        assert!(why.starts_with("CRIU fails: sockets: ") && why.ends_with("needs CRIU 4.2 or newer"), "{why}");
        let why = failure("unix: External socket is used. Consider using --ext-unix-sk option.");
        assert!(why.ends_with("Close the socket"), "{why}");
        assert_eq!(failure("cannot write"), "CRIU fails: cannot write");
    }
}
