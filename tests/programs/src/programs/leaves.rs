//! Exits with a distinct status while one of its threads works, whatever the state of its memory.

use super::{Outcome, Random};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
};
use std::{process, thread, time::Duration};

pub fn run(args: &Args, _: &mut Report) -> Outcome {
    let (memory, longest) = (args.size("mem", "48M") as usize, args.number("ms", "600") as u64);
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, memory)?;
    gpu.fill(buffer.at, buffer.count(), 1, 0)?;
    let wait = Random::new(process::id().into()).below(longest);
    let worker = gpu.clone();
    thread::spawn(move || -> crate::cuda::Result<()> {
        worker.enter()?;
        loop {
            worker.add(buffer.at, buffer.count(), 1, 0)?;
            worker.synchronise()?;
            thread::sleep(Duration::from_millis(2));
        }
    });
    thread::sleep(Duration::from_millis(wait));
    process::exit(args.number("status", "7") as i32)
}
