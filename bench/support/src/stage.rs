//! Sets up benchmarks with real programs: the programs' directory, a GPU whose free memory another
//! program limits, and a scheduler.

use std::{
    io::{Read, Write},
    os::unix::{net::UnixStream, process::CommandExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use serde_json::Value;

#[derive(Debug)]
pub struct Stage {
    programs: PathBuf,
    directory: PathBuf,
}

/// Returns the value of an option on the command line.
pub fn option(name: &str, default: &str) -> String {
    std::env::args().skip_while(|a| a != name).nth(1).unwrap_or_else(|| default.to_owned())
}

/// Parses a size such as `14G` or `7.2G`.
pub fn bytes(text: &str) -> u64 {
    let number = text.trim_end_matches(['K', 'M', 'G']);
    let shift = match text.chars().last() {
        Some('K') => 10,
        Some('M') => 20,
        Some('G') => 30,
        _ => 0,
    };
    (number.parse::<f64>().expect("a size") * (1u64 << shift) as f64) as u64
}

/// Makes the command's process end when the thread that starts it ends, however that happens. Otherwise a
/// benchmark that fails would leave programs that disturb later measurements.
fn end_with_this_thread(command: &mut Command) {
    // SAFETY: the closure makes one system call, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| match libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        })
    };
}

/// Kills a process and reaps it.
pub fn kill(mut child: Child) {
    let _ = child.kill();
    let _ = child.wait();
}

/// Reads a value of the scheduler's metrics from the socket, summed over GPUs.
pub fn metric(socket: &Path, name: &str) -> f64 {
    let mut stream = UnixStream::connect(socket).expect("the scheduler serves metrics");
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("it reads");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("an answer");
    let values = text.lines().filter(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
    values.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

impl Stage {
    /// Reads the programs' directory from `--programs DIR`. The default is the benchmark's
    /// directory.
    pub fn from_arguments() -> Self {
        let exe = std::env::current_exe().expect("the path of this program");
        let built = exe.parent().and_then(Path::parent).map(Path::to_owned).unwrap_or_default();
        let programs = match option("--programs", "").as_str() {
            "" => built,
            directory => PathBuf::from(directory),
        };
        let directory = std::env::temp_dir().join(format!("nvshare-bench-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("control")).expect("a directory");
        Self { programs, directory }
    }

    pub fn program(&self, words: &[&str]) -> Command {
        let mut command = Command::new(self.programs.join("cuda-program"));
        command.args(words).stderr(Stdio::null());
        end_with_this_thread(&mut command);
        command
    }

    /// Creates a command that runs a program under nvshare.
    pub fn shared(&self, words: &[&str]) -> Command {
        let mut command = self.program(words);
        self.under_nvshare(&mut command);
        command
    }

    /// Makes a command preload the library and use this stage's scheduler.
    pub fn under_nvshare<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        end_with_this_thread(command);
        command.env("LD_PRELOAD", self.programs.join("libnvshare.so")).env("NVSHARE_SOCKET", self.socket())
    }

    /// The programs' directory.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Makes this process and its children use a simulated GPU of `memory` bytes without artificial
    /// delays, with further settings. The caller guarantees that the process is single-threaded.
    pub fn simulate(&self, memory: u64, settings: &[(&str, String)]) {
        let (libraries, directory) = (self.file("simulator"), self.file("gpu"));
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/cuda-sim/install.sh");
        let status = Command::new(script).arg(&libraries).arg(self.programs()).status();
        let is_built = status.is_ok_and(|status| status.success());
        assert!(is_built, "build the simulated GPU first: cargo build --release -p cuda-sim -p nvml-sim");
        let fast = || "1T".to_owned();
        let all = [
            ("LD_LIBRARY_PATH", libraries.display().to_string()),
            ("CUDA_SIM_DIR", directory.display().to_string()),
            ("NVSHARE_DEVICES", directory.display().to_string()),
            ("CUDA_SIM_MEMORY", memory.to_string()),
            ("CUDA_SIM_GPU_BANDWIDTH", fast()),
            ("CUDA_SIM_LINK_BANDWIDTH", fast()),
        ];
        // SAFETY: the process is single-threaded, which the caller guarantees.
        all.iter().chain(settings).for_each(|(name, value)| unsafe { std::env::set_var(name, value) });
    }

    /// Starts a program that occupies all but `leave` bytes of the GPU.
    pub fn ballast(&self, leave: u64) -> Child {
        let free = self.ask(&["info"]).and_then(|info| info["free"].as_u64()).expect("free memory");
        // `info` measures the free memory while its own context exists, so room for the ballast's
        // context remains.
        let bytes = free.saturating_sub(leave).to_string();
        let holder = self.program(&["stranger", "--mem", &bytes, "--seconds", "3600"]).stdout(Stdio::null()).spawn();
        std::thread::sleep(Duration::from_secs(5));
        holder.expect("it runs")
    }

    /// The path of a file of this run.
    pub fn file(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.join("scheduler.sock")
    }

    /// Returns the output of a program, or `None` if the program fails.
    pub fn ask(&self, words: &[&str]) -> Option<Value> {
        let output = self.program(words).output().ok().filter(|output| output.status.success())?;
        serde_json::from_slice(&output.stdout).ok()
    }

    /// Starts a scheduler with a configuration. The scheduler records events to `record`.
    pub fn scheduler(&self, configuration: &str, record: &Path) -> Child {
        let _ = std::fs::remove_file(self.socket());
        let config = self.directory.join("nvshare.toml");
        std::fs::write(&config, configuration).expect("a configuration");
        let mut command = Command::new(self.programs.join("nvshare-scheduler"));
        command
            .arg("--no-bus")
            .arg("--socket")
            .arg(self.socket())
            .arg("--config")
            .arg(config)
            .arg("--record")
            .arg(record);
        command.arg("--control-socket").arg(self.directory.join("control/control.sock"));
        end_with_this_thread(&mut command);
        let child = command.stderr(Stdio::null()).spawn().expect("the scheduler runs");
        while !self.socket().exists() {
            std::thread::sleep(Duration::from_millis(10));
        }
        // Waits until the scheduler has established that the other processes on the GPU are not
        // clients of an earlier scheduler.
        std::thread::sleep(Duration::from_millis(1500));
        child
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}
