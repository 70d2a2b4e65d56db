//! Compares concurrent with serial runs of equal jobs, on a GPU that has room for one job. In each
//! period, a job needs a fraction of the GPU's memory and of its time. The time quantum varies.
//! Overlap saves time, and moving memory costs time. Requires an NVIDIA GPU, on which another
//! program occupies all memory except the needed amount.
//!
//! `cargo bench --bench mix -- [--programs DIR] [--leave 17G] [--sizes 7.2G,15.3G] [--shares
//! 0.5,0.9] [--periods 1,10] [--quanta 5,30,1000] [--work 30] [--jobs 2] [--json FILE]`
//!
//! `--jobs` is the number of concurrent jobs. `--work` is the time in seconds that one job takes
//! alone. A job takes at least three periods. `exchange.rs` describes `--programs`. On a simulated
//! GPU the figures are meaningless.

use std::{
    process::{Child, Command, Stdio},
    time::Instant,
};

use bench_support::results::{Figure, Results};
use bench_support::stage::{Stage, bytes, kill, option};

/// A job: its memory, the fraction of each period for which it uses the GPU, and the number of
/// periods.
struct Job {
    memory: String,
    share: f64,
    period: f64,
    periods: u64,
    /// Number of passes over the job's memory in each period.
    passes: u64,
}

fn numbers(name: &str, default: &str) -> Vec<f64> {
    option(name, default).split(',').map(|n| n.parse().expect("a number")).collect()
}

fn main() {
    let mut results = Results::from_arguments();
    let stage = Stage::from_arguments();
    if stage.ask(&["info"]).is_none() {
        println!("no GPU here: nothing is measured");
        return;
    }
    let leave = bytes(&option("--leave", "17G"));
    let work: f64 = option("--work", "30").parse().expect("seconds");
    let jobs: usize = option("--jobs", "2").parse().expect("a number");
    let holder = stage.ballast(leave);
    println!(
        "{:>8} {:>6} {:>8} {:>9} {:>9} {:>9} {:>9}",
        "memory", "share", "period", "quantum", "alone", "at once", "ratio"
    );
    for memory in option("--sizes", "7.2G,15.3G").split(',') {
        for share in numbers("--shares", "0.5,0.9") {
            for period in numbers("--periods", "1,10") {
                let Some(job) = Job::new(&stage, bytes(memory).to_string(), share, period, work) else {
                    println!("{memory:>8}: does not fit into what is left of this GPU");
                    continue;
                };
                let alone = seconds(vec![job.command(|words| stage.program(words))]);
                for quantum in numbers("--quanta", "5,30,1000") {
                    let scheduler =
                        stage.scheduler(&format!("time-quantum = {quantum}\n"), &stage.file("record.jsonl"));
                    let all = seconds((0..jobs).map(|_| job.command(|words| stage.shared(words))).collect());
                    kill(scheduler);
                    let ratio = all / (jobs as f64 * alone);
                    println!(
                        "{memory:>8} {share:>6} {period:>6} s {quantum:>7} s {alone:>7.1} s {all:>7.1} s {ratio:>9.3}"
                    );
                    if let Some(name) = figure(jobs, memory, share, period, quantum) {
                        let note = format!(
                            "{jobs} jobs done, over one after the other; {memory} each, alone {alone:.1} s; time quantum {quantum} s"
                        );
                        results.add(Figure { name, value: ratio, unit: "ratio", note });
                    }
                }
            }
        }
    }
    kill(holder);
    results.write();
}

/// Returns the name of the figure that this case measures, if any.
fn figure(jobs: usize, memory: &str, share: f64, period: f64, quantum: f64) -> Option<&'static str> {
    match (jobs, memory, share, period, quantum) {
        (2, "15.3G", 0.5, 10.0, 30.0) => Some("big-0.5-period10-tq30-over-serial"),
        (2, "15.3G", 0.5, 10.0, 5.0) => Some("big-0.5-period10-tq5-over-serial"),
        (2, "15.3G", 0.9, 10.0, 30.0) => Some("big-0.9-period10-tq30-over-serial"),
        (2, "15.3G", 0.9, 10.0, 5.0) => Some("big-0.9-period10-tq5-over-serial"),
        (2, "7.2G", 0.5, 10.0, 30.0) => Some("small-0.5-period10-over-serial"),
        (10, "8G", 0.9, 1.0, 30.0) => Some("ten-by-8GiB-over-serial"),
        _ => None,
    }
}

impl Job {
    /// Creates and calibrates a job, so that the job does the same work in every run.
    fn new(stage: &Stage, memory: String, share: f64, period: f64, work: f64) -> Option<Self> {
        let milliseconds = (share * period * 1e3).to_string();
        let report =
            stage.ask(&["mix", "--mem", &memory, "--chunks", "8", "--gpu-ms", &milliseconds, "--rounds", "2"])?;
        let passes = report["passes"].as_u64()?;
        Some(Self { memory, share, period, periods: (work / period).ceil().max(3.0) as u64, passes })
    }

    fn command(&self, program: impl FnOnce(&[&str]) -> Command) -> Command {
        let pause = ((1.0 - self.share) * self.period * 1e3).to_string();
        let (passes, periods) = (self.passes.to_string(), self.periods.to_string());
        let words = [
            "mix",
            "--mem",
            &self.memory,
            "--chunks",
            "8",
            "--reps",
            &passes,
            "--rounds",
            &periods,
            "--cpu-ms",
            &pause,
        ];
        program(&words)
    }
}

/// Runs these programs concurrently, and returns the seconds until all have ended. Each program
/// checks its results.
fn seconds(commands: Vec<Command>) -> f64 {
    let begin = Instant::now();
    let children: Vec<Child> =
        commands.into_iter().map(|mut c| c.stdout(Stdio::null()).spawn().expect("it runs")).collect();
    for mut child in children {
        assert!(child.wait().expect("a child").success(), "a job failed");
    }
    begin.elapsed().as_secs_f64()
}
