//! Holds memory without using it.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
    signal,
};
use std::time::Duration;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let memory = args.size("mem", "256M");
    let kind = Kind::parse(args.text("kind", "alloc")).ok_or("--kind: want alloc, vmm, managed or async")?;
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(kind, memory as usize)?;
    gpu.fill(buffer.at, buffer.count(), 1, 0)?;
    gpu.synchronise()?;
    eprintln!("holding {memory} bytes");
    signal::pause(Duration::from_secs_f64(args.number("seconds", "5")));
    report.integer("mem", memory);
    Ok(())
}
