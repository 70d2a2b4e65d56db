//! Captures whose stream or context is destroyed before the capture ends. Other work of the program
//! must continue.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Stream, cu, late::late_cu},
    report::Report,
};
use std::thread;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    // The relaxed mode does not restrict other threads. An open capture in global mode would make
    // their calls fail.
    const RELAXED: u32 = 2;
    let (how, rounds) = (args.text("how", "stream"), args.size("rounds", "20"));
    let pause = args.milliseconds("pause-ms", "20");
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, args.size("mem", "16M") as usize)?;
    gpu.fill(buffer.at, buffer.count(), 0, 0)?;
    gpu.synchronise()?;
    match how {
        "stream" => {
            let stream = Stream::new()?;
            cu!(cuStreamBeginCapture_v2(stream.0, RELAXED))?;
            gpu.empty(stream.0)?;
        }
        "context" => {
            let mut context = 0;
            late_cu!(cuCtxCreate_v2(&mut context, 0, gpu.device))?;
            let stream = Stream::new()?;
            cu!(cuStreamBeginCapture_v2(stream.0, RELAXED))?;
            std::mem::forget(stream); // destroyed with its context
            late_cu!(cuCtxDestroy_v2(context))?;
            gpu.enter()?;
        }
        _ => return Err("--how: want stream or context".into()),
    }
    let stream = Stream::new()?;
    for _ in 0..rounds {
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        stream.synchronise()?;
        thread::sleep(pause);
    }
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * rounds)?;
    report.integer("rounds", rounds);
    Ok(())
}
