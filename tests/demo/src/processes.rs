//! Processes that end with the demo, however the demo ends. The module also provides a temporary
//! directory, and handles Ctrl-C.

use crate::Result;
use std::{
    env, fs,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{self, Child, Command, ExitStatus},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

/// The time limit for the start of a process.
const PATIENCE: Duration = Duration::from_secs(60);

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// From now on, Ctrl-C, a closed terminal and SIGTERM only set a flag, which [`interrupted`] reads.
pub fn notice_interrupts() {
    extern "C" fn notice(_: libc::c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed);
    }
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        unsafe { libc::signal(signal, notice as *const () as libc::sighandler_t) };
    }
}

pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// A directory that is removed when this value is dropped.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Result<Scratch> {
        // The directory is not in the build directory, whose path may be too long for a socket.
        let path = env::temp_dir().join(format!("nvshare-demo-{}", process::id()));
        fs::create_dir(&path).map_err(|e| format!("cannot make {}: {e}", path.display()))?;
        Ok(Scratch(path))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A child whose output is written to files. It is killed when this value is dropped.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    output: PathBuf,
    errors: PathBuf,
}

impl Process {
    pub fn start(name: &str, mut command: Command, scratch: &Path) -> Result<Process> {
        let file = |end: &str| scratch.join(format!("{}.{end}", name.replace(' ', "-")));
        let (output, errors) = (file("out"), file("err"));
        command.stdout(fs::File::create(&output)?).stderr(fs::File::create(&errors)?);
        let parent = process::id() as libc::pid_t;
        // SAFETY: both calls are async-signal-safe, as required between fork and exec.
        unsafe {
            command.pre_exec(move || {
                // The child ends even if the demo is killed.
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                if libc::getppid() == parent { Ok(()) } else { Err(std::io::ErrorKind::Interrupted.into()) }
            });
        }
        let child = command
            .spawn()
            .map_err(|e| format!("cannot start {name} ({}): {e}", command.get_program().to_string_lossy()))?;
        Ok(Process { name: name.into(), child, output, errors })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    pub fn wait(&mut self) -> Result<ExitStatus> {
        Ok(self.child.wait()?)
    }

    /// Waits until the process is ready. If it doesn't become ready, the error is `what`.
    pub fn wait_until(&mut self, what: &str, ready: impl Fn(&Self) -> bool) -> Result<()> {
        let start = Instant::now();
        while !ready(self) {
            if interrupted() {
                return Err("interrupted".into());
            }
            if !self.is_running() || start.elapsed() > PATIENCE {
                return Err(format!("{}: {what}\n{}{}", self.name, self.output(), self.errors()).into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    /// The process's standard output so far.
    pub fn output(&self) -> String {
        fs::read_to_string(&self.output).unwrap_or_default()
    }

    /// The process's standard error so far.
    pub fn errors(&self) -> String {
        fs::read_to_string(&self.errors).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
