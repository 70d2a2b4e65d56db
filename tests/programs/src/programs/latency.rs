//! Measures the time of a launch.

use super::Outcome;
use crate::{args::Args, cuda::Gpu, report::Report};
use std::time::Instant;

/// Launches between two synchronizations. The number is well below the depth of a stream's queue.
const BATCH: u64 = 500;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let launches = args.size("launches", "100000").max(BATCH);
    let gpu = Gpu::open(0)?;
    gpu.empty(0)?;
    gpu.synchronise()?;
    let mut batches = Vec::new();
    for _ in 0..launches / BATCH {
        let start = Instant::now();
        for _ in 0..BATCH {
            gpu.empty(0)?;
        }
        batches.push(start.elapsed().as_nanos() as f64 / BATCH as f64);
        gpu.synchronise()?;
    }
    batches.sort_by(f64::total_cmp);
    report.integer("launches", launches / BATCH * BATCH);
    report.number("ns_median", batches[batches.len() / 2]);
    report.number("ns_least", batches[0]);
    Ok(())
}
