//! Limits of memory that the driver keeps for whole control groups: the simulated NVML has them, and says which are set.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use cuda_sim_gpus::{Config, limits};
use nvshare_wire::{Uuid, version};
use test_support::cgroup::*;
use test_support::daemon::*;
use test_support::{artifact, has_own_process};

const MIB: u64 = 1 << 20;
const TOTAL: u64 = 1024 * MIB;
/// For a context, and so for each program beyond what it may have.
const CONTEXT: u64 = 16 * MIB;

/// The simulated GPU, with NVML beside it.
struct Machine {
    directory: Directory,
    units: [Unit; 2],
}

impl Machine {
    /// `None` where no control groups can be made, and where the test runs in another process: a process is in one control
    /// group.
    fn new(test: &str) -> Option<Self> {
        if !has_own_process(&format!("driver_limits::{test}"), &[]) {
            return None;
        }
        let unit = |letter| Unit::new(&format!("nvshare-limits-{}-{letter}.service", std::process::id()));
        let units = [unit('a')?, unit('b')?];
        let directory = Directory::new();
        fs::copy(artifact("libnvidia_ml.so"), directory.0.join("libnvidia-ml.so.1")).expect("NVML");
        fs::create_dir(state(&directory.0)).expect("the state directory");
        Some(Self { directory, units })
    }

    /// Starts a scheduler. `setters`: who may set limits there.
    fn start(&self, setters: &str, change: impl FnOnce(&mut Command)) -> Daemon {
        let (file, libraries) = (self.configuration(), self.directory.0.clone());
        Daemon::start_in(Directory::new(), None, |command, _| {
            command.arg("--config").arg(file).env("STATE_DIRECTORY", state(&libraries));
            command.env("LD_LIBRARY_PATH", libraries).env("CUDA_SIM_LIMITS", setters);
            command.env("CUDA_SIM_MEMORY", TOTAL.to_string());
            change(command);
        })
    }

    fn configuration(&self) -> PathBuf {
        self.directory.0.join("nvshare.toml")
    }

    fn configure(&self, driver_limits: bool, rules: &str) {
        let text = format!("[memory]\ncontext = {CONTEXT}\ndriver-limits = {driver_limits}\n{rules}");
        fs::write(self.configuration(), text).expect("the configuration");
    }

    /// A program in one of its units.
    fn program(&self, daemon: &Daemon, unit: usize) -> Client {
        let _stay = self.units[unit].enter();
        Client::welcomed_as(&daemon.socket(), version::LIMITS)
    }

    /// What the driver bounds of its units.
    fn limits(&self) -> [Option<u64>; 2] {
        let all = limits::all();
        let of = |unit: &Unit| Some(all.iter().find(|limit| limit.cgroup == unit.directory())?.hard);
        [of(&self.units[0]), of(&self.units[1])]
    }

    #[track_caller]
    fn wait(&self, expected: [Option<u64>; 2]) {
        self.until(&format!("{expected:?}"), |limits| *limits == expected);
    }

    #[track_caller]
    fn until(&self, what: &str, is_it: impl Fn(&[Option<u64>; 2]) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !is_it(&self.limits()) {
            assert!(Instant::now() < end, "limits are {:?} instead of {what}", self.limits());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    }
}

fn state(directory: &Path) -> PathBuf {
    directory.join("state")
}

fn rule(most: &str) -> String {
    format!("[[rule]]\nunit = \"**/nvshare-limits-*.service\"\nmemory-max = \"{most}\"\n")
}

/// Who may set limits, so that it works here.
fn setters() -> &'static str {
    if is_root() { "root" } else { "anybody" }
}

fn reload(daemon: &Daemon) {
    assert_eq!(daemon.ctl(&["reload"]).code, Some(0));
}

fn attach(client: &Client) {
    client.attach_gpu(Uuid(Config::get().uuid(0)), TOTAL);
}

/// It has so much, and knows every limit that it was told.
fn report(client: &Client, bytes: u64) {
    client.send(memory_after(u32::MAX, u32::MAX, bytes, bytes));
}

/// The effective capabilities of each thread, by its name.
fn capabilities(daemon: &Daemon) -> Vec<(String, u64)> {
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.child.id())).expect("it runs");
    let read = |thread: fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).ok()?;
        let value = |key: &str| Some(status.lines().find_map(|line| line.strip_prefix(key))?.trim().to_owned());
        assert_eq!(value("CapEff:"), value("CapPrm:"), "{status}");
        Some((value("Name:")?, u64::from_str_radix(&value("CapEff:")?, 16).ok()?))
    };
    threads.filter_map(|thread| read(thread.ok()?)).collect()
}

