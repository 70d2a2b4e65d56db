//! Programs as people run them, on simulated GPUs:
//!
//! - `unnamed-tensor-parallel-stuck`: two jobs of two ranks start together. They do not fit on the GPUs
//!   together, and no launcher names them. The figure is the number of pairs that are not done within
//!   twice the time that the jobs take one after the other.
//! - `managed-beyond-gpu-errors`: a program with more managed memory than the GPU has, beside another
//!   program. The figure is the number of programs that fail or have wrong results. In every other
//!   round, the large program is killed.
//! - `foreign-checkpoint-room`: a program under nvshare checkpoints a program that fills the GPU. The figure
//!   is the time until another program has the GPU, in the slowest round.
//!
//! `cargo bench --profile dev --bench field -- [--only FIGURE] [--rounds 20] [--json FILE]`, after
//! `make artifacts`. Needs a C compiler. `bench/gpu/foreign.py` measures the checkpoint on a GPU.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use bench_support::results::{Figure, Results, load};
use bench_support::stage::option;
use test_support::jobs::{Job, RANKS, compile_nccl};
use test_support::machine::*;

/// Measures a figure in this many rounds.
type Measure = fn(u32) -> Figure;

fn main() {
    let mut results = Results::from_arguments();
    let only = option("--only", "");
    let rounds: u32 = option("--rounds", "20").parse().expect("a number");
    let figures: [(&str, Measure); 3] = [
        ("unnamed-tensor-parallel-stuck", unnamed_jobs),
        ("managed-beyond-gpu-errors", managed_beyond_gpu),
        ("foreign-checkpoint-room", foreign_checkpoint),
    ];
    for (_, measure) in figures.into_iter().filter(|(name, _)| only.is_empty() || *name == only) {
        let figure = measure(rounds);
        println!("{}: {} {} ({})", figure.name, figure.value, figure.unit, figure.note);
        results.add(figure);
    }
    results.write();
}

/// A machine of two GPUs with room for one rank on each.
fn two_gpus() -> Machine {
    let simulator = vec![("CUDA_SIM_GPUS", RANKS.to_string())];
    let setup = Setup { memory: 64 * MIB, simulator, time_quantum: Duration::from_millis(100), ..Setup::default() };
    let machine = Machine::with_scheduler(setup);
    compile_nccl(&machine, 2);
    machine
}

/// Waits until all ranks have ended, or the time is over. Returns whether all have ended well.
fn are_done(ranks: &mut [Program], within: Duration) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < within {
        let ended: Vec<_> = ranks.iter_mut().filter_map(Program::poll).collect();
        if ended.len() == ranks.len() {
            return ended.iter().all(std::process::ExitStatus::success);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    false
}

/// The number of pairs of jobs that are not done in time.
fn stuck_pairs(machine: &Machine, job: Job, rounds: u32, within: Duration) -> u32 {
    let mut stuck = 0;
    for round in 0..rounds {
        let [one, other] = ["one", "other"].map(|name| format!("{name}-{round}"));
        let mut ranks = job.start(machine, &one, [0, 1]);
        ranks.extend(job.start(machine, &other, [1, 0]));
        stuck += u32::from(!are_done(&mut ranks, within));
        ranks.iter_mut().for_each(Program::kill);
        machine.wait_until_empty();
    }
    stuck
}

fn unnamed_jobs(rounds: u32) -> Figure {
    let machine = two_gpus();
    let job = Job::default();
    let begin = Instant::now();
    for name in ["first", "second"] {
        assert!(are_done(&mut job.start(&machine, name, [0, 1]), PATIENCE), "a job alone has failed");
    }
    let serial = begin.elapsed();
    let stuck = stuck_pairs(&machine, job, rounds, 2 * serial);
    // Without NCCL's functions, the scheduler cannot tell which processes are a job.
    let unseen = stuck_pairs(&machine, Job { gang: Some("0"), ..job }, rounds.min(5), 2 * serial);
    let note = format!(
        "of {rounds} pairs of two ranks on two simulated GPUs, {:.1} s one job after the other; with NVSHARE_GANG=0, \
         which turns the recognition of NCCL off, {unseen} of {}; {}",
        serial.as_secs_f64(),
        rounds.min(5),
        load()
    );
    Figure { name: "unnamed-tensor-parallel-stuck", value: f64::from(stuck), unit: "count", note }
}

fn managed_beyond_gpu(rounds: u32) -> Figure {
    let rules = "[[rule]]\nmanaged-beyond-gpu = true\n".into();
    let machine = Machine::with_scheduler(Setup { memory: 64 * MIB, anti_thrash: "on", rules, ..Setup::default() });
    let (mut errors, mut kills) = (0, 0);
    for round in 0..rounds {
        let words = ["--mem 96M --kind managed", "--mem 32M"];
        let start = |words| machine.program(&format!("mix --chunks 4 --reps 3 --rounds 4 {words}")).start();
        let [mut beyond, mut other] = words.map(start);
        if round % 2 == 1 {
            machine.wait_for_grants(&beyond, 2);
            beyond.kill();
            kills += 1;
        } else {
            errors += u32::from(!beyond.wait().success());
        }
        errors += u32::from(!other.wait().success());
        machine.wait_until_empty();
        errors += u32::from(machine.free() != machine.setup.memory);
    }
    let note = format!(
        "{rounds} rounds of a program with 96 MiB of managed memory beside one with 32 MiB on a simulated GPU of 64 \
         MiB, contents checked; {kills} times killed; {}",
        load()
    );
    Figure { name: "managed-beyond-gpu-errors", value: f64::from(errors), unit: "count", note }
}

fn foreign_checkpoint(rounds: u32) -> Figure {
    let work = "mix --mem 80M --chunks 4 --reps 3 --rounds endless";
    // The holder always has work, and its turn does not end by itself.
    let setup =
        Setup { memory: 128 * MIB, context: 8 * MIB, anti_thrash: "on", time_quantum: HOUR, ..Setup::default() };
    let machine = Machine::with_scheduler(setup);
    let mut slowest = Duration::ZERO;
    let mut all = String::new();
    for _ in 0..rounds {
        let mut holder = machine.program(work).start();
        machine.wait_for_grants(&holder, 1);
        let mut other = machine.program(work).start();
        wait_for("the other program to wait", || {
            let status = machine.status();
            let waits =
                |client: &&serde_json::Value| client["pid"] == other.pid() && client["gpus"][0]["state"] == "waiting";
            status["clients"].as_array()?.iter().find(waits).map(|_| ())
        });
        let mut tool = machine.program(&format!("checkpoints --pid {} --to asleep", holder.pid())).start();
        tool.finish();
        let begin = Instant::now();
        machine.wait_for_grants(&other, 1);
        slowest = slowest.max(begin.elapsed());
        let _ = write!(all, " {:.2}", begin.elapsed().as_secs_f64());
        [&mut holder, &mut other].into_iter().for_each(Program::kill);
        machine.wait_until_empty();
    }
    println!("foreign-checkpoint-room:{all}");
    let note = format!("slowest of {rounds} on a simulated GPU, from the end of the checkpoint; {}", load());
    Figure { name: "foreign-checkpoint-room", value: slowest.as_secs_f64(), unit: "s", note }
}
