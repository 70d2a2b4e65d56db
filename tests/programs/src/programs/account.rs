//! The free memory that the driver reports while a program allocates, requests too much, and frees.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Error, Gpu, Kind, cu},
    report::Report,
};

const SLACK: usize = 16 << 20;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let memory = args.size("mem", "32M");
    let gpu = Gpu::open(0)?;
    let mut device_total = 0;
    cu!(cuDeviceTotalMem_v2(&mut device_total, gpu.device))?;
    let (free, total) = gpu.memory()?;
    let buffer = Buffer::new(Kind::Alloc, memory as usize)?;
    gpu.fill(buffer.at, buffer.count(), 1, 0)?;
    let (free_with, total_with) = gpu.memory()?;
    expect("total, with memory taken", total_with, total)?;

    // Leaves some memory free for contexts of programs that start at the same time.
    let most = Buffer::new(Kind::Alloc, free_with - SLACK)?;
    gpu.fill(most.at, most.count(), 1, 0)?;
    let (free_full, _) = gpu.memory()?;
    let refused = Buffer::new(Kind::Alloc, 2 * SLACK).err().map_or(0, |e| e.code);
    expect("what was asked for on top", refused, Error::OUT_OF_MEMORY)?;
    // Freed memory is reported as free immediately, even if the GPU still uses it.
    most.free()?;
    let again = Buffer::new(Kind::Alloc, free_with - SLACK)?;
    again.free()?;
    let (free_after, _) = gpu.memory()?;

    // A refused allocation has no side effects.
    gpu.add(buffer.at, buffer.count(), 1, 0)?;
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * 2)?;
    report.integer("device_total", device_total as u64);
    report.integer("total", total as u64);
    report.integer("free", free as u64);
    report.integer("free_with", free_with as u64);
    report.integer("free_full", free_full as u64);
    report.integer("free_after", free_after as u64);
    Ok(())
}
