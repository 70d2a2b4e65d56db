//! Deep queues: kernels at the driver's highest rate, in one stream or in many, individually or in
//! graphs. Reports the longest queue: the GPU time of all work that was queued when a launch
//! returned. The simulated GPU runs one kernel at a time.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind, Mapped, Stream, cu},
    report::Report,
};

/// The number of elements of a lane, which is a stream with its own part of the memory.
const COUNT: u64 = 256;
/// The longest GPU time between two counting kernels, in nanoseconds.
const STEP_NS: u64 = 2_000_000;
const STEP: u64 = 8;

struct Lane {
    stream: Stream,
    at: u64,
    /// Counters of steps: executed by the GPU, and launched by the host.
    count: Mapped,
    added: u64,
}

/// Steps that were launched and have not finished.
fn queued(lanes: &[Lane]) -> u64 {
    lanes.iter().map(|lane| lane.added - u64::from(lane.count.get())).sum()
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (launches, ns) = (args.size("launches", "10000"), args.size("ns", "100000"));
    let (streams, per_graph) = (args.size("streams", "1").max(1), args.size("per-graph", "0"));
    let gpu = Gpu::open(0)?;
    // Spreads the lanes over all memory, so that any part that is evicted too early is detected.
    let apart = (args.size("mem", "0") / streams).max(COUNT * 4) & !3;
    let buffer = Buffer::new(Kind::Alloc, (streams * apart) as usize)?;
    gpu.fill(buffer.at, buffer.count(), 0, 0)?;
    gpu.synchronise()?;
    let lane = |i| Ok(Lane { stream: Stream::new()?, at: buffer.at + i * apart, count: Mapped::new(4)?, added: 0 });
    let mut lanes = (0..streams).map(lane).collect::<cuda::Result<Vec<_>>>()?;
    let mut longest = 0;
    if let Some(graphs) = launches.checked_div(per_graph) {
        let execs = lanes.iter().map(|lane| graph(&gpu, lane, per_graph, ns)).collect::<cuda::Result<Vec<_>>>()?;
        for i in 0..graphs {
            let at = (i % streams) as usize;
            cu!(cuGraphLaunch(execs[at], lanes[at].stream.0))?;
            lanes[at].added += 1;
            longest = longest.max(queued(&lanes) * per_graph * ns);
        }
    } else {
        let step = (STEP_NS / ns).clamp(1, STEP);
        for i in 0..launches {
            let lane = &mut lanes[(i % streams) as usize];
            gpu.spin(ns, lane.stream.0)?;
            if (i / streams) % step == step - 1 {
                count(&gpu, lane)?;
                lane.added += 1;
                longest = longest.max(queued(&lanes) * step * ns);
            }
        }
    }
    for lane in &lanes {
        lane.stream.synchronise()?;
        expect("sum", gpu.sum(lane.at, COUNT)?, COUNT * lane.added)?;
    }
    report.integer("launches", launches);
    report.integer("longest_queue_ns", longest);
    Ok(())
}

/// Counts a step.
fn count(gpu: &Gpu, lane: &Lane) -> cuda::Result<()> {
    gpu.add(lane.at, COUNT, 1, lane.stream.0)?;
    gpu.add(lane.count.at, 1, 1, lane.stream.0)
}

/// Captures a graph of `kernels` kernels, followed by the kernels of `count`.
fn graph(gpu: &Gpu, lane: &Lane, kernels: u64, ns: u64) -> cuda::Result<usize> {
    const RELAXED: u32 = 2;
    let (mut graph, mut exec) = (0, 0);
    cu!(cuStreamBeginCapture_v2(lane.stream.0, RELAXED))?;
    for _ in 0..kernels {
        gpu.spin(ns, lane.stream.0)?;
    }
    count(gpu, lane)?;
    cu!(cuStreamEndCapture(lane.stream.0, &mut graph))?;
    cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
    cu!(cuGraphDestroy(graph))?;
    Ok(exec)
}
