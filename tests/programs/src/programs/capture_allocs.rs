//! Memory that is allocated during a stream capture and used immediately. In the first mode, the
//! captured work uses the memory, as in PyTorch's allocator for graphs. In the second mode, calls
//! name the memory while another thread captures. In the third mode, another device reads the
//! memory, and only the driver learns of that.

use super::{Outcome, expect, unseen::address_of};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, Stream, cu,
        late::{FillNode, late_cu},
        read,
    },
    report::Report,
};
use std::{ffi::c_void, mem, sync::mpsc, thread};

/// The capture mode that permits allocations.
const RELAXED: u32 = 2;
/// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`. Setting it announces that another device will access the
/// memory.
const SYNC_MEMOPS: u32 = 6;
/// Bytes that are copied.
const LEN: usize = 1 << 20;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "40M") as usize, args.size("rounds", "10") as u32);
    let pause = args.milliseconds("pause-ms", "0");
    let gpu = Gpu::open(0)?;
    let source = Buffer::new(Kind::Alloc, LEN)?;
    gpu.fill(source.at, source.count(), 5, 0)?;
    gpu.synchronise()?;
    for round in 1..=rounds {
        match args.text("how", "captured") {
            "captured" => captured(memory, &source, round)?,
            "named" => named(&gpu, memory)?,
            "reached" => reached(memory)?,
            _ => return Err("--how: want captured, named or reached".into()),
        }
        thread::sleep(pause);
    }
    report.integer("rounds", rounds.into());
    Ok(())
}

/// Captures a graph that fills new memory and copies to its middle.
fn captured(memory: usize, source: &Buffer, value: u32) -> Outcome {
    let stream = Stream::new()?;
    cu!(cuStreamBeginCapture_v2(stream.0, RELAXED))?;
    let buffer = Buffer::new(Kind::Alloc, memory)?;
    let middle = buffer.at + memory as u64 / 2;
    let filled = late_cu!(cuMemsetD32Async(buffer.at, value, memory / 4, stream.0));
    let copied = late_cu!(cuMemcpyDtoDAsync_v2(middle, source.at, LEN, stream.0));
    let mut graph = 0;
    cu!(cuStreamEndCapture(stream.0, &mut graph))?;
    filled.and(copied)?;
    let mut exec = 0;
    cu!(cuGraphInstantiateWithFlags(&mut exec, graph, 0))?;
    cu!(cuGraphDestroy(graph))?;
    cu!(cuGraphLaunch(exec, stream.0))?;
    stream.synchronise()?;
    cu!(cuGraphExecDestroy(exec))?;
    expect("what was filled", read(buffer.at)?, value)?;
    expect("what was copied", read(middle + LEN as u64 / 2)?, 5)?;
    buffer.free()?;
    Ok(())
}

/// Names new memory in a graph's node, and sets `SYNC_MEMOPS` for it, while another thread
/// captures.
fn named(gpu: &Gpu, memory: usize) -> Outcome {
    let (tell, begun) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    thread::scope(|scope| {
        let capturer = scope.spawn(move || {
            gpu.enter()?;
            let stream = Stream::new()?;
            let mut graph = 0;
            cu!(cuStreamBeginCapture_v2(stream.0, RELAXED))?;
            let _ = tell.send(());
            let _ = ended.recv();
            cu!(cuStreamEndCapture(stream.0, &mut graph))?;
            cu!(cuGraphDestroy(graph))
        });
        begun.recv()?;
        let (mut graph, mut node, is_set) = (0, 0, 1u32);
        let buffer = Buffer::new(Kind::Alloc, memory)?;
        late_cu!(cuGraphCreate(&mut graph, 0))?;
        let fill = FillNode { at: buffer.at, pitch: 0, value: 7, element: 4, width: 1024, height: 1 };
        late_cu!(cuGraphAddMemsetNode(&mut node, graph, std::ptr::null(), 0, &fill, gpu.context))?;
        late_cu!(cuPointerSetAttribute(&is_set, SYNC_MEMOPS, buffer.at))?;
        cu!(cuGraphDestroy(graph))?;
        drop(end);
        capturer.join().map_err(|_| "a thread panicked")??;
        buffer.free()?;
        Ok(())
    })
}

/// Looks up new memory in the driver itself, bypassing the hooks. Drivers of network cards do so
/// before the card reads the memory.
fn reached(memory: usize) -> Outcome {
    type Ask = unsafe extern "C" fn(*mut c_void, i32, u64) -> u32;
    const MEMORY_TYPE: i32 = 2;
    let buffer = Buffer::new(Kind::Alloc, memory)?;
    let ask = address_of("cuPointerGetAttribute")?;
    let mut kind = 0u32;
    // SAFETY: the address is the driver's function of this name, and `kind` is a live value.
    let code = unsafe { mem::transmute::<usize, Ask>(ask)((&raw mut kind).cast(), MEMORY_TYPE, buffer.at) };
    expect("what the driver says of the memory", code, 0)?;
    buffer.free()?;
    Ok(())
}
