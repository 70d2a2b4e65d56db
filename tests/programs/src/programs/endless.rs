//! A kernel or a graph that runs until the host ends it, after some time or at SIGUSR1. Until then
//! the program makes no call, so the library cannot know whether the work will end.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Mapped, Stream, cu},
    report::Report,
    signal,
};
use std::time::Duration;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    const GLOBAL: u32 = 0;
    let time = Duration::from_secs_f64(args.number("seconds", "5"));
    let gpu = Gpu::open(0)?;
    let (stream, flag) = (Stream::new()?, Mapped::new(4)?);
    let buffer = Buffer::new(Kind::Alloc, args.size("mem", "4M") as usize)?;
    gpu.fill(buffer.at, buffer.count(), 1, stream.0)?;
    if args.size("graph", "0") == 0 {
        gpu.spin_until(flag.at, stream.0)?;
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
    } else {
        let (mut graph, mut exec) = (0, 0);
        cu!(cuStreamBeginCapture_v2(stream.0, GLOBAL))?;
        gpu.spin_until(flag.at, stream.0)?;
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        cu!(cuStreamEndCapture(stream.0, &mut graph))?;
        cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
        cu!(cuGraphLaunch(exec, stream.0))?;
    }
    eprintln!("running");
    signal::pause(time);
    flag.set(1);
    stream.synchronise()?;
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * 2)?;
    report.number("ran", time.as_secs_f64());
    Ok(())
}
