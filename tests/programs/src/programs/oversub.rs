//! Allocates until it is refused, and reports the total. All allocated memory must keep its
//! contents.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Error, Gpu, Kind},
    report::Report,
};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let kind = Kind::parse(args.text("kind", "alloc")).ok_or("--kind: want alloc, vmm, managed or async")?;
    let (target, chunk) = (args.size("mem", "2G"), args.size("chunk", "64M").max(4));
    let gpu = Gpu::open(0)?;
    let mut buffers = Vec::new();
    let mut failed = "";
    while (buffers.len() as u64 + 1) * chunk <= target {
        match Buffer::new(kind, chunk as usize) {
            Ok(buffer) => buffers.push(buffer),
            Err(e) if e.code == Error::OUT_OF_MEMORY => {
                failed = e.call;
                break;
            }
            Err(e) => return Err(e.into()),
        }
    }
    let beside = args.size("beside", "0");
    if beside > 0 {
        buffers.push(Buffer::new(Kind::Alloc, beside as usize)?);
    }
    let rounds = args.size("rounds", "2");
    for _ in 0..rounds {
        for (i, buffer) in buffers.iter().enumerate() {
            gpu.fill(buffer.at, buffer.count(), i as u32 + 1, 0)?;
        }
    }
    // A sum needs some memory. With no rounds, nothing is summed, so all memory can be allocated.
    for (i, buffer) in buffers.iter().enumerate().take(if rounds == 0 { 0 } else { buffers.len() }) {
        expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * (i as u64 + 1))?;
    }
    report.integer("allocated", buffers.iter().map(|buffer| buffer.count() * 4).sum());
    report.text("failed", failed);
    Ok(())
}
