//! Many threads that initialize CUDA at the same time, like a thread pool.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
    signal,
};
use std::{sync::Barrier, thread, time::Duration};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, threads) = (args.size("mem", "4M") as usize, args.size("threads", "8") as usize);
    let seconds = Duration::from_secs(args.size("seconds", "600"));
    let barrier = Barrier::new(threads);
    let work = || -> Outcome {
        barrier.wait();
        let gpu = Gpu::open(0)?;
        let buffer = Buffer::new(Kind::Alloc, memory)?;
        gpu.fill(buffer.at, buffer.count(), 3, 0)?;
        signal::pause(seconds);
        gpu.add(buffer.at, buffer.count(), 4, 0)?;
        expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * 7)
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(|| work().map_err(|e| e.to_string()))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a thread panicked".to_owned())?)
    })?;
    report.integer("threads", threads as u64);
    Ok(())
}
