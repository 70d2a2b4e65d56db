//! A kernel that runs until the host ends it, while other streams copy and compute. Such work
//! cannot be drained by waiting alone.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, Stream, cu},
    report::Report,
};
use std::{
    ffi::c_void,
    ptr, thread,
    time::{Duration, Instant},
};

const MAPPED: u32 = 2;
const NOT_READY: u32 = 600;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, time) = (args.size("mem", "16M") as usize & !3, Duration::from_secs_f64(args.number("seconds", "1")));
    let gpu = Gpu::open(0)?;
    let (spinner, worker) = (Stream::new()?, Stream::new()?);
    let buffer = Buffer::new(Kind::Alloc, memory)?;
    let (mut host, mut flag) = (ptr::null_mut(), 0);
    cu!(cuMemHostAlloc(&mut host, memory.max(4096), MAPPED))?;
    let mut signal = ptr::null_mut();
    cu!(cuMemHostAlloc(&mut signal, 4096, MAPPED))?;
    cu!(cuMemHostGetDevicePointer_v2(&mut flag, signal, 0))?;
    // SAFETY: the pinned memory has at least these sizes, and no other users yet.
    unsafe {
        signal.cast::<u32>().write_volatile(0);
        ptr::write_bytes(host, 0, memory);
    }
    let (mut began, mut ended) = (0, 0);
    cu!(cuEventCreate(&mut began, 0))?;
    cu!(cuEventCreate(&mut ended, 0))?;

    gpu.spin_until(flag, spinner.0)?;
    let (start, mut steps) = (Instant::now(), 0);
    cu!(cuEventRecord(began, worker.0))?;
    while start.elapsed() < time {
        cu!(cuMemcpyHtoDAsync_v2(buffer.at, host, memory, worker.0))?;
        gpu.add(buffer.at, buffer.count(), 1, worker.0)?;
        cu!(cuMemcpyDtoHAsync_v2(host, buffer.at, memory, worker.0))?;
        worker.synchronise()?;
        steps += 1;
    }
    gpu.spin(1_000_000, worker.0)?;
    cu!(cuEventRecord(ended, worker.0))?;
    cu!(cuEventSynchronize(ended))?;
    let running = cu!(cuStreamQuery(spinner.0)).err().map_or(0, |e| e.code);
    expect("state of the kernel that nobody ended", running, NOT_READY)?;
    // A callback in another stream ends the kernel, as in runtimes.
    cu!(cuLaunchHostFunc(worker.0, end, signal.cast()))?;
    while cu!(cuStreamQuery(spinner.0)).is_err_and(|e| e.code == NOT_READY) {
        thread::sleep(Duration::from_millis(1));
    }
    spinner.synchronise()?;
    let mut milliseconds = 0.0;
    cu!(cuEventElapsedTime(&mut milliseconds, began, ended))?;
    // SAFETY: `host` has `memory` bytes, and the copies are done.
    let last = unsafe { host.add(memory - 4).cast::<u32>().read() };
    expect("last element", last, steps)?;
    cu!(cuEventDestroy_v2(began))?;
    cu!(cuEventDestroy_v2(ended))?;
    cu!(cuMemFreeHost(host))?;
    cu!(cuMemFreeHost(signal))?;
    report.integer("steps", steps.into());
    report.number("milliseconds", milliseconds.into());
    Ok(())
}

/// Ends the kernel.
unsafe extern "C" fn end(signal: *mut c_void) {
    // SAFETY: `run` passes mapped host memory, which outlives the call.
    unsafe { signal.cast::<u32>().write_volatile(1) };
}
