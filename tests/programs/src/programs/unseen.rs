//! Launches kernels through the driver's own function, bypassing the hooks, like a library that
//! binds that function directly.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Stream, api::Launch},
    report::Report,
};
use object::{Object, ObjectSymbol};
use std::{fs, mem, thread};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "64M") as usize, args.number("rounds", "10") as u64);
    let (ns, pause) = (args.milliseconds("ms", "300").as_nanos() as u64, args.milliseconds("pause-ms", "500"));
    let gpu = Gpu::open(0)?;
    let launch = address_of("cuLaunchKernel")?;
    // SAFETY: the address is the driver's function of this name.
    let past_hooks = unsafe { gpu.launching_by(mem::transmute::<usize, Launch>(launch)) };
    let (seen, unseen) = (Stream::new()?, Stream::new()?);
    let buffer = Buffer::new(Kind::Alloc, memory)?;
    gpu.fill(buffer.at, buffer.count(), 0, seen.0)?;
    for _ in 0..rounds {
        // The program holds the lock while this kernel runs, so its memory is resident when the
        // unseen work begins.
        gpu.spin(20_000_000, seen.0)?;
        gpu.add(buffer.at, buffer.count(), 1, seen.0)?;
        past_hooks.spin(ns, unseen.0)?;
        past_hooks.add(buffer.at, buffer.count(), 1, unseen.0)?;
        seen.synchronise()?;
        thread::sleep(pause);
        unseen.synchronise()?;
    }
    expect("sum", gpu.sum(buffer.at, buffer.count())?, 2 * rounds * buffer.count())?;
    report.integer("rounds", rounds);
    Ok(())
}

/// The address of a driver's function, from the driver's own symbol table.
pub(super) fn address_of(name: &str) -> Result<usize, Box<dyn std::error::Error>> {
    let maps = fs::read_to_string("/proc/self/maps")?;
    let line = maps.lines().find(|line| line.contains("/libcuda.so")).ok_or("libcuda.so is not loaded")?;
    let base = usize::from_str_radix(line.split('-').next().unwrap_or_default(), 16)?;
    let data = fs::read(line.split_whitespace().last().unwrap_or_default())?;
    let file = object::File::parse(data.as_slice())?;
    let symbol = file.dynamic_symbols().find(|s| s.name() == Ok(name) && s.is_definition()).ok_or("no such symbol")?;
    Ok(base + symbol.address() as usize)
}
