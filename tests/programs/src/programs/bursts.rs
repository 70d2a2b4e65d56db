//! An interactive program: short work after random pauses with the given mean. Reports how long
//! each piece of work took.

use super::{Outcome, Random, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
};
use std::{thread, time::Instant};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, bursts, pause) =
        (args.size("mem", "16M"), args.size("bursts", "50").max(1), args.milliseconds("pause-ms", "20"));
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, memory as usize)?;
    gpu.fill(buffer.at, buffer.count(), 3, 0)?;
    gpu.synchronise()?;
    let mut latencies = Vec::new();
    // The pauses are random, so that requests arrive at any point of another program's work.
    let mut random = Random::new(1);
    for _ in 0..bursts {
        thread::sleep(pause * (50 + random.below(100) as u32) / 100);
        let start = Instant::now();
        gpu.add(buffer.at, buffer.count(), 1, 0)?;
        gpu.synchronise()?;
        latencies.push(start.elapsed().as_secs_f64());
    }
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * (3 + bursts))?;
    latencies.sort_by(f64::total_cmp);
    let at = |share: f64| latencies[((latencies.len() - 1) as f64 * share).round() as usize];
    report.integer("bursts", bursts);
    report.number("p50", at(0.5));
    report.number("p99", at(0.99));
    report.number("max", at(1.0));
    Ok(())
}
