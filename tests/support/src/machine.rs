//! A simulated machine for each test: a GPU, a scheduler, and real programs with `libnvshare.so`
//! preloaded. All files are in one directory. When the test ends, its processes are killed. If the
//! test fails, the output of the processes is printed.

mod card;
mod program;

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::AtomicU32;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use serde_json::Value;

pub use card::Card;

pub use crate::record::{Move, assert_one_holder, evicted, grants, holders, turns};
pub use crate::{Dice, MIB, PATIENCE, kill, wait_for, wait_within};
pub use program::{Launch, Program, Report};

use crate::daemon::Client;
use crate::manager::Manager;
use crate::record::Record;
use crate::{Directory, artifact};
use program::{show, spawn};

/// The properties of a machine. The defaults keep tests short.
#[derive(Debug, Clone)]
pub struct Setup {
    pub memory: u64,
    pub reserve: u64,
    pub context: u64,
    pub time_quantum: Duration,
    pub anti_thrash: &'static str,
    /// The card's speeds, its host and NVML's capabilities. The simulator's settings override them.
    pub card: Card,
    /// The limit of host memory for swapped memory.
    pub swap_max: &'static str,
    /// The size limit of swap files, if swap files are used. The swap files are in the programs'
    /// directory, because temporary files may be in RAM.
    pub file_max: Option<&'static str>,
    /// The idle time after which programs sleep if other programs need the room.
    pub sleep_after: &'static str,
    /// The placement of programs that choose no GPU.
    pub placement: &'static str,
    /// Rules in the configuration's format.
    pub rules: String,
    /// Further settings of the simulator.
    pub simulator: Vec<(&'static str, String)>,
    /// Symbols that the driver lacks. Older drivers lack some symbols, too.
    pub without: &'static str,
}

/// A time quantum that outlasts every test.
pub const HOUR: Duration = Duration::from_secs(3600);

/// The scheduler's default limit of host memory for swapped memory. A card may lower the limit.
const ANY_SWAP: &str = "80%";

impl Default for Setup {
    fn default() -> Self {
        Self {
            memory: 256 * MIB,
            reserve: 8 * MIB,
            context: 4 * MIB,
            time_quantum: Duration::from_millis(250),
            anti_thrash: "auto",
            card: Card::of_environment(),
            swap_max: ANY_SWAP,
            file_max: None,
            sleep_after: "5min",
            placement: "none",
            rules: String::new(),
            simulator: Vec::new(),
            without: "",
        }
    }
}

impl Setup {
    /// The bytes of the GPU that `clients` clients can use together.
    pub fn capacity(&self, clients: u64) -> u64 {
        self.memory - self.reserve - clients * self.context
    }
}

#[derive(Debug)]
pub struct Machine {
    pub setup: Setup,
    directory: Directory,
    scheduler: Option<Child>,
    /// The fake systemd that stores connections when a scheduler ends.
    pub manager: Option<Manager>,
    /// The number of schedulers started so far. Each writes its own log and record.
    runs: u32,
    launched: AtomicU32,
    /// The records of all schedulers. Each has been read up to some point.
    records: Mutex<Vec<Record>>,
}

impl Machine {
    /// Creates a machine without a scheduler.
    pub fn new(setup: Setup) -> Self {
        let directory = Directory::new();
        let libraries = directory.0.join("lib");
        fs::create_dir(&libraries).expect("a directory for the libraries");
        // This directory outlives the scheduler, like a service's runtime directory.
        fs::create_dir(directory.0.join("run")).expect("a directory for the socket");
        for (file, name) in [("libcuda.so", "libcuda.so.1"), ("libnvidia_ml.so", "libnvidia-ml.so.1")] {
            symlink(artifact(file), libraries.join(name)).expect("a link to a library");
        }
        if !setup.without.is_empty() {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda-sim/install.sh");
            let from = artifact("libcuda.so");
            let mut install = Command::new(script);
            install.arg(&libraries).arg(from.parent().expect("its directory")).env("WITHOUT", setup.without);
            assert!(install.status().is_ok_and(|status| status.success()), "install.sh");
        }
        let config = format!(
            "anti-thrash = \"{}\"\nplacement = \"{}\"\nsleep-after = \"{}\"\n[memory]\nreserve = {}\ncontext = {}\n[swap]\nmax = \"{}\"\n{}{}",
            setup.anti_thrash,
            setup.placement,
            setup.sleep_after,
            setup.reserve,
            setup.context,
            setup.card.swap_max(setup.memory).filter(|_| setup.swap_max == ANY_SWAP).unwrap_or(setup.swap_max.into()),
            setup.file_max.map_or_else(String::new, |most| {
                format!(
                    "file = {:?}\nfile-max = \"{most}\"\n",
                    artifact("nvshare-scheduler").with_file_name("swap-files")
                )
            }),
            setup.rules
        );
        fs::write(directory.0.join("nvshare.toml"), config).expect("the configuration");
        Self {
            setup,
            directory,
            scheduler: None,
            manager: None,
            runs: 0,
            launched: AtomicU32::new(0),
            records: Mutex::default(),
        }
    }

