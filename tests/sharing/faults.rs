//! Processes and drivers that die, stop or disappear at any moment: all other processes get correct
//! results, and none hangs. The tests run real processes on the simulated GPU.

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use test_support::machine::*;

/// A GPU that two programs with the arguments [`ENDLESS`] fill.
fn pressed() -> Setup {
    Setup { memory: 128 * MIB, anti_thrash: "auto", ..Setup::default() }
}

/// A GPU with room for all programs of a test.
fn roomy() -> Setup {
    Setup { memory: 256 * MIB, anti_thrash: "auto", ..Setup::default() }
}

const WORK: &str = "mix --mem 36M --chunks 3 --reps 1 --rounds 3";
/// Arguments of a program that is busy until it is killed.
const ENDLESS: &str = "mix --mem 36M --chunks 3 --reps 2 --rounds endless";

/// Keeps a few programs running, and kills or stops one of them (or the scheduler) at random
/// moments.
struct Chaos {
    machine: Machine,
    random: Dice,
    programs: Vec<Program>,
    finished: u32,
    /// Rounds since a program finished.
    unproductive: u32,
    done: Vec<(&'static str, u32)>,
}

const PROGRAMS: usize = 4;
const ROUNDS_FOR: Duration = Duration::from_secs(4);

impl Chaos {
    fn new(setup: Setup) -> Self {
        let machine = Machine::with_scheduler(setup);
        Self { machine, random: Dice::seeded(), programs: Vec::new(), finished: 0, unproductive: 0, done: Vec::new() }
    }

    fn count(&mut self, what: &'static str) {
        match self.done.iter_mut().find(|(name, _)| *name == what) {
            Some((_, n)) => *n += 1,
            None => self.done.push((what, 1)),
        }
    }

    /// Checks the results of programs that have ended, and starts new programs in their place.
    fn tend(&mut self) {
        let (mut running, mut ended): (Vec<Program>, Vec<Program>) = (Vec::new(), Vec::new());
        for mut program in self.programs.drain(..) {
            if program.poll().is_some() { ended.push(program) } else { running.push(program) }
        }
        self.programs = running;
        for mut program in ended {
            program.finish();
            self.finished += 1;
            self.unproductive = 0;
        }
        while self.programs.len() < PROGRAMS {
            self.programs.push(self.machine.program(WORK).env("CUDA_PATIENT", "1").start());
        }
    }

    /// Indices of the program that holds the lock, and of the programs that don't.
    fn holder_and_waiters(&self) -> (Option<usize>, Vec<usize>) {
        let moves = self.machine.moves();
        let last = holders(&moves).pop().and_then(|(_, now)| now.last().copied());
        let pid = last.and_then(|c| moves.iter().rev().find(|m| m.client == c).map(|m| m.pid));
        let holder = self.programs.iter().position(|p| Some(p.pid()) == pid);
        (holder, (0..self.programs.len()).filter(|i| Some(*i) != holder).collect())
    }

    fn is_enough(&self) -> bool {
        self.finished >= 2 && self.done.iter().map(|(_, n)| n).sum::<u32>() > 8
    }

    fn kill(&mut self, victim: usize) {
        self.programs.swap_remove(victim).kill();
    }

