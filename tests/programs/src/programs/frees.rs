//! Frees large and small pieces of memory while queued work uses them. Afterwards the program is
//! idle. `cuMemFree` waits for the work of all streams.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Mapped, Stream},
    report::Report,
};
use std::{thread, time::Duration};

/// GPU time of the work, in nanoseconds. It is long enough that the work still runs when its memory
/// is freed.
const BUSY: u64 = 20_000_000;
/// The size and the number of small pieces, which share a mapping.
const SMALL: usize = 64 << 10;
const PIECES: usize = 48;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let memory = args.size("mem", "16M") as usize;
    let rounds = args.size("rounds", "8");
    let kind = Kind::parse(args.text("kind", "alloc")).ok_or("--kind: want alloc, vmm, managed or async")?;
    let gpu = Gpu::open(0)?;
    let (stream, other) = (Stream::new()?, Stream::new()?);
    let seen = Mapped::new(4)?;
    let use_and_free = |lens: &[usize]| -> Outcome {
        let buffers: Vec<Buffer> = lens.iter().map(|len| Buffer::new(kind, *len)).collect::<Result<_, _>>()?;
        gpu.spin(BUSY, stream.0)?;
        buffers.iter().try_for_each(|buffer| gpu.fill(buffer.at, buffer.count(), 1, stream.0))?;
        seen.set(0);
        gpu.spin(2 * BUSY, other.0)?;
        gpu.fill(seen.at, 1, 7, other.0)?;
        buffers.into_iter().try_for_each(Buffer::free)?;
        match kind {
            Kind::Alloc | Kind::Managed => expect("what other work had written when the free returned", seen.get(), 7),
            Kind::Vmm | Kind::Async => Ok(()),
        }
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
