//! The crash test. Programs start and end on a GPU that cannot hold them all. At random moments a
//! program or the scheduler is killed, stopped, or told to end. All other programs must have
//! correct results, no program may wait for ever, and no memory or lock may be left behind.
//!
//! `NVSHARE_CRASH_SECONDS=1800 cargo nextest run --test crash --no-capture` runs the test for
//! longer. The test runs in episodes, each on a separate machine with a separate seed.
//! `NVSHARE_TEST_SEED` starts with the episode of that seed, and repeats it as far as timing
//! allows.

mod watch;

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use test_support::Dice;
use test_support::machine::*;
use watch::{Stand, Watch};

/// The default of `NVSHARE_CRASH_SECONDS`.
const SECONDS: u64 = 12;
const EPISODE: Duration = Duration::from_secs(6);
/// Number of concurrent programs.
const CROWD: usize = 6;
/// The longest pause between two disturbances, in milliseconds.
const PAUSE: u64 = 100;
/// The programs. Each program checks its own results, and takes a fraction of a second when it runs
/// alone. No program uses unevictable memory, because such memory could leave other programs no
/// room. A program that is refused memory retries, for three reasons. A killed program may briefly
/// hold the GPU's memory after its connection has ended. A program that reconnects slowly to a new
/// scheduler counts as foreign. Around a restart, programs receive only free memory.
const PROGRAMS: &[&str] = &[
    "mix --mem 18M --chunks 3 --reps 2 --rounds 6",
    "mix --mem 12M --chunks 2 --reps 2 --rounds 8 --cpu-ms 5",
    "mix --mem 6M --chunks 6 --reps 8 --rounds 8",
    "streams --mem 16M --streams 2 --threads 3 --rounds 8",
    "graph --mem 16M --replays 24",
    "captures --mem 12M --rounds 6 --capture-ms 15",
    "per-thread --mem 12M --threads 3 --rounds 24",
    "bursts --mem 8M --bursts 12 --pause-ms 10",
    "forks --mem 8M --rounds 2",
];

/// The number of occurrences of each event.
type Counts = BTreeMap<&'static str, u32>;

struct Guest {
    program: Program,
    since: Instant,
    /// The time at which the trace last grew, and its length.
    last: (Instant, u64),
    /// The signal that was sent to end the program, and the program's state at that time.
    harm: Option<(i32, &'static str)>,
    /// The time at which a stopped program continues.
    stopped: Option<Instant>,
}

impl Guest {
    /// Checks how a program ended, and returns a description.
    fn judge(&mut self, counts: &mut Counts, slowest: &mut Duration) {
        let status = self.program.wait();
        let what = match (status.signal(), self.harm) {
            (Some(signal), Some((sent, whom))) if signal == sent => whom,
            _ => {
                self.program.finish();
                *slowest = self.since.elapsed().max(*slowest);
                "finished"
            }
        };
        *counts.entry(what).or_default() += 1;
    }
}

/// The state of the scheduler's process.
enum Scheduler {
    Runs,
    Stopped { until: Instant },
    Away { until: Instant },
}

struct Episode {
    /// The programs are declared before the machine, so that they end and print their output while
    /// the machine's directory exists.
    guests: Vec<Guest>,
    machine: Machine,
    dice: Dice,
    scheduler: Scheduler,
    schedulers: u32,
    watch: Watch,
    counts: Counts,
    /// The longest running time of a program that finished.
    slowest: Duration,
}

impl Episode {
    fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        // Half of the episodes have swap files, and too little host memory for the evicted memory.
        let has_files = dice.one_in(2);
        let setup = Setup {
            // Two or three programs fit at the same time, or nearly all.
            memory: dice.pick(&[48, 64, 128]) * MIB,
            reserve: 2 * MIB,
            context: 2 * MIB,
            anti_thrash: dice.pick(&["auto", "auto", "on", "off"]),
            swap_max: if has_files { "32M" } else { "80%" },
            file_max: has_files.then_some("8G"),
            simulator: vec![("CUDA_SIM_GPU_BANDWIDTH", "8G".into()), ("CUDA_SIM_LINK_BANDWIDTH", "4G".into())],
            ..Setup::default()
        };
        let files = if has_files { ", swap files" } else { "" };
        eprintln!("NVSHARE_TEST_SEED={seed}: {} MiB, anti-thrash {}{files}", setup.memory / MIB, setup.anti_thrash);
        // In half of the episodes, a fake systemd keeps connections for the next scheduler.
        let machine = if dice.one_in(2) { Machine::with_manager(setup) } else { Machine::with_scheduler(setup) };
        let watch = Watch::new(&machine.record(1));
        let (guests, counts, slowest) = (Vec::new(), Counts::new(), Duration::ZERO);
        Self { machine, dice, guests, scheduler: Scheduler::Runs, schedulers: 1, watch, counts, slowest }
    }

