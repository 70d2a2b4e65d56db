//! Launches kernels in sequence, with a pause of the host after each. The options determine whether
//! the launches or the GPU limit the rate.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
};
use std::time::{Duration, Instant};

/// Elements that each kernel adds to.
const COUNT: u64 = 256;
/// Launches between two reads of the clock, and between two synchronizations.
const STEP: u64 = 16;
const WAIT: u64 = 4096;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let seconds = args.milliseconds("ms", "3000");
    let (ns, pause) = (args.size("ns", "1000"), Duration::from_micros(args.size("pause-us", "20")));
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, (COUNT * 4) as usize)?;
    gpu.fill(buffer.at, COUNT, 0, 0)?;
    gpu.synchronise()?;
    let (begin, mut launches) = (Instant::now(), 0u64);
    while !launches.is_multiple_of(STEP) || begin.elapsed() < seconds {
        gpu.spin(ns, 0)?;
        gpu.add(buffer.at, COUNT, 1, 0)?;
        launches += 1;
        if launches.is_multiple_of(WAIT) {
            gpu.synchronise()?;
        }
        let launched = Instant::now();
        while launched.elapsed() < pause {
            std::hint::spin_loop();
        }
    }
    gpu.synchronise()?;
    expect("sum", gpu.sum(buffer.at, COUNT)?, COUNT * launches)?;
    report.integer("launches", launches);
    Ok(())
}
