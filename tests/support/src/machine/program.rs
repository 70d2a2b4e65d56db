//! Programs on a simulated machine.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use serde_json::Value;

use super::Machine;
use crate::{kill, wait_for};

/// The number of lines of each log that are shown when a test fails.
const TAIL: usize = 100;

/// A program that has not started yet.
#[derive(Debug)]
pub struct Launch<'a> {
    pub(super) machine: &'a Machine,
    pub(super) command: Command,
    pub(super) name: String,
}

impl Launch<'_> {
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.command.env(name, value);
        self
    }

    /// Runs the program with this group ID. Requires root.
    pub fn group(mut self, id: u32) -> Self {
        self.command.gid(id);
        self
    }

    /// Turns the trace off.
    pub fn quiet(mut self) -> Self {
        self.command.env_remove("NVSHARE_DEBUG");
        self
    }

    /// Runs the program without the preloaded library, like a program that doesn't use nvshare.
    pub fn without_nvshare(mut self) -> Self {
        for name in ["LD_PRELOAD", "NVSHARE_SOCKET", "NVSHARE_DEBUG"] {
            self.command.env_remove(name);
        }
        self
    }

    pub fn start(mut self) -> Program {
        let number = self.machine.launched.fetch_add(1, Ordering::Relaxed);
        let path = |kind: &str| self.machine.path(&format!("program-{number}.{kind}"));
        let (stdout, stderr) = (path("out"), path("err"));
        self.command.stdout(File::create(&stdout).expect("a file for stdout"));
        // The library may also write to this file by its path.
        let stderr_file = File::options().append(true).create(true).open(&stderr);
        self.command.stderr(stderr_file.expect("a file for stderr"));
        let child = spawn(self.command.stdin(Stdio::null()));
        Program { child, name: self.name, stdout, stderr, ended: false }
    }
}

/// Starts a child that is killed when this test ends, however it ends.
pub(super) fn spawn(command: &mut Command) -> Child {
    // SAFETY: the closure makes one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
    command.spawn().unwrap_or_else(|e| panic!("cannot start {command:?}: {e}"))
}

/// A running program. It is killed when dropped.
#[derive(Debug)]
pub struct Program {
    child: Child,
    pub name: String,
    stdout: PathBuf,
    stderr: PathBuf,
    ended: bool,
}

impl Program {
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: i32) {
        kill(self.pid(), signal);
    }

    pub fn stdout(&self) -> String {
        fs::read_to_string(&self.stdout).unwrap_or_default()
    }

    pub fn stderr(&self) -> String {
        fs::read_to_string(&self.stderr).unwrap_or_default()
    }

    /// Length of the program's standard error in bytes. The trace grows while the program makes
    /// progress.
    pub fn trace_len(&self) -> u64 {
        fs::metadata(&self.stderr).map_or(0, |found| found.len())
    }

    /// The exit status, if the program has ended.
    pub fn poll(&mut self) -> Option<ExitStatus> {
        let status = self.child.try_wait().expect("a child");
        self.ended |= status.is_some();
        status
    }

    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let what = format!("the end of `{}` (pid {})", self.name, self.pid());
        wait_for(&what, || self.poll())
    }

    /// Waits until the program has ended successfully with correct results.
    #[track_caller]
    pub fn finish(&mut self) -> Report {
        let status = self.wait();
        let stdout = self.stdout();
        assert!(status.success(), "`{}` (pid {}): {status}: {}", self.name, self.pid(), stdout.trim_end());
        Report(serde_json::from_str(&stdout).unwrap_or_else(|e| panic!("`{}` said {stdout:?}: {e}", self.name)))
    }

    /// Signals the program to end its work, and waits like [`Self::finish`]. The program must have
    /// started its work: an earlier signal kills it.
    #[track_caller]
    pub fn end(&mut self) -> Report {
        self.signal(libc::SIGUSR1);
        self.finish()
    }

    pub fn kill(&mut self) {
        self.child.kill().expect("kill a program");
        self.child.wait().expect("its end");
        self.ended = true;
    }

    /// Waits for a line of the program's trace.
    #[track_caller]
    pub fn wait_to_say(&self, text: &str) {
        wait_for(&format!("`{}` to say {text:?}", self.name), || self.stderr().contains(text).then_some(()));
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if thread::panicking() {
            eprintln!("--- `{}` (pid {}) printed: {}", self.name, self.pid(), self.stdout().trim_end());
            show(&format!("trace of `{}` (pid {})", self.name, self.pid()), &self.stderr);
        }
    }
}

/// The report line of a program.
#[derive(Debug)]
pub struct Report(pub Value);

impl Report {
    #[track_caller]
    pub fn number(&self, name: &str) -> u64 {
        self.0[name].as_u64().unwrap_or_else(|| panic!("no {name} in {}", self.0))
    }

    #[track_caller]
    pub fn seconds(&self, name: &str) -> Duration {
        Duration::from_secs_f64(self.0[name].as_f64().unwrap_or_else(|| panic!("no {name} in {}", self.0)))
    }
}

pub(super) fn show(what: &str, path: &Path) {
    let text = fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let mut shown = format!("--- {what} ({} lines) ---\n", lines.len());
    for line in &lines[lines.len().saturating_sub(TAIL)..] {
        let _ = writeln!(shown, "{line}");
    }
    eprint!("{shown}");
}
