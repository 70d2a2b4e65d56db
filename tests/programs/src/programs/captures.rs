//! Runs slow captures in sequence until SIGUSR1, while another thread submits work that is not
//! captured.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind, Stream, cu},
    report::Report,
    signal,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

const MODES: [(&str, u32); 3] = [("global", 0), ("thread-local", 1), ("relaxed", 2)];
const LAUNCHES: u32 = 4;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds, pause) =
        (args.size("mem", "16M"), args.size("rounds", "6"), args.milliseconds("capture-ms", "50"));
    let only = args.text("mode", "all");
    let modes: Vec<u32> =
        MODES.iter().filter(|(name, _)| only == "all" || only == *name).map(|(_, mode)| *mode).collect();
    if modes.is_empty() {
        return Err("--mode: want all, global, thread-local or relaxed".into());
    }
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, memory as usize / 2)?;
    gpu.fill(buffer.at, buffer.count(), 1, 0)?;
    // The memory is allocated here because a capture in global mode forbids allocations.
    let (stream, beside) = (Stream::new()?, Buffer::new(Kind::Alloc, memory as usize / 2)?);
    gpu.fill(beside.at, beside.count(), 0, 0)?;
    gpu.synchronise()?;
    let done = Arc::new(AtomicBool::new(false));
    let other = {
        let (gpu, done) = (gpu.clone(), done.clone());
        thread::spawn(move || work(&gpu, &stream, &beside, &done).map_err(|e| e.to_string()))
    };
    let captures = capture(&gpu, &buffer, &modes, rounds, pause);
    done.store(true, Ordering::SeqCst);
    let steps = other.join().map_err(|_| "a thread panicked")??;
    let captures = captures?;
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * (1 + captures * u64::from(LAUNCHES)))?;
    report.integer("captures", captures);
    report.integer("steps", steps);
    Ok(())
}

/// Returns the number of captures.
fn capture(gpu: &Gpu, buffer: &Buffer, modes: &[u32], rounds: u64, pause: Duration) -> cuda::Result<u64> {
    let stream = Stream::new()?;
    let mut captures = 0;
    for round in (0..rounds).take_while(|_| !signal::has_come()) {
        let (mut graph, mut exec) = (0, 0);
        cu!(cuStreamBeginCapture_v2(stream.0, modes[round as usize % modes.len()]))?;
        for _ in 0..LAUNCHES {
            gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
            signal::pause(pause / LAUNCHES);
        }
        cu!(cuStreamEndCapture(stream.0, &mut graph))?;
        cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
        cu!(cuGraphDestroy(graph))?;
        cu!(cuGraphLaunch(exec, stream.0))?;
        stream.synchronise()?;
        cu!(cuGraphExecDestroy(exec))?;
        captures += 1;
    }
    Ok(captures)
}

/// Launches and asynchronous copies on a separate stream, which a concurrent capture permits in
/// every mode.
fn work(gpu: &Gpu, stream: &Stream, buffer: &Buffer, done: &AtomicBool) -> Result<u64, Box<dyn std::error::Error>> {
    gpu.enter()?;
    let (mut steps, mut last) = (0, 0_u32);
    while !done.load(Ordering::SeqCst) {
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        cu!(cuMemcpyDtoHAsync_v2(std::ptr::from_mut(&mut last).cast(), buffer.at, 4, stream.0))?;
        steps += 1;
        thread::sleep(Duration::from_millis(2));
    }
    stream.synchronise()?;
    expect("last copy", u64::from(last), steps)?;
    expect("sum beside captures", gpu.sum(buffer.at, buffer.count())?, buffer.count() * steps)?;
    Ok(steps)
}