    fn run(mut self) -> Counts {
        let begin = Instant::now();
        while begin.elapsed() < EPISODE {
            self.tend();
            while self.guests.len() < CROWD {
                self.invite();
                if !matches!(self.scheduler, Scheduler::Runs) {
                    break; // starts few programs at a time, because many of them are refused
                }
            }
            std::thread::sleep(self.dice.milliseconds(PAUSE));
            self.watch.look();
            self.strike();
            self.check();
        }
        // Waits for the end of all remaining programs.
        while !self.guests.is_empty() || !matches!(self.scheduler, Scheduler::Runs) {
            std::thread::sleep(Duration::from_millis(5));
            self.tend();
            self.check();
        }
        self.machine.wait_until_empty();
        assert_eq!(self.machine.free(), self.machine.setup.memory, "memory is left behind");
        self.tell_scheduler_to_end();
        eprintln!("the slowest took {:.1} s", self.slowest.as_secs_f64());
        self.counts
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn invite(&mut self) {
        let mut launch = self.machine.program(self.dice.pick(PROGRAMS)).env("CUDA_PATIENT", "1");
        // With anti-thrash off, no program uses managed memory: see
        // `a_managed_program_runs_with_anti_thrash_off`.
        let managed = self.dice.one_in(8) && self.machine.setup.anti_thrash != "off";
        if managed {
            launch = launch.env("NVSHARE_ENGINE", "managed");
        }
        let (program, since) = (launch.start(), Instant::now());
        self.guests.push(Guest { program, since, last: (since, 0), harm: None, stopped: None });
    }

    /// Continues stopped programs whose time is over, restarts the scheduler, and checks programs
    /// that have ended.
    fn tend(&mut self) {
        let now = Instant::now();
        match self.scheduler {
            Scheduler::Stopped { until } if now >= until => {
                kill(self.machine.scheduler_pid(), libc::SIGCONT);
                self.scheduler = Scheduler::Runs;
            }
            Scheduler::Away { until } if now >= until => {
                self.machine.start_scheduler();
                self.schedulers += 1;
                self.watch = Watch::new(&self.machine.record(self.schedulers));
                self.scheduler = Scheduler::Runs;
            }
            _ => {}
        }
        for mut guest in std::mem::take(&mut self.guests) {
            if guest.program.poll().is_some() {
                guest.judge(&mut self.counts, &mut self.slowest);
                continue;
            }
            if guest.stopped.is_some_and(|until| now >= until) {
                guest.program.signal(libc::SIGCONT);
                guest.stopped = None;
            }
            let said = guest.program.trace_len();
            if said > guest.last.1 {
                guest.last = (now, said);
            }
            let (silent, name) = (now - guest.last.0, &guest.program.name);
            assert!(silent < PATIENCE, "`{name}` (pid {}): nothing happens for {silent:?}", guest.program.pid());
            self.guests.push(guest);
        }
    }

    /// Disturbs a random process.
    fn strike(&mut self) {
        match self.dice.below(100) {
            0..25 => self.signal_random_program(libc::SIGKILL, Some(Stand::Holds), "holder killed"),
            25..50 => self.signal_random_program(libc::SIGKILL, Some(Stand::Waits), "waiter killed"),
            50..56 => self.signal_random_program(libc::SIGKILL, None, "anybody killed"),
            56..60 => self.signal_random_program(libc::SIGTERM, None, "anybody told to end"),
            60..74 => {
                if let Some(at) = self.find(None) {
                    self.guests[at].program.signal(libc::SIGSTOP);
                    self.guests[at].stopped = Some(Instant::now() + self.dice.milliseconds(300));
                    self.count("anybody stopped");
                }
            }
            74..80 => self.strike_scheduler(),
            _ => {} // no disturbance this time
        }
    }

    fn find(&mut self, stand: Option<Stand>) -> Option<usize> {
        let found = self.guests.iter().enumerate().filter(|(_, guest)| {
            let pid = guest.program.pid();
            guest.harm.is_none() && stand.is_none_or(|stand| self.watch.stand(pid) == stand)
        });
        let found: Vec<usize> = found.map(|(at, _)| at).collect();
        (!found.is_empty()).then(|| self.dice.pick(&found))
    }

    /// Signals a random program. The event is counted once the signal has ended the program.
    fn signal_random_program(&mut self, signal: i32, stand: Option<Stand>, whom: &'static str) {
        if let Some(at) = self.find(stand) {
            let guest = &mut self.guests[at];
            guest.harm = Some((signal, whom));
            guest.program.signal(signal);
        }
    }

    fn strike_scheduler(&mut self) {
        if !matches!(self.scheduler, Scheduler::Runs) {
            return;
        }
        let now = Instant::now();
        // Some stops are so long that programs continue without the scheduler.
        let most = if self.dice.one_in(12) { 5000 } else { 300 };
        let until = now + self.dice.milliseconds(most);
        match self.dice.below(6) {
            0..3 => {
                self.machine.kill_scheduler();
                self.scheduler = Scheduler::Away { until };
                self.count("scheduler killed");
            }
            3..5 => {
                self.tell_scheduler_to_end();
                self.scheduler = Scheduler::Away { until };
                self.count("scheduler told to end");
            }
            _ => {
                kill(self.machine.scheduler_pid(), libc::SIGSTOP);
                self.scheduler = Scheduler::Stopped { until: now + self.dice.milliseconds(300) };
                self.count("scheduler stopped");
            }
        }
    }

    fn tell_scheduler_to_end(&mut self) {
        let pid = self.machine.scheduler_pid();
        kill(pid, libc::SIGTERM);
        wait_for("the scheduler to end when told to", || {
            // SAFETY: all zeros is a valid `siginfo_t`, which `waitid` may write to. WNOWAIT does
            // not reap the child.
            let (found, info) = unsafe {
                let mut info: libc::siginfo_t = std::mem::zeroed();
                let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
                (libc::waitid(libc::P_PID, pid, &mut info, flags), info)
            };
            // SAFETY: `waitid` has filled in these fields. The pid is 0 if the child has not
            // changed its state.
            let (ended, status) = unsafe { (info.si_pid() != 0, info.si_status()) };
            assert!(found == 0 && (!ended || (info.si_code, status) == (libc::CLD_EXITED, 0)), "it ends with {status}");
            ended.then_some(())
        });
        self.machine.kill_scheduler();
    }

    /// Checks the invariants.
    fn check(&mut self) {
        self.watch.look();
        let most = if self.machine.setup.anti_thrash == "on" { 1 } else { CROWD };
        assert!(self.watch.most_holders <= most, "{} clients held the lock at once", self.watch.most_holders);
        if let Some(used) = watch::used(&self.machine.path("gpu")) {
            assert!(used <= self.machine.setup.memory, "{used} bytes of the GPU are in use");
        }
    }
}

#[test]
fn other_programs_finish_correctly_despite_random_kills() {
    let seconds = std::env::var("NVSHARE_CRASH_SECONDS").map_or(SECONDS, |text| text.parse().expect("seconds"));
    let (begin, seed) = (Instant::now(), Dice::seed());
    let mut counts = Counts::new();
    // The test continues until each kind of event has occurred often enough. This takes longer on a
    // busy machine.
    let few = (seconds as u32 / 20).max(1);
    let is_enough = |counts: &Counts| {
        let all = ["holder killed", "waiter killed", "scheduler killed", "scheduler told to end", "finished"];
        all.iter().all(|what| counts.get(what).is_some_and(|count| *count >= few))
    };
    for episode in 0.. {
        for (what, n) in Episode::new(seed + episode).run() {
            *counts.entry(what).or_default() += n;
        }
        eprintln!("{:.0} s: {counts:?}", begin.elapsed().as_secs_f64());
        if begin.elapsed() >= Duration::from_secs(seconds) && is_enough(&counts) {
            break;
        }
    }
}

#[test]
fn a_managed_program_runs_with_anti_thrash_off() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "off", ..Setup::default() });
    machine.program("mix --mem 16M --reps 1 --rounds 2").env("NVSHARE_ENGINE", "managed").start().finish();
}

#[test]
fn a_program_started_right_after_a_restart_gets_room() {
    let mut machine = Machine::with_scheduler(Setup { memory: 64 * MIB, reserve: 2 * MIB, ..Setup::default() });
    let mut before = [(); 2].map(|()| machine.program("mix --mem 27M --reps 4 --rounds 40").start());
    before.iter().for_each(|program| machine.wait_for_grants(program, 1));
    machine.kill_scheduler();
    machine.start_scheduler();
    machine.program("mix --mem 16M --reps 1 --rounds 2").start().finish();
    before.iter_mut().for_each(|program| drop(program.finish()));
}
