//! A node in a directory of its own: simulated GPUs, the real scheduler on them, the plugin, and a stand-in for kubelet.
#![allow(dead_code)] // each test program uses its own part

pub mod kubelet;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Long enough for a loaded machine; nothing waits this long unless it fails.
pub const PATIENCE: Duration = Duration::from_secs(30);

const PLUGIN: &str = env!("CARGO_BIN_EXE_nvshare-device-plugin");

/// What most tests have the plugin read: it finds out about things quickly.
pub const QUICK: &str = "[health]\nscheduler-timeout = 1\nquery-interval = 1\n";

/// The node. It goes away with the test.
#[derive(Debug)]
pub struct Node {
    pub directory: PathBuf,
    gpus: usize,
    events: bool,
}

impl Node {
    pub fn with_gpus(gpus: usize) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("nvshare-plugin-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let directory = std::env::temp_dir().join(name);
        for part in ["gpu", "lib", "kubelet"] {
            std::fs::create_dir_all(directory.join(part)).expect("a directory");
        }
        let nvml = beside("libnvidia_ml.so");
        std::fs::copy(&nvml, directory.join("lib/libnvidia-ml.so.1")).expect("the simulated NVML");
        let node = Self { directory, gpus, events: true };
        node.configure(QUICK);
        node
    }

    /// A driver that tells nothing unasked.
    pub fn without_events(mut self) -> Self {
        self.events = false;
        self
    }

    pub fn kubelet_directory(&self) -> PathBuf {
        self.directory.join("kubelet")
    }

    pub fn socket(&self) -> PathBuf {
        self.kubelet_directory().join("nvshare.sock")
    }

    pub fn control(&self) -> PathBuf {
        self.directory.join("control/control.sock")
    }

    /// Where the simulated GPUs are.
    pub fn machine(&self) -> PathBuf {
        self.directory.join("gpu")
    }

    pub fn configuration(&self) -> PathBuf {
        self.directory.join("device-plugin.toml")
    }

    /// What the plugin reads, when it reads.
    pub fn configure(&self, text: &str) {
        std::fs::write(self.configuration(), text).expect("a file");
    }

    /// A program that sees the simulated machine and nothing of the real one.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("CUDA_") || name.to_string_lossy().starts_with("NVSHARE_") {
                command.env_remove(name);
            }
        }
        command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM").env_remove("STATE_DIRECTORY");
        command.env("LD_LIBRARY_PATH", self.directory.join("lib")).env("CUDA_SIM_DIR", self.machine());
        command.env("CUDA_SIM_GPUS", self.gpus.to_string());
        command.env("CUDA_SIM_NVML_EVENTS", if self.events { "1" } else { "0" });
        command.stdin(Stdio::null());
        command
    }

    pub fn scheduler(&self) -> Process {
        let mut command = self.command(&beside("nvshare-scheduler"));
        command.arg("--socket").arg(self.directory.join("run/scheduler.sock"));
        command.arg("--control-socket").arg(self.control()).arg("--no-bus");
        let process = Process::start("scheduler", command);
        process.log.wait("serves");
        process
    }

    pub fn plugin_command(&self) -> Command {
        let mut command = self.command(PLUGIN.as_ref());
        command.arg("--config").arg(self.configuration());
        command.arg("--kubelet").arg(self.kubelet_directory()).arg("--control").arg(self.control());
        command
    }

    pub fn plugin(&self) -> Process {
        let mut command = self.plugin_command();
        command.args(["--log-level", "debug"]);
        Process::start("plugin", command)
    }

    /// The plugin asked something that it answers and ends.
    pub fn ask_plugin(&self, flag: &str) -> Output {
        self.plugin_command().arg(flag).output().expect("the plugin starts")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// What was built beside the plugin.
fn beside(name: &str) -> PathBuf {
    let path = Path::new(PLUGIN).parent().expect("a directory").join(name);
    assert!(path.exists(), "{} is missing: cargo build --workspace makes it", path.display());
    path
}

/// What a process writes to stderr, as it comes.
#[derive(Debug, Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub fn lines(&self) -> Vec<String> {
        self.0.lock().expect("the log").clone()
    }

    pub fn count(&self, text: &str) -> usize {
        self.lines().iter().filter(|line| line.contains(text)).count()
    }

    /// Waits for a line with that text in it.
    #[track_caller]
    pub fn wait(&self, text: &str) {
        let deadline = Instant::now() + PATIENCE;
        while self.count(text) == 0 {
            assert!(Instant::now() < deadline, "no log line with {text:?}: {:#?}", self.lines());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A process that ends with the test. Its log is shown when the test fails.
#[derive(Debug)]
pub struct Process {
    name: &'static str,
    child: Child,
    pub log: Log,
}

impl Process {
    pub fn start(name: &'static str, mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).spawn().expect("it starts");
        let (stderr, log) = (child.stderr.take().expect("its stderr"), Log::default());
        let to = log.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                to.0.lock().expect("the log").push(line);
            }
        });
        Self { name, child, log }
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: a plain call; the process is a child of this one that was not waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(&mut self) -> ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.child.try_wait().expect("a child") {
                Some(status) => return status,
                None => assert!(Instant::now() < deadline, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn kill(mut self) {
        self.signal(libc::SIGKILL);
        self.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("--- the {}'s log ---\n{}", self.name, self.log.lines().join("\n"));
        }
    }
}
