//! Builds a model step by step, as frameworks load models, and then processes the whole model in
//! rounds. An out-of-memory error has its own exit status, because frameworks handle such errors.

use super::{Outcome, Random, Refused, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind},
    report::Report,
};
use std::thread;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, step, most) = (args.size("mem", "64M"), args.size("step", "1M").max(4), args.size("most", "3"));
    let (rounds, kind) = (args.size("rounds", "5"), args.text("kind", "alloc"));
    let kind = Kind::parse(kind).ok_or("--kind: want alloc, vmm, managed or async")?;
    let (step_pause, pause) = (args.milliseconds("step-ms", "0"), args.milliseconds("pause-ms", "50"));
    let fills_late = args.text("fill", "each") == "late";
    let mut random = Random::new(args.size("seed", "1"));

    let gpu = Gpu::open(args.size("device", "0") as i32).map_err(refused)?;
    let mut parts: Vec<Buffer> = Vec::new();
    let mut built = 0;
    report.integer("mem", memory);
    while built < memory {
        let len = (step * (1 + random.below(most))).min(memory - built).next_multiple_of(4);
        let part = Buffer::new(kind, len as usize).map_err(|e| {
            report.integer("built", built);
            refused(e)
        })?;
        if !fills_late {
            // A launch may be refused if its memory was allocated without the lock and now does not
            // fit.
            gpu.fill(part.at, part.count(), value(parts.len(), 0), 0).map_err(refused)?;
        }
        built += len;
        parts.push(part);
        thread::sleep(step_pause);
    }
    for (i, part) in parts.iter().enumerate().filter(|_| fills_late) {
        gpu.fill(part.at, part.count(), value(i, 0), 0).map_err(refused)?;
    }
    gpu.synchronise()?;
    eprintln!("built {} parts, {built} bytes", parts.len());
    report.integer("built", built);

    for round in 0..rounds {
        for (i, part) in parts.iter().enumerate() {
            expect("sum", gpu.sum(part.at, part.count()).map_err(refused)?, part.count() * u64::from(value(i, round)))?;
            gpu.add(part.at, part.count(), 1, 0)?;
        }
        thread::sleep(pause);
    }
    for (i, part) in parts.iter().enumerate() {
        let last = part.at + 4 * (part.count() - 1);
        expect("last element", cuda::read(last)?, value(i, rounds))?;
    }
    parts.into_iter().try_for_each(Buffer::free)?;
    eprintln!("done with {rounds} rounds");
    report.integer("rounds", rounds);
    Ok(())
}

/// The value of every element of a part after `rounds` rounds.
fn value(part: usize, rounds: u64) -> u32 {
    0x0100_0000 + part as u32 * 0x1000 + rounds as u32
}

fn refused(error: cuda::Error) -> Box<dyn std::error::Error> {
    if error.code == cuda::Error::OUT_OF_MEMORY { Box::new(Refused(error)) } else { error.into() }
}
