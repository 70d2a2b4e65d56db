//! Work in a stream that waits for a step of the host. The stream waits for a value that a call or
//! a thread writes, or a host function in the stream waits for a lock.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, Mapped, Stream, cu,
        late::{self, BatchOp, late_cu},
    },
    report::Report,
};
use std::{
    ffi::c_void,
    ptr,
    sync::{Arc, Mutex, MutexGuard},
    thread,
};

/// Waits until the value is at least the given number.
const AT_LEAST: u32 = 0;
/// Enough kernels for the library to learn that a deep queue of these kernels is harmless.
const LEGACY_KERNELS: u32 = 6000;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let how = args.text("how", "write");
    let (rounds, pause) = (args.size("rounds", "3") as u32, args.milliseconds("pause-ms", "300"));
    let gpu = Gpu::open(0)?;
    let blocking = args.size("blocking", "0") == 1;
    let stream = || if blocking { Stream::blocking() } else { Stream::new() };
    let (waiting, other) = (stream()?, stream()?);
    let (buffer, flag) = (Buffer::new(Kind::Alloc, 4 << 20)?, Buffer::new(Kind::Alloc, 4)?);
    let mapped = Arc::new(Mapped::new(4)?);
    let door = Mutex::new(());
    gpu.fill(buffer.at, buffer.count(), 0, 0)?;
    gpu.fill(flag.at, 1, 0, 0)?;
    gpu.synchronise()?;
    let at = if how == "thread" { mapped.at } else { flag.at };
    for round in 1..=rounds {
        if blocking {
            // Work of the legacy stream, before the waiting work.
            (0..LEGACY_KERNELS + round).try_for_each(|_| gpu.empty(0))?;
        }
        gpu.add(buffer.at, buffer.count(), 1, waiting.0)?;
        if matches!(how, "lock" | "callback") {
            let held = lock(&door);
            let data = ptr::from_ref(&door).cast_mut().cast();
            if how == "lock" {
                cu!(cuLaunchHostFunc(waiting.0, enter, data))?;
            } else {
                late_cu!(cuStreamAddCallback(waiting.0, enter_told, data, 0))?;
            }
            thread::sleep(pause);
            // The program launches while it holds its lock. The launch may block, and the function
            // in the stream waits for the lock.
            gpu.add(buffer.at, buffer.count(), 1, waiting.0)?;
            drop(held);
            waiting.synchronise()?;
            continue;
        }
        late_cu!(cuStreamWaitValue32_v2(waiting.0, at, round, AT_LEAST))?;
        gpu.add(buffer.at, buffer.count(), 1, waiting.0)?;
        if how == "thread" {
            let mapped = mapped.clone();
            let writer = thread::spawn(move || {
                thread::sleep(pause);
                mapped.set(round);
            });
            waiting.synchronise()?;
            writer.join().map_err(|_| "a thread panicked")?;
            continue;
        }
        thread::sleep(pause);
        match how {
            "write" => late_cu!(cuStreamWriteValue32_v2(other.0, at, round, 0))?,
            "copy" => late_cu!(cuMemcpyHtoD_v2(at, ptr::from_ref(&round).cast(), 4))?,
            "batch" => {
                let write = BatchOp { operation: late::WRITE, at, value: round.into(), flags: 0, alias: 0, padding: 0 };
                late_cu!(cuStreamBatchMemOp_v2(other.0, 1, &write, 0))?;
            }
            _ => return Err("--how: want write, copy, batch, thread, lock or callback".into()),
        }
        waiting.synchronise()?;
    }
    expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * u64::from(2 * rounds))?;
    report.integer("rounds", rounds.into());
    Ok(())
}

fn lock(door: &Mutex<()>) -> MutexGuard<'_, ()> {
    door.lock().unwrap_or_else(|e| e.into_inner())
}

unsafe extern "C" fn enter(door: *mut c_void) {
    // SAFETY: `run` passes a lock that outlives the stream's work.
    drop(lock(unsafe { &*door.cast() }));
}

unsafe extern "C" fn enter_told(_stream: usize, _status: u32, door: *mut c_void) {
    // SAFETY: the caller passes the lock of `enter`, which outlives the stream's work.
    unsafe { enter(door) }
}