    /// Creates a machine with a scheduler whose connections outlive it.
    pub fn with_manager(setup: Setup) -> Self {
        let mut machine = Self::new(setup);
        machine.manager = Some(Manager::new(&machine.directory.0));
        machine.start_scheduler();
        machine
    }

    /// Creates a machine with a scheduler.
    pub fn with_scheduler(setup: Setup) -> Self {
        let mut machine = Self::new(setup);
        machine.start_scheduler();
        machine
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.0.join(name)
    }

    pub fn socket(&self) -> PathBuf {
        self.path("run/scheduler.sock")
    }

    // ---- the scheduler -------------------------------------------------------------------------------------------

    pub fn start_scheduler(&mut self) {
        self.start_scheduler_with(|_| ());
    }

    /// Starts a scheduler. `change` extends its command line.
    pub fn start_scheduler_with(&mut self, change: impl FnOnce(&mut Command)) {
        assert!(self.scheduler.is_none(), "it runs already");
        self.runs += 1;
        let log = self.path(&format!("scheduler-{}.log", self.runs));
        let mut command = Command::new(artifact("nvshare-scheduler"));
        command.arg("--socket").arg(self.socket());
        command.arg("--control-socket").arg(self.path("control/control.sock"));
        command.arg("--config").arg(self.path("nvshare.toml"));
        command.arg("--record").arg(self.record(self.runs));
        command.arg("--time-quantum-ms").arg(self.setup.time_quantum.as_millis().to_string());
        command.args(["--no-bus", "--log-level", "debug"]);
        command.env_remove("NOTIFY_SOCKET").env_remove("JOURNAL_STREAM");
        self.simulate(&mut command);
        change(&mut command);
        if let Some(manager) = &self.manager {
            command = manager.wrap(&command);
        }
        command.stderr(File::create(&log).expect("the scheduler's log"));
        self.scheduler = Some(spawn(&mut command));
        // An error message says that another scheduler "already serves" the socket.
        wait_for("the scheduler to serve", || fs::read_to_string(&log).ok()?.contains(" serves /").then_some(()));
    }

    pub fn scheduler_pid(&self) -> u32 {
        self.scheduler.as_ref().expect("a scheduler runs").id()
    }

    pub fn kill_scheduler(&mut self) {
        let mut child = self.scheduler.take().expect("a scheduler runs");
        child.kill().expect("kill the scheduler");
        child.wait().expect("its end");
    }

    /// Terminates the scheduler with SIGTERM.
    pub fn stop_scheduler(&mut self) {
        // SAFETY: `kill` has no preconditions. The pid is valid, since the child has not been
        // reaped.
        unsafe { libc::kill(self.scheduler_pid() as i32, libc::SIGTERM) };
        self.scheduler.take().expect("a scheduler runs").wait().expect("its end");
    }

    /// Runs `nvsharectl` and returns its output, even if it fails.
    pub fn ctl_output(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new(artifact("nvsharectl"));
        command.arg("--control").arg(self.path("control/control.sock")).args(arguments);
        command.env_remove("LD_PRELOAD").stdin(Stdio::null()).output().expect("nvsharectl starts")
    }

    /// Returns an `nvsharectl` command that the test can start concurrently.
    pub fn order(&self, words: &str) -> Launch<'_> {
        let control = self.path("control/control.sock");
        let mut launch = self.command(&artifact("nvsharectl"), &["--control"]).without_nvshare();
        launch.command.arg(control).args(words.split_whitespace());
        launch.name = format!("nvsharectl {words}");
        launch
    }

