//! Many threads that submit to many streams, each with its own memory and order.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind, Stream, cu},
    report::Report,
};
use std::{sync::Arc, thread};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, streams) = (args.size("mem", "64M"), args.size("streams", "8").max(1));
    let (threads, rounds) = (args.size("threads", "4").max(1), args.size("rounds", "10"));
    let gpu = Gpu::open(0)?;
    let each = memory / (streams * threads);
    let workers: Vec<_> = (0..threads)
        .map(|t| {
            let gpu = gpu.clone();
            thread::spawn(move || work(&gpu, t as u32, streams, rounds, each as usize).map_err(|e| e.to_string()))
        })
        .collect();
    for worker in workers {
        worker.join().map_err(|_| "a thread panicked")??;
    }
    report.integer("streams", streams * threads);
    Ok(())
}

fn work(gpu: &Arc<Gpu>, thread: u32, streams: u64, rounds: u64, len: usize) -> Outcome {
    gpu.enter()?;
    let lane = |i| {
        let stream = if i % 2 == 0 { Stream::new() } else { Stream::blocking() };
        Ok((stream?, Buffer::new(Kind::Alloc, len)?))
    };
    let lanes = (0..streams).map(lane).collect::<cuda::Result<Vec<_>>>()?;
    for (stream, buffer) in &lanes {
        gpu.fill(buffer.at, buffer.count(), thread, stream.0)?;
    }
    let mut event = 0;
    cu!(cuEventCreate(&mut event, 2))?;
    for round in 0..rounds as u32 {
        for (i, (stream, buffer)) in lanes.iter().enumerate() {
            gpu.mix(buffer.at, buffer.count(), round, stream.0)?;
            gpu.add(buffer.at, buffer.count(), i as u32, stream.0)?;
            // Every third round, each stream waits for its neighbour.
            if round % 3 == 0 {
                cu!(cuEventRecord(event, stream.0))?;
                cu!(cuStreamWaitEvent(lanes[(i + 1) % lanes.len()].0.0, event, 0))?;
            }
        }
    }
    for round in (0..rounds as u32).rev() {
        for (i, (stream, buffer)) in lanes.iter().enumerate() {
            gpu.add(buffer.at, buffer.count(), (i as u32).wrapping_neg(), stream.0)?;
            gpu.unmix(buffer.at, buffer.count(), round, stream.0)?;
        }
    }
    for (stream, buffer) in &lanes {
        stream.synchronise()?;
        expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * u64::from(thread))?;
    }
    cu!(cuEventDestroy_v2(event))?;
    Ok(())
}
