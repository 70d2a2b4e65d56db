//! Measures allocating from the default pool and freeing, in the only stream with work.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Gpu, Stream, cu},
    report::Report,
};
use std::time::Instant;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (pairs, size) = (args.size("pairs", "1000000"), args.size("size", "1M") as usize);
    let _gpu = Gpu::open(0)?;
    let stream = Stream::new()?;
    let pair = || {
        let mut at = 0;
        cu!(cuMemAllocAsync(&mut at, size, stream.0))?;
        cu!(cuMemFreeAsync(at, stream.0))
    };
    (0..1000).try_for_each(|_| pair())?;
    stream.synchronise()?;
    let start = Instant::now();
    (0..pairs).try_for_each(|_| pair())?;
    let time = start.elapsed();
    stream.synchronise()?;
    report.integer("pairs", pairs);
    report.number("ns_a_pair", time.as_nanos() as f64 / pairs as f64);
    Ok(())
}