    /// Runs `nvsharectl`, which must fail, and returns its error message.
    #[track_caller]
    pub fn ctl_fails(&self, arguments: &[&str]) -> String {
        let output = self.ctl_output(arguments);
        assert!(!output.status.success(), "nvsharectl {arguments:?} succeeds");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// Runs `nvsharectl`, which must succeed.
    #[track_caller]
    pub fn ctl(&self, arguments: &[&str]) -> String {
        let output = self.ctl_output(arguments);
        let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "nvsharectl {arguments:?}: {}\n{stderr}", output.status);
        stdout.into_owned()
    }

    #[track_caller]
    pub fn status(&self) -> Value {
        serde_json::from_str(&self.ctl(&["--json", "status"])).expect("JSON")
    }

    /// Waits until the scheduler has no clients and no used memory.
    #[track_caller]
    pub fn wait_until_empty(&self) {
        wait_for("the scheduler to have no client and no bytes", || {
            let status = self.status();
            let bytes =
                |key: &str| status["gpus"].as_array().expect("GPUs").iter().map(|g| number(&g[key])).sum::<u64>();
            let clients = status["clients"].as_array().expect("clients").len();
            (clients == 0 && bytes("demand") + bytes("resident") + bytes("swapped") == 0).then_some(())
        });
    }

    /// The path of the record of scheduler number `run`.
    pub fn record(&self, run: u32) -> PathBuf {
        self.path(&format!("record-{run}"))
    }

    /// The moves of all schedulers so far, in order.
    pub fn moves(&self) -> Vec<Move> {
        self.read_moves(|all| all.cloned().collect())
    }

    fn read_moves<T>(&self, read: impl FnOnce(&mut dyn Iterator<Item = &Move>) -> T) -> T {
        let mut records = self.records.lock().unwrap_or_else(PoisonError::into_inner);
        let known = records.len() as u32;
        records.extend((known + 1..=self.runs).map(|run| Record::new(&self.record(run), run)));
        read(&mut records.iter_mut().flat_map(|record| record.moves()))
    }

    /// Waits for a move. The first `skip` moves don't count.
    #[track_caller]
    pub fn wait_for_move(&self, skip: usize, what: &str, mut wanted: impl FnMut(&Move) -> bool) -> Move {
        wait_for(what, || self.read_moves(|all| all.skip(skip).find(|m| wanted(m)).cloned()))
    }

    /// Connects a client that sends only the messages that a test sends.
    pub fn client(&self) -> Client {
        Client { devices: Some(self.path("gpu")), ..Client::welcomed(&self.socket()) }
    }

    /// Waits until the program has been granted the lock `count` times.
    #[track_caller]
    pub fn wait_for_grants(&self, program: &Program, count: usize) {
        let what = format!("grant {count} of {}", program.name);
        let is_own = |m: &&Move| m.what == "grant" && m.pid == program.pid();
        wait_for(&what, || self.read_moves(|all| (all.filter(is_own).count() >= count).then_some(())));
    }

    /// Waits until memory of each of these programs has been evicted and restored.
    #[track_caller]
    pub fn wait_for_exchange(&self, programs: &[Program]) {
        for program in programs {
            let what = format!("memory of `{}` (pid {}) to leave and come back", program.name, program.pid());
            wait_for(&what, || {
                self.read_moves(|all| {
                    let mut own = all.filter(|m| m.pid == program.pid());
                    (own.any(|m| m.what == "freed" && m.bytes > 0) && own.any(|m| m.what == "mapped")).then_some(())
                })
            });
        }
    }

    pub fn scheduler_log(&self) -> String {
        (1..=self.runs)
            .map(|run| fs::read_to_string(self.path(&format!("scheduler-{run}.log"))).unwrap_or_default())
            .collect()
    }

    /// Waits until a line of the scheduler's log contains the text, and returns that line. Programs
    /// may receive a message before the scheduler logs it.
    #[track_caller]
    pub fn wait_for_log(&self, text: &str) -> String {
        wait_for(&format!("the log to say {text:?}"), || {
            self.scheduler_log().lines().find(|line| line.contains(text)).map(str::to_owned)
        })
    }

    // ---- programs ------------------------------------------------------------------------------------------------

