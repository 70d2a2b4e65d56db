//! Creates, uses, synchronizes and destroys one stream for each piece of work, like servers.

use super::{Outcome, queued::processor_seconds};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind, Stream},
    report::Report,
};
use std::fs;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (streams, busy) = (args.size("streams", "40000"), args.number("busy", "0") != 0.0);
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, 4096)?;
    let part = (streams / 8).max(1);
    let run = |count| (0..count).try_for_each(|round| cycle(&gpu, &buffer, round as u32, busy));
    run(part)?;
    let resident = resident_kib();
    let first = timed(|| run(part))? / part as f64;
    (2..7).try_for_each(|_| run(part))?;
    let last = timed(|| run(part))? / part as f64;
    gpu.synchronise()?;
    report.number("first_us", first * 1e6);
    report.number("last_us", last * 1e6);
    report.integer("grown_kib", resident_kib().saturating_sub(resident));
    Ok(())
}

/// With `busy`, the stream is destroyed before its work is done.
fn cycle(gpu: &Gpu, buffer: &Buffer, round: u32, busy: bool) -> cuda::Result<()> {
    let stream = Stream::new()?;
    gpu.fill(buffer.at, 16, round, stream.0)?;
    if busy { Ok(()) } else { stream.synchronise() }
}

/// The processor seconds of `run`.
fn timed(run: impl FnOnce() -> cuda::Result<()>) -> cuda::Result<f64> {
    let now = || processor_seconds(libc::CLOCK_PROCESS_CPUTIME_ID);
    let begin = now();
    run().map(|()| now() - begin)
}

fn resident_kib() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|line| line.trim().strip_suffix(" kB")?.parse().ok()).unwrap_or(0)
}
