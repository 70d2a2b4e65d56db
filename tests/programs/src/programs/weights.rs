//! An inference server. It has weights that are written once and read in every round, a reserve
//! that is never used, and a small state that changes.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
};
use std::thread;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (weights, reserve, state) = (args.size("mem", "64M"), args.size("reserve", "16M"), args.size("state", "4M"));
    let (rounds, pause) = (args.size("rounds", "10"), args.milliseconds("pause-ms", "50"));
    let gpu = Gpu::open(0)?;
    let make = |bytes: u64| Buffer::new(Kind::Alloc, bytes as usize);
    let (weights, reserve, state) = (make(weights)?, make(reserve)?, make(state)?);
    gpu.fill(weights.at, weights.count(), 1, 0)?;
    gpu.mix(weights.at, weights.count(), 7, 0)?;
    gpu.fill(reserve.at, reserve.count(), 5, 0)?;
    gpu.fill(state.at, state.count(), 0, 0)?;
    let sum = gpu.sum(weights.at, weights.count())?;
    eprintln!("the weights stay");
    for round in 1..=rounds {
        gpu.add(state.at, state.count(), 1, 0)?;
        expect("sum of the weights", gpu.sum(weights.at, weights.count())?, sum)?;
        expect("sum of the state", gpu.sum(state.at, state.count())?, state.count() * round)?;
        expect("sum of the reserve", gpu.sum(reserve.at, reserve.count())?, reserve.count() * 5)?;
        thread::sleep(pause);
    }
    eprintln!("the weights change");
    // Changes one weight in each granule. The library must detect each change.
    for at in (0..weights.count()).step_by(1 << 19) {
        gpu.add(weights.at + 4 * at, 1, 1, 0)?;
    }
    let changed = sum + weights.count().div_ceil(1 << 19);
    gpu.synchronise()?;
    for _ in 0..rounds {
        thread::sleep(pause);
        gpu.add(state.at, state.count(), 1, 0)?;
        expect("sum of the changed weights", gpu.sum(weights.at, weights.count())?, changed)?;
    }
    report.integer("rounds", 2 * rounds);
    Ok(())
}