#[test]
fn the_driver_bounds_what_a_rule_bounds_for_as_long_as_it_does() {
    let Some(machine) = Machine::new("the_driver_bounds_what_a_rule_bounds_for_as_long_as_it_does") else { return };
    machine.configure(true, &rule("256M"));
    let daemon = machine.start(setters(), finds_version_2);
    let program = machine.program(&daemon, 0);
    machine.wait([Some(256 * MIB + CONTEXT), None]);
    let others = [machine.program(&daemon, 0), machine.program(&daemon, 1)];
    machine.wait([Some(256 * MIB + 2 * CONTEXT), Some(256 * MIB + CONTEXT)]);

    // What is there can stay, or come back.
    attach(&program);
    report(&program, 200 * MIB);
    machine.configure(true, &rule("128M"));
    reload(&daemon);
    report(&program, 200 * MIB);
    machine.wait([Some(256 * MIB + 2 * CONTEXT), Some(128 * MIB + CONTEXT)]);
    report(&program, 10 * MIB);
    machine.wait([Some(128 * MIB + 2 * CONTEXT), Some(128 * MIB + CONTEXT)]);

    machine.configure(true, &rule("25%"));
    reload(&daemon);
    machine.wait([Some(256 * MIB + 2 * CONTEXT), Some(256 * MIB + CONTEXT)]);
    machine.configure(true, &rule("infinity"));
    reload(&daemon);
    machine.wait([None, None]);
    machine.configure(true, &rule("100%"));
    reload(&daemon);
    machine.wait([Some(TOTAL), Some(TOTAL)]);
    drop(others);
    machine.wait([Some(TOTAL), None]);
    machine.configure(false, &rule("100%"));
    reload(&daemon);
    machine.wait([None, None]);
    machine.configure(true, &rule("32M"));
    reload(&daemon);
    // It may still act on the limit that it had, of all that the GPU has for it.
    machine.until("nearly all of the GPU", |limits| matches!(limits, [Some(bytes), None] if *bytes > TOTAL / 2));
    report(&program, 10 * MIB);
    machine.wait([Some(32 * MIB + CONTEXT), None]);
    drop(program);
    machine.wait([None, None]);

    // One that stops takes everything with it, also of who is there still.
    let _program = machine.program(&daemon, 1);
    machine.wait([None, Some(32 * MIB + CONTEXT)]);
    assert_eq!(daemon.log.count("driver-limits"), 0, "there is nothing to say");
    daemon.stop();
    assert_eq!(machine.limits(), [None, None]);
    assert_eq!(fs::read_dir(state(&machine.directory.0)).expect("the directory").count(), 0, "nothing is left");
}

#[test]
fn no_thread_but_nvmls_has_a_privilege_and_that_one_no_other() {
    let Some(machine) = Machine::new("no_thread_but_nvmls_has_a_privilege_and_that_one_no_other").filter(|_| is_root())
    else {
        return;
    };
    // CAP_SYS_ADMIN and CAP_DAC_OVERRIDE.
    for (driver_limits, expected) in [(true, 1 << 21 | 1 << 1), (false, 0)] {
        machine.configure(driver_limits, "");
        let daemon = machine.start("root", |_| ());
        daemon.log.wait("found");
        let all = capabilities(&daemon);
        assert!(all.len() > 2, "{all:x?}");
        for (name, set) in all {
            assert_eq!(set, if name == "nvml" { expected } else { 0 }, "thread {name} with {driver_limits}");
        }
    }
}

#[test]
fn a_successor_takes_away_what_one_that_was_killed_has_left() {
    let Some(machine) = Machine::new("a_successor_takes_away_what_one_that_was_killed_has_left") else { return };
    for is_on_still in [true, false] {
        machine.configure(true, &rule("256M"));
        let daemon = machine.start(setters(), finds_version_2);
        let programs = [machine.program(&daemon, 0), machine.program(&daemon, 1)];
        machine.wait([Some(256 * MIB + CONTEXT); 2]);
        daemon.kill();
        programs.iter().for_each(Client::until_end);
        assert_eq!(machine.limits(), [Some(256 * MIB + CONTEXT); 2], "nobody is there to take them away");

        machine.configure(is_on_still, &rule("256M"));
        let daemon = machine.start(setters(), finds_version_2);
        let _program = machine.program(&daemon, 1);
        machine.wait([None, is_on_still.then_some(256 * MIB + CONTEXT)]);
        daemon.stop();
    }
}

#[test]
fn where_it_cannot_be_done_one_line_says_why_and_programs_go_on() {
    let Some(machine) = Machine::new("where_it_cannot_be_done_one_line_says_why_and_programs_go_on") else { return };
    machine.configure(true, &rule("256M"));
    let says = |setters: &str, change: fn(&mut Command), why: &str| {
        let daemon = machine.start(setters, change);
        let programs = [0, 1, 0].map(|unit| machine.program(&daemon, unit));
        let line = daemon.log.wait("driver-limits has no effect");
        assert!(line.contains(why), "{line}");
        programs.iter().for_each(attach);
        reload(&daemon);
        machine.configure(true, &rule("128M"));
        reload(&daemon);
        drop(programs);
        let log = daemon.log.clone();
        daemon.stop();
        assert_eq!(log.count("driver-limits"), 1);
        assert_eq!(machine.limits(), [None; 2]);
    };
    says("nobody", finds_version_2, "the driver does not let the scheduler set them");
    says("no", finds_version_2, "the driver bounds no control groups here");
    if is_root() {
        says("anybody", finds_no_version_2, "control groups of version 2 are not at /sys/fs/cgroup");
    }
    // An older library, in which the linker finds no such name.
    let library = machine.directory.0.join("libnvidia-ml.so.1");
    let mut bytes = fs::read(&library).expect("NVML");
    let name = b"\0nvmlDeviceSetMemoryLimits_v1\0";
    let places: Vec<usize> = (0..bytes.len() - name.len()).filter(|at| bytes[*at..].starts_with(name)).collect();
    assert!(!places.is_empty());
    places.iter().for_each(|at| bytes[at + 1] = b'_');
    fs::write(&library, bytes).expect("it can be written");
    says(setters(), finds_version_2, "the driver bounds no control groups here");
    machine.configure(false, &rule("256M"));
    let daemon = machine.start(setters(), finds_version_2);
    attach(&machine.program(&daemon, 0));
    let log = daemon.log.clone();
    daemon.stop();
    assert_eq!(log.count("driver-limits"), 0, "who does not ask for it hears nothing");
}
