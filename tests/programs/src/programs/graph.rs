//! Captures a graph in global mode, with a fork into a second stream, and replays it.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Stream, cu},
    report::Report,
};
use std::{thread, time::Instant};

const GLOBAL: u32 = 0;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, replays, pause) =
        (args.size("mem", "16M"), args.size("replays", "20"), args.milliseconds("cpu-ms", "0"));
    let gpu = Gpu::open(0)?;
    let (a, b) = (Buffer::new(Kind::Alloc, memory as usize / 2)?, Buffer::new(Kind::Alloc, memory as usize / 2)?);
    let (main, side) = (Stream::new()?, Stream::new()?);
    let (mut fork, mut join) = (0, 0);
    cu!(cuEventCreate(&mut fork, 2))?;
    cu!(cuEventCreate(&mut join, 2))?;
    gpu.fill(a.at, a.count(), 1, main.0)?;
    gpu.fill(b.at, b.count(), 0, main.0)?;
    main.synchronise()?;

    let (mut graph, mut exec) = (0, 0);
    cu!(cuStreamBeginCapture_v2(main.0, GLOBAL))?;
    gpu.add(a.at, a.count(), 2, main.0)?;
    cu!(cuEventRecord(fork, main.0))?;
    cu!(cuStreamWaitEvent(side.0, fork, 0))?;
    gpu.add(b.at, b.count(), 5, side.0)?;
    cu!(cuEventRecord(join, side.0))?;
    gpu.mix(a.at, a.count(), 7, main.0)?;
    gpu.unmix(a.at, a.count(), 7, main.0)?;
    cu!(cuStreamWaitEvent(main.0, join, 0))?;
    gpu.add(a.at, a.count(), 1, main.0)?;
    cu!(cuStreamEndCapture(main.0, &mut graph))?;
    cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
    cu!(cuGraphDestroy(graph))?;

    expect("elements that capturing alone changed", gpu.sum(b.at, b.count())?, 0)?;
    let start = Instant::now();
    for _ in 0..replays {
        cu!(cuGraphLaunch(exec, main.0))?;
        if !pause.is_zero() {
            main.synchronise()?;
            thread::sleep(pause);
        }
    }
    main.synchronise()?;
    report.number("replay_seconds", start.elapsed().as_secs_f64());
    expect("sum of a", gpu.sum(a.at, a.count())?, a.count() * (1 + 3 * replays))?;
    expect("sum of b", gpu.sum(b.at, b.count())?, b.count() * 5 * replays)?;
    cu!(cuGraphExecDestroy(exec))?;
    cu!(cuEventDestroy_v2(fork))?;
    cu!(cuEventDestroy_v2(join))?;
    report.integer("replays", replays);
    Ok(())
}
