//! Eight programs each reserve three quarters of the GPU, which is JAX's default. The GPU has 24
//! GiB, and its host has 64 GB and a disk. The figure is the number of programs that are refused
//! memory. GPU, host and link are simulated, and all sizes are divided by the scale. The host's
//! memory is the limit of a cgroup, which also contains the simulated GPU's memory.
//!
//! `cargo bench --bench eight-jax -- [--scale 8] [--used 0.5] [--steps 20] [--directory DIR]
//! [--programs DIR] [--json FILE]`
//!
//! `--used` is the fraction of its reservation that each program writes, in `--steps` steps.
//! `--directory` is the directory of the swap files and must be on a disk (default: the directory
//! of this benchmark). `swap_file.rs` describes `--programs`. Requires root to create a control
//! group.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use bench_support::results::{Figure, Results, load};
use bench_support::stage::{Stage, kill, metric, option};
use test_support::cgroup::Limited;

const GIB: f64 = (1u64 << 30) as f64;
const PROGRAMS: usize = 8;
/// A consumer card and its host, in bytes and bytes per second, as in
/// `tests/support/src/machine/card.rs`.
const GPU: f64 = 24.0 * GIB;
const CONTEXT: f64 = 0.3 * GIB;
const HOST: f64 = 64e9;
const LINK: f64 = 25.0 * GIB;
const BOTH_WAYS: f64 = 35.0 * GIB;
/// The default fraction of the host's memory that the scheduler uses for swapped memory.
const SWAP_PART: f64 = 0.8;
/// The minimum fraction of the host's memory that must always be available.
const LEAST_AVAILABLE: f64 = 0.1;
/// The exit status of a program that was refused memory.
const REFUSED: i32 = 3;

fn main() {
    let mut results = Results::from_arguments();
    let stage = Stage::from_arguments();
    let number = |name, default| option(name, default).parse::<f64>().expect("a number");
    let (scale, used, steps) = (number("--scale", "8"), option("--used", "0.5"), option("--steps", "20"));
    let directory = match option("--directory", "").as_str() {
        "" => stage.programs().join("swap-file-bench"),
        directory => directory.into(),
    };
    fs::create_dir_all(&directory).expect("the directory");
    let scaled = |bytes: f64| (bytes / scale) as u64;
    let settings = [
        ("CUDA_SIM_CONTEXT", scaled(CONTEXT).to_string()),
        ("CUDA_SIM_LINK_BANDWIDTH", scaled(LINK).to_string()),
        ("CUDA_SIM_HOST_BANDWIDTH", scaled(BOTH_WAYS).to_string()),
    ];
    stage.simulate(scaled(GPU), &settings);
    let host = scaled(HOST);
    let Some(group) = Limited::new("nvshare-eight-jax", host + scaled(GPU)) else { return };
    let metrics = stage.file("metrics.sock");
    let configuration = format!(
        "[memory]\nreserve = {}\ncontext = {}\n[swap]\nmax = {}\nfile = {directory:?}\n[metrics]\nlisten = {metrics:?}\n",
        scaled(0.5 * GIB),
        scaled(0.6 * GIB),
        scaled(HOST * SWAP_PART)
    );
    let scheduler = stage.scheduler(&configuration, Path::new("/dev/null"));

    let begin = Instant::now();
    let procs = group.procs();
    let mut programs: Vec<_> = (0..PROGRAMS)
        .map(|seed| {
            let enter = format!("echo $$ > {} && exec \"$0\" \"$@\"", procs.display());
            let mut command = Command::new("/bin/sh");
            command.args(["-c", &enter]).arg(stage.programs().join("cuda-program"));
            command.args(["jax", "--used", &used, "--steps", &steps, "--seed", &seed.to_string()]);
            stage.under_nvshare(&mut command).stdout(Stdio::null()).spawn().expect("it runs")
        })
        .collect();
    let (mut least, mut statuses) = (host, vec![None; PROGRAMS]);
    while statuses.iter().any(Option::is_none) {
        for (program, status) in programs.iter_mut().zip(&mut statuses) {
            *status = status.or(program.try_wait().expect("a child"));
        }
        // The cgroup also contains the simulated GPU's memory, which is subtracted. While memory
        // moves, it is briefly counted both on the GPU and in the host, or in neither. The smaller
        // of two readings is subtracted, so that the available memory is not overestimated.
        let on_gpu = || metric(&metrics, "nvshare_gpu_resident_bytes") as u64;
        let (before, used, after) = (on_gpu(), group.used(), on_gpu());
        least = least.min(host.saturating_sub(used.saturating_sub(before.min(after))));
        thread::sleep(Duration::from_millis(20));
    }
    let seconds = begin.elapsed().as_secs_f64();
    kill(scheduler);
    let refused = statuses.iter().flatten().filter(|status| status.code() == Some(REFUSED)).count();
    let failed = statuses.iter().flatten().filter(|status| !status.success()).count() - refused;
    let (available, kills) = (least as f64 / host as f64, group.kills());
    println!(
        "{PROGRAMS} programs in {seconds:.0} s: {refused} refused, {failed} failed, {kills} killed for lack of memory; at least {:.1} % of the host's memory was available",
        available * 100.0
    );
    assert!(failed == 0 && kills == 0, "programs have failed");
    assert!(available >= LEAST_AVAILABLE, "the host lacked memory");
    let note = format!(
        "everything divided by {scale}, on a simulated GPU; each writes {used} of what it reserves in {steps} steps; all ended in {seconds:.0} s; at least {:.0} % of the host's memory was available; {}",
        available * 100.0,
        load()
    );
    results.add(Figure { name: "eight-jax-default-24GiB-64GB", value: refused as f64, unit: "refusals", note });
    results.write();
}
