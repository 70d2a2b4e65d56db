//! Frees memory while work that uses it is queued, large pieces and small ones, and then does nothing.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Stream},
    report::Report,
};
use std::{thread, time::Duration};

/// So long that the work is not done when its memory is freed.
const BUSY: u64 = 20_000_000;
/// Pieces that share a mapping.
const SMALL: usize = 64 << 10;
const PIECES: usize = 48;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let memory = args.size("mem", "16M") as usize;
    let rounds = args.size("rounds", "8");
    let kind = Kind::parse(args.text("kind", "alloc")).ok_or("--kind: want alloc, vmm, managed or async")?;
    let gpu = Gpu::open(0)?;
    let stream = Stream::new()?;
    let use_and_free = |lens: &[usize]| -> Outcome {
        let buffers: Vec<Buffer> = lens.iter().map(|len| Buffer::new(kind, *len)).collect::<Result<_, _>>()?;
        gpu.spin(BUSY, stream.0)?;
        buffers.iter().try_for_each(|buffer| gpu.fill(buffer.at, buffer.count(), 1, stream.0))?;
        Ok(buffers.into_iter().try_for_each(Buffer::free)?)
    };
    for _ in 0..rounds {
        use_and_free(&[memory])?;
        use_and_free(&[SMALL; PIECES])?;
    }
    gpu.synchronise()?;
    eprintln!("holding nothing");
    thread::sleep(Duration::from_secs_f64(args.number("seconds", "0")));
    report.integer("rounds", rounds);
    Ok(())
}
