//! Measures the rate of copies between the GPU and the host. Evicting and restoring memory cannot
//! be faster.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Mapped, Stream, cu},
    report::Report,
};
use std::time::Instant;

/// The size of one move, in bytes.
const PIECE: usize = 64 << 20;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "256M") as usize, args.size("rounds", "4"));
    let gpu = Gpu::open(0)?;
    let host = (Mapped::new(memory)?, Mapped::new(memory)?);
    let buffers = (Buffer::new(Kind::Alloc, memory)?, Buffer::new(Kind::Alloc, memory)?);
    let streams = (Stream::new()?, Stream::new()?);
    for (name, out, back) in [("out", true, false), ("in", false, true), ("both", true, true)] {
        gpu.synchronise()?;
        let start = Instant::now();
        for _ in 0..rounds {
            for at in (0..memory).step_by(PIECE) {
                let len = PIECE.min(memory - at);
                if out {
                    let to = host.0.host.wrapping_add(at);
                    cu!(cuMemcpyDtoHAsync_v2(to, buffers.0.at + at as u64, len, streams.0.0))?;
                }
                if back {
                    let from = host.1.host.wrapping_add(at);
                    cu!(cuMemcpyHtoDAsync_v2(buffers.1.at + at as u64, from, len, streams.1.0))?;
                }
            }
        }
        gpu.synchronise()?;
        // Reports the rate of this direction in GiB/s.
        report.number(name, (memory as u64 * rounds) as f64 / start.elapsed().as_secs_f64() / (1 << 30) as f64);
    }
    Ok(())
}
