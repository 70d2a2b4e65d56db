//! The pattern of communication libraries: a kernel runs until a thread of the program ends it, and
//! the same thread copies at that time.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind, Mapped, Stream, cu},
    report::Report,
};
use std::{
    sync::{Arc, mpsc},
    thread,
};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds, steps) =
        (args.size("mem", "4M") as usize & !3, args.size("rounds", "3"), args.size("steps", "10"));
    let gpu = Gpu::open(0)?;
    let stream = Stream::new()?;
    let flag = Arc::new(Mapped::new(4)?);
    // Allocates everything first, because allocating and freeing may wait for a running kernel.
    let (side, host) = (Stream::new()?, Mapped::new(memory)?);
    let buffer = Arc::new(Buffer::new(Kind::Alloc, memory)?);
    gpu.fill(buffer.at, buffer.count(), 0, 0)?;
    gpu.synchronise()?;
    let (work, asked) = mpsc::channel();
    let proxy = {
        let (gpu, flag, buffer) = (gpu.clone(), flag.clone(), buffer.clone());
        thread::spawn(move || {
            gpu.enter()?;
            for () in asked {
                let copied = (0..steps).try_for_each(|_| step(&gpu, &buffer, &host, &side));
                flag.set(1);
                copied?;
            }
            cuda::Result::Ok(())
        })
    };
    for _ in 0..rounds {
        flag.set(0);
        gpu.spin_until(flag.at, stream.0)?;
        // The proxy thread has failed, so it receives no more work.
        if work.send(()).is_err() {
            flag.set(1);
        }
        stream.synchronise()?;
    }
    drop(work);
    proxy.join().map_err(|_| "a thread panicked")??;
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * steps * rounds)?;
    report.integer("rounds", rounds);
    Ok(())
}

fn step(gpu: &Gpu, buffer: &Buffer, host: &Mapped, stream: &Stream) -> cuda::Result<()> {
    let len = buffer.count() as usize * 4;
    cu!(cuMemcpyDtoHAsync_v2(host.host, buffer.at, len, stream.0))?;
    stream.synchronise()?;
    cu!(cuMemcpyHtoDAsync_v2(buffer.at, host.host, len, stream.0))?;
    gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
    stream.synchronise()
}
