//! A node in a separate directory: simulated GPUs, the real scheduler, the plugin, and a stand-in for kubelet.

pub mod api;
pub mod dra;
pub mod kubelet;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_sim_gpus::config::gpu_uuid;
pub use kubernetes_test_support::{PATIENCE, Process};

const PLUGIN: &str = env!("CARGO_BIN_EXE_nvshare-device-plugin");

/// The plugin's configuration in most tests, with short times.
pub const QUICK: &str = "[health]\nscheduler-timeout = 1\nquery-interval = 1\n";

/// The node. Dropping this value removes the node's directory.
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
        for part in ["gpu", "lib", "kubelet", "cdi", "plugins", "registry", "claims"] {
            std::fs::create_dir_all(directory.join(part)).expect("a directory");
        }
        let nvml = beside("libnvidia_ml.so");
        std::fs::copy(&nvml, directory.join("lib/libnvidia-ml.so.1")).expect("the simulated NVML");
        let node = Self { directory, gpus, events: true };
        node.configure(QUICK);
        let uuids: Vec<String> = (0..gpus).map(|gpu| gpu_uuid(&node.machine(), gpu)).collect();
        node.inject(&uuids);
        node
    }

    /// Makes the driver support no events.
    pub fn without_events(mut self) -> Self {
        self.events = false;
        self
    }

    pub fn kubelet_directory(&self) -> PathBuf {
        self.directory.join("kubelet")
    }

    /// The directory in which kubelet finds DRA drivers.
    pub fn registry(&self) -> PathBuf {
        self.directory.join("registry")
    }

    /// The scheduler's directory for the sockets of claims.
    pub fn claims(&self) -> PathBuf {
        self.directory.join("claims")
    }

    /// The directory of CDI files.
    pub fn cdi(&self) -> PathBuf {
        self.directory.join("cdi")
    }

    /// The socket of programs without a claim.
    pub fn clients(&self) -> PathBuf {
        self.directory.join("run/scheduler.sock")
    }

    pub fn socket(&self) -> PathBuf {
        self.kubelet_directory().join("nvshare.sock")
    }

    pub fn control(&self) -> PathBuf {
        self.directory.join("control/control.sock")
    }

    /// The directory of the simulated GPUs.
    pub fn machine(&self) -> PathBuf {
        self.directory.join("gpu")
    }

    pub fn configuration(&self) -> PathBuf {
        self.directory.join("device-plugin.toml")
    }

    /// Writes the plugin's configuration.
    pub fn configure(&self, text: &str) {
        std::fs::write(self.configuration(), text).expect("a file");
    }

    /// Writes a CDI file with these devices.
    pub fn inject(&self, uuids: &[String]) {
        let devices: Vec<String> = uuids.iter().map(|uuid| format!("{{\"name\": \"{uuid}\"}}")).collect();
        let kind = "nvshare.com/gpu";
        let mount = format!("{{\"hostPath\": {:?}, \"containerPath\": \"/run/nvshare\"}}", self.directory.join("run"));
        let text = format!(
            "{{\"cdiVersion\": \"0.5.0\", \"kind\": \"{kind}\", \"containerEdits\": {{\"mounts\": [{mount}]}}, \"devices\": [{}]}}",
            devices.join(",")
        );
        // The file is replaced atomically, as on a real node.
        std::fs::write(self.directory.join("cdi/new"), text).expect("a file");
        std::fs::rename(self.directory.join("cdi/new"), self.directory.join("cdi/nvshare.json")).expect("it is moved");
    }

    /// The path of containerd's settings, which may be missing.
    pub fn containerd(&self) -> PathBuf {
        self.directory.join("containerd.toml")
    }

    /// Returns a program that sees only the simulated machine.
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
        self.scheduler_with(&[])
    }

    pub fn scheduler_with(&self, arguments: &[&str]) -> Process {
        let mut command = self.command(&beside("nvshare-scheduler"));
        command.arg("--socket").arg(self.directory.join("run/scheduler.sock"));
        command.arg("--control-socket").arg(self.control()).arg("--no-bus").arg("--claims").arg(self.claims());
        command.args(arguments);
        let process = Process::start("scheduler", command);
        process.log.wait("serves");
        process
    }

    pub fn plugin_command(&self) -> Command {
        let mut command = self.command(PLUGIN.as_ref());
        command.arg("--config").arg(self.configuration());
        command.arg("--kubelet").arg(self.kubelet_directory()).arg("--control").arg(self.control());
        command.arg("--cdi").arg(self.directory.join("cdi")).arg("--containerd").arg(self.containerd());
        command.arg("--plugins").arg(self.directory.join("plugins")).arg("--registry").arg(self.registry());
        command.arg("--claims").arg(self.claims()).env_remove("NODE_NAME");
        if self.directory.join("kubeconfig").exists() {
            command.arg("--kubeconfig").arg(self.directory.join("kubeconfig")).args(["--node", api::NODE]);
        }
        if self.directory.join("agent.toml").exists() {
            command.arg("--agent-config").arg(self.directory.join("agent.toml"));
        }
        command
    }

    pub fn plugin(&self) -> Process {
        let mut command = self.plugin_command();
        command.args(["--log-level", "debug"]);
        Process::start("plugin", command)
    }

    /// Runs the plugin with a flag that makes it print an answer and exit.
    pub fn ask_plugin(&self, flag: &str) -> Output {
        self.plugin_command().arg(flag).output().expect("the plugin starts")
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// The path of a program built beside the plugin.
pub fn beside(name: &str) -> PathBuf {
    let path = Path::new(PLUGIN).parent().expect("a directory").join(name);
    assert!(path.exists(), "{} is missing: cargo build --workspace makes it", path.display());
    path
}