    /// Repeats `round` for `ROUNDS_FOR`, or longer if too few events have happened by then, as on a
    /// busy machine. Then all remaining programs must end, too.
    fn run(mut self, mut round: impl FnMut(&mut Self)) {
        let begin = Instant::now();
        while begin.elapsed() < ROUNDS_FOR || !self.is_enough() && begin.elapsed() < PATIENCE {
            self.tend();
            // On a busy machine, programs take longer. If the pauses were not longer too, every program
            // would be killed before it has finished.
            let pause = self.random.milliseconds(300) * self.unproductive.div_ceil(8).max(1);
            std::thread::sleep(pause);
            self.unproductive += 1;
            round(&mut self);
        }
        for program in &mut self.programs {
            program.finish();
        }
        eprintln!("{} programs finished; {:?}", self.finished + self.programs.len() as u32, self.done);
        assert!(self.is_enough(), "too little happened");
        self.machine.wait_until_empty();
        assert_eq!(self.machine.free(), self.machine.setup.memory);
    }
}

#[test]
fn random_program_kills_do_not_affect_other_programs() {
    Chaos::new(pressed()).run(|chaos| {
        let (holder, waiters) = chaos.holder_and_waiters();
        let (what, victim) = match (chaos.random.below(2), holder) {
            (0, Some(holder)) => ("holder killed", holder),
            _ => match chaos.random.choose(&waiters) {
                Some(waiter) => ("waiter killed", *waiter),
                None => return,
            },
        };
        chaos.kill(victim);
        chaos.count(what);
    });
}

#[test]
fn programs_survive_random_scheduler_kills() {
    scheduler_killed(roomy());
}

#[test]
fn programs_survive_random_scheduler_kills_under_pressure() {
    scheduler_killed(pressed());
}

fn scheduler_killed(setup: Setup) {
    Chaos::new(setup).run(|chaos| {
        chaos.machine.kill_scheduler();
        std::thread::sleep(chaos.random.milliseconds(300));
        chaos.machine.start_scheduler();
        chaos.count("scheduler killed");
        // Programs make some progress during this pause.
        std::thread::sleep(chaos.random.milliseconds(600));
    });
}

#[test]
fn programs_survive_random_kills_and_stops_of_all_processes() {
    everything(roomy());
}

#[test]
fn programs_survive_random_kills_and_stops_under_pressure() {
    everything(pressed());
}

fn everything(setup: Setup) {
    Chaos::new(setup).run(|chaos| {
        let (holder, _) = chaos.holder_and_waiters();
        let any = chaos.random.below(chaos.programs.len() as u64) as usize;
        match chaos.random.below(8) {
            0 => {
                chaos.machine.kill_scheduler();
                std::thread::sleep(chaos.random.milliseconds(200));
                if chaos.random.below(2) == 0 {
                    chaos.kill(any);
                }
                chaos.machine.start_scheduler();
                chaos.count("scheduler killed");
            }
            1 | 2 => {
                let victim = holder.unwrap_or(any);
                chaos.programs[victim].signal(libc::SIGSTOP);
                std::thread::sleep(chaos.random.milliseconds(400));
                chaos.programs[victim].signal(libc::SIGCONT);
                chaos.count("holder stopped for a while");
            }
            3 => {
                kill(chaos.machine.scheduler_pid(), libc::SIGSTOP);
                std::thread::sleep(chaos.random.milliseconds(300));
                kill(chaos.machine.scheduler_pid(), libc::SIGCONT);
                chaos.count("scheduler stopped for a while");
            }
            4 | 5 => {
                chaos.kill(holder.unwrap_or(any));
                chaos.count("holder killed");
            }
            _ => {
                chaos.kill(any);
                chaos.count("anybody killed");
            }
        }
    });
}

/// `NVSHARE_EXITS=500 cargo nextest run --test sharing exit` runs 500 exits instead of 12.
#[test]
fn an_exit_during_an_eviction_is_immediate_and_keeps_its_status() {
    let count: u32 = std::env::var("NVSHARE_EXITS").map_or(12, |text| text.parse().expect("a number"));
    let machine = Machine::with_scheduler(pressed());
    let mut neighbour = machine.program("mix --mem 60M --chunks 4 --reps 2 --rounds endless").start();
    machine.wait_for_grants(&neighbour, 1);
    for _ in 0..count.div_ceil(4) {
        let mut leaving: Vec<Program> = (0..4).map(|_| machine.program("leaves --mem 48M --ms 900").start()).collect();
        for program in &mut leaving {
            assert_eq!(program.wait().code(), Some(7));
        }
    }
    neighbour.kill();
    machine.wait_until_empty();
    assert_eq!(machine.free(), machine.setup.memory);
    assert!(machine.moves().iter().any(|m| m.what == "evict"), "no memory had to move");
}

/// One program also tries to use a missing GPU, which the driver reports as an ordinary error.
#[test]
fn using_a_nonexistent_gpu_affects_no_program() {
    let machine = Machine::with_scheduler(pressed());
    let words = [
        "mix --mem 60M --chunks 4 --reps 2 --rounds endless --cpu-ms 20 --no-device 1",
        "mix --mem 60M --chunks 4 --reps 2 --rounds endless",
    ];
    let mut programs = words.map(|words| machine.program(words).start());
    machine.wait_for_exchange(&programs);
    programs.iter_mut().for_each(|program| drop(program.end()));
    let log = machine.scheduler_log();
    assert!(!log.contains("violation"), "{log}");
    assert_eq!(machine.moves().iter().filter(|m| m.what == "connect").count(), 2, "nobody connects anew");
}

#[test]
fn programs_that_fit_run_beside_a_stopped_holder() {
    for anti_thrash in ["on", "auto"] {
        let machine = Machine::with_scheduler(Setup { anti_thrash, ..Setup::default() });
        let mut stopped = machine.program("mix --mem 40M --reps 4 --rounds endless --cpu-ms 20").start();
        machine.wait_for_grants(&stopped, 1);
        wait_for("its memory to be there", || {
            (number(&machine.status()["gpus"][0]["resident"]) >= 40 * MIB).then_some(())
        });
        machine.stop_beside_work(&stopped);
        let mut others: Vec<Program> =
            (0..2).map(|_| machine.program("mix --mem 40M --reps 2 --rounds 4").start()).collect();
        for other in &mut others {
            other.finish();
        }
        assert_eq!(stopped.poll(), None);
        stopped.signal(libc::SIGCONT);
        stopped.end();
        machine.wait_until_empty();
    }
}

#[test]
fn a_stopped_program_keeps_its_memory_and_its_results() {
    // The other program doesn't fit beside the stopped one, so it makes progress only after the
    // stopped program has continued.
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    let mut stopped = machine.program("mix --mem 60M --reps 4 --rounds endless").start();
    machine.wait_for_grants(&stopped, 1);
    let mut other = machine.program("mix --mem 60M --reps 2 --rounds endless").start();
    // A process that is stopped inside the simulated driver may hold a lock of that driver. So the
    // program is continued and stopped again until it stops outside the driver.
    wait_for("the stopped holder to be asked", || {
        let before = machine.moves().len();
        stopped.signal(libc::SIGSTOP);
        std::thread::sleep(Duration::from_millis(1500));
        let asked = machine.moves()[before..].iter().any(|m| m.pid == stopped.pid() && m.what == "revoke");
        stopped.signal(libc::SIGCONT);
        asked.then_some(())
    });
    machine.wait_for_grants(&other, 1);
    other.end();
    stopped.end();
    machine.wait_until_empty();
}

#[test]
fn programs_wait_while_the_scheduler_is_stopped() {
    let machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    let words = "mix --mem 60M --reps 3 --rounds endless";
    let mut programs = vec![machine.program(words).start(), machine.program(words).start()];
    for program in &programs {
        machine.wait_for_move(0, "a request", |m| m.pid == program.pid() && m.what == "request");
    }
    kill(machine.scheduler_pid(), libc::SIGSTOP);
    // A program that starts now gets no answer from the scheduler, and no other program evicts
    // memory for the new program. So its allocation is small.
    let late = machine.program("mix --mem 2M --chunks 1 --reps 20 --rounds endless --cpu-ms 5").start();
    late.wait_to_say("no scheduler");
    std::thread::sleep(Duration::from_millis(1500));
    kill(machine.scheduler_pid(), libc::SIGCONT);
    machine.wait_for_move(0, "the late one to join", |m| m.pid == late.pid() && m.what == "attach");
    programs.push(late);
    for program in &mut programs {
        program.end();
    }
    machine.wait_until_empty();
}

#[test]
fn programs_finish_after_the_scheduler_is_killed_permanently() {
    let mut machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    let words = "mix --mem 60M --reps 3 --rounds 8";
    let mut programs = [machine.program(words).start(), machine.program(words).start()];
    wait_for("memory to have moved", || (evicted(&machine.moves()) > 0).then_some(()));
    machine.kill_scheduler();
    for program in &mut programs {
        program.finish();
    }
}

#[test]
fn a_restarted_scheduler_learns_of_running_programs() {
    let mut machine = Machine::with_scheduler(Setup { anti_thrash: "on", ..pressed() });
    let mut programs =
        [machine.program(ENDLESS).start(), machine.program(ENDLESS).start(), machine.program(ENDLESS).start()];
    for program in &programs {
        machine.wait_for_grants(program, 1);
    }
    machine.kill_scheduler();
    machine.start_scheduler();
    let known = wait_for("all to be back", || {
        let status = machine.status();
        let gpu = &status["gpus"][0];
        (number(&gpu["demand"]) == 3 * 36 * MIB).then(|| status.clone())
    });
    assert_eq!(known["clients"].as_array().map(Vec::len), Some(3));
    let restarted = machine.moves().len();
    for program in &programs {
        machine.wait_for_move(restarted, "everybody's turn", |m| m.pid == program.pid() && m.what == "grant");
    }
    let second: Vec<Move> = machine.moves().into_iter().filter(|m| m.run == 2).collect();
    assert_one_holder(&second);
    programs.iter_mut().for_each(Program::kill);
    machine.wait_until_empty();
}

// ---- a driver that fails -----------------------------------------------------------------------------------------

/// Fails some calls that only the library makes in this test. Memory still moves, only later or
/// more slowly, and the program sees no error. The driver returns "unknown error" although only one
/// call has failed and the context still works.
#[test]
fn an_unknown_error_of_one_call_does_not_mark_a_context_broken() {
    let calls = ["cuMemcpyDtoHAsync_v2", "cuMemcpyHtoDAsync_v2", "cuEventQuery"];
    let fails = calls.iter().flat_map(|call| (0..40).map(move |i| format!("{call}:{}", 2 + 5 * i)));
    let machine = Machine::with_scheduler(pressed());
    let words = "mix --mem 64M --chunks 4 --reps 3 --rounds endless";
    let with_failures = machine.program(words).env("CUDA_SIM_FAIL", &fails.collect::<Vec<_>>().join(","));
    let mut failing = with_failures.env("CUDA_SIM_FAIL_AS", "999").start();
    let mut other = machine.program(words).start();
    wait_for("each of the calls to fail", || {
        let log = fs::read_to_string(machine.path("gpu/failed")).unwrap_or_default();
        calls.iter().all(|call| log.contains(call)).then_some(())
    });
    failing.end();
    other.end();
    machine.wait_until_empty();
    assert!(!machine.scheduler_log().contains("contexts are broken"));
}

#[test]
fn a_failed_context_push_does_not_mark_a_context_broken() {
    let machine = Machine::with_scheduler(pressed());
    let fails: Vec<String> = (1..60).map(|n| format!("cuCtxPushCurrent_v2:{}", 10 + 30 * n)).collect();
    let words = "mix --mem 64M --chunks 4 --reps 3 --rounds endless";
    let mut failing = machine.program(words).env("CUDA_SIM_FAIL", &fails.join(",")).start();
    let mut other = machine.program(words).start();
    wait_for("the call to fail", || {
        let log = fs::read_to_string(machine.path("gpu/failed")).ok()?;
        log.contains("cuCtxPushCurrent_v2").then_some(())
    });
    failing.end();
    other.end();
    machine.wait_until_empty();
}

/// The driver refuses all further calls in the context, as after an illegal address. The program
/// keeps running with the broken context, as a notebook's kernel does.
#[test]
fn memory_in_a_broken_context_is_not_evicted_and_rarely_retried() {
    let machine = Machine::with_scheduler(pressed());
    let fails = machine.program("mix --mem 64M --chunks 4 --reps 3 --rounds 2 --cpu-ms 600000");
    let fails = fails.env("CUDA_SIM_FAIL", "cuMemcpyDtoHAsync_v2:1").env("CUDA_SIM_FAIL_AS", "700");
    let mut broken = fails.start();
    machine.wait_for_grants(&broken, 1);
    // before round 0, the output is one repeated value, which is evicted without a copy
    broken.wait_to_say("round 0 is over");
    let mut other = machine.program("mix --mem 64M --chunks 4 --reps 3 --rounds 2").start();
    broken.wait_to_say("eviction stopped: Broken");
    std::thread::sleep(Duration::from_secs(1));
    let attempts = broken.stderr().matches("eviction stopped").count();
    assert!(attempts <= 10, "{attempts} attempts"); // the scheduler repeats its request at growing intervals
    assert!(machine.scheduler_log().contains("contexts are broken"));
    broken.kill();
    other.finish();
    machine.wait_until_empty();
}

#[test]
fn memory_moves_survive_failing_driver_calls() {
    const CALLS: [&str; 10] = [
        "cuMemCreate",
        "cuMemMap",
        "cuMemSetAccess",
        "cuStreamCreate",
        "cuEventCreate",
        "cuEventRecord",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyHtoDAsync_v2",
        "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2",
    ];
    // The failures start after the first calls, because the program's own allocations make those
    // calls and pass failures on to the program.
    let nth = |first: usize, step: usize| {
        let fails = CALLS.iter().flat_map(|call| (0..40).map(move |i| format!("{call}:{}", first + step * i)));
        fails.collect::<Vec<_>>().join(",")
    };
    let mut failed = BTreeSet::new();
    // Without its stream, the library does not load the fingerprint kernel, so that call fails alone once.
    let all_first = CALLS.map(|call| format!("{call}:1")).join(",");
    for fails in [nth(14, 11), nth(5, 4), all_first, "cuMemHostGetDevicePointer_v2:1".to_owned()] {
        let machine = Machine::with_scheduler(pressed());
        let words = "mix --mem 64M --chunks 4 --reps 3 --rounds 7";
        // Allocations make the three removed calls, so only the other calls fail from the start.
        let fails = fails.replace("cuMemCreate:1,cuMemMap:1,cuMemSetAccess:1,", "");
        let mut failing = machine.program(words).env("CUDA_SIM_FAIL", &fails).start();
        let mut other = machine.program(words).start();
        failing.finish();
        other.finish();
        let moves = machine.moves();
        let evicted = moves.iter().filter(|m| m.pid == failing.pid() && m.what == "evict").count();
        assert!(evicted > 0, "nothing of it had to leave");
        machine.wait_until_empty();
        let log = fs::read_to_string(machine.path("gpu/failed")).unwrap_or_default();
        let calls = log.lines().filter_map(|line| line.strip_prefix(&format!("{} ", failing.pid())));
        failed.extend(calls.map(str::to_owned));
    }
    let missing: Vec<&str> = CALLS.into_iter().filter(|call| !failed.contains(*call)).collect();
    assert!(missing.is_empty(), "these never failed: {missing:?}");
}
