//! Reserves three quarters of the GPU in one allocation at its start, like JAX, then uses a part of
//! it in steps. An out-of-memory error has its own exit status.

use super::{Outcome, Random, Refused, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind},
    report::Report,
};
use std::thread;

/// JAX reserves 0.75 of the GPU by default (`XLA_PYTHON_CLIENT_MEM_FRACTION`).
const RESERVED: (usize, usize) = (3, 4);
const SAMPLES: u64 = 256;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (used, steps) = (args.number("used", "0.5"), args.size("steps", "20"));
    let pause = args.milliseconds("pause-ms", "50");
    let mut random = Random::new(args.size("seed", "1"));
    let gpu = Gpu::open(0).map_err(refused)?;
    let (_, total) = gpu.memory()?;
    let reserve = Buffer::new(Kind::Alloc, (total / RESERVED.1 * RESERVED.0) & !3).map_err(refused)?;
    let count = (reserve.count() as f64 * used) as u64;
    gpu.fill(reserve.at, count, 1, 0)?;
    let mut seeds = Vec::new();
    for _ in 0..steps {
        let seed = random.next() as u32;
        gpu.mix(reserve.at, count, seed, 0)?;
        gpu.synchronise()?;
        seeds.push(seed);
        thread::sleep(pause);
    }
    for seed in seeds.iter().rev() {
        gpu.unmix(reserve.at, count, *seed, 0)?;
    }
    expect("sum", gpu.sum(reserve.at, count)?, count)?;
    for _ in 0..SAMPLES.min(count) {
        expect("element", cuda::read(reserve.at + 4 * random.below(count))?, 1)?;
    }
    report.integer("reserved", 4 * reserve.count());
    report.integer("used", 4 * count);
    report.integer("steps", steps);
    reserve.free()?;
    Ok(())
}

fn refused(error: cuda::Error) -> Box<dyn std::error::Error> {
    if error.code == cuda::Error::OUT_OF_MEMORY { Box::new(Refused(error)) } else { error.into() }
}