    /// Sets the environment of a process for the simulated machine.
    fn simulate(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if ["CUDA_", "NVSHARE_", "LD_PRELOAD"].iter().any(|begin| name.starts_with(begin)) {
                command.env_remove(&*name);
            }
        }
        command.env("LD_LIBRARY_PATH", self.path("lib"));
        command.env("CUDA_SIM_DIR", self.path("gpu")).env("NVSHARE_DEVICES", self.path("gpu"));
        command.env("CUDA_SIM_MEMORY", self.setup.memory.to_string());
        command.env("CUDA_SIM_CONTEXT", self.setup.context.to_string());
        self.setup.card.apply(self.setup.memory, command);
        command.envs(self.setup.simulator.iter().map(|(name, value)| (*name, value)));
    }

    /// Runs `cuda-program` with these arguments, with nvshare and its trace.
    pub fn program(&self, words: &str) -> Launch<'_> {
        let mut launch = self.command(&artifact("cuda-program"), &[]);
        launch.command.args(words.split_whitespace());
        launch.name = words.to_owned();
        launch
    }

    /// Runs `cuda-program` in the cgroup of this `cgroup.procs` file.
    pub fn program_in(&self, group: &Path, words: &str) -> Launch<'_> {
        let script = format!("echo $$ > {} && exec {} {words}", group.display(), artifact("cuda-program").display());
        self.command(Path::new("/bin/sh"), &["-c", &script])
    }

    /// Runs a command with nvshare and its trace.
    pub fn command(&self, program: &Path, arguments: &[&str]) -> Launch<'_> {
        let mut command = Command::new(program);
        command.args(arguments);
        self.simulate(&mut command);
        command.env("LD_PRELOAD", artifact("libnvshare.so"));
        command.env("NVSHARE_SOCKET", self.socket()).env("NVSHARE_DEBUG", "1");
        Launch { machine: self, command, name: format!("{} {}", program.display(), arguments.join(" ")) }
    }

    /// Runs `cuda-program` with these arguments under `nvsharectl run`. The library is not
    /// preloaded into `nvsharectl`.
    pub fn run(&self, options: &[&str], words: &str) -> Launch<'_> {
        let mut launch = self.command(&artifact("nvsharectl"), &["run"]);
        launch.command.env_remove("LD_PRELOAD").arg("--library").arg(artifact("libnvshare.so")).args(options);
        launch.command.arg("--").arg(artifact("cuda-program")).args(words.split_whitespace());
        launch.name = format!("nvsharectl run {options:?} {words}");
        launch
    }

    /// Stops a program while it has no work on the GPU. A real GPU continues the work of a stopped
    /// process, but the simulated GPU waits for the process.
    #[track_caller]
    pub fn stop_beside_work(&self, program: &Program) {
        wait_for("a moment without work", || {
            program.signal(libc::SIGSTOP);
            wait_for("it to be stopped", || {
                let stat = fs::read_to_string(format!("/proc/{}/stat", program.pid())).ok()?;
                stat.rsplit(") ").next()?.starts_with('T').then_some(())
            });
            let idle = fs::read_dir(self.path("gpu")).expect("the simulator's files").flatten().all(|file| {
                let name = file.file_name().to_string_lossy().into_owned();
                !name.starts_with("gpu") || is_unlocked(&file.path())
            });
            if !idle {
                program.signal(libc::SIGCONT);
            }
            idle.then_some(())
        });
    }

    /// Free bytes of the GPU, as the driver reports them to a program without nvshare.
    #[track_caller]
    pub fn free(&self) -> u64 {
        self.free_on(0)
    }

    /// Free bytes of one of several GPUs.
    #[track_caller]
    pub fn free_on(&self, gpu: usize) -> u64 {
        let report = self.program(&format!("info --device {gpu}")).without_nvshare().start().finish();
        report.number("free") + self.setup.context // the context of the program that reports
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut child) = self.scheduler.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
        if thread::panicking() {
            for run in 1..=self.runs {
                show(&format!("scheduler {run}"), &self.path(&format!("scheduler-{run}.log")));
                show(&format!("record of scheduler {run}"), &self.record(run));
            }
        }
    }
}

pub fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

fn is_unlocked(path: &Path) -> bool {
    use std::os::fd::AsRawFd;
    let file = File::open(path).expect("a file of the simulator");
    // SAFETY: `file` keeps the descriptor open during the call. Closing it releases the lock.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}
