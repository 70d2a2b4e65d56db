//! Threads that launch, query events, and allocate, on several GPUs, with pauses. Such a program is
//! often idle, but only briefly. With `--later N`, the program also starts to use GPU `N` after
//! SIGUSR2.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        self, Buffer, Gpu, Kind, Stream, cu,
        nvml::{Lookup, Nvml},
    },
    report::Report,
    signal,
};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A thread's function. Its arguments are the GPU, the bytes, the pause, and the time to stop.
type Work = fn(&Gpu, usize, Duration, Instant) -> Outcome;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, pause) = (args.size("mem", "16M") as usize, args.milliseconds("pause-ms", "20"));
    let end = Instant::now() + Duration::from_secs_f64(args.number("seconds", "5"));
    let exit = args.given("exit").then(|| {
        let code = args.number("exit", "0") as i32;
        thread::spawn(move || {
            while !has_ended(end) {
                thread::sleep(pause / 10);
            }
            std::process::exit(code)
        })
    });
    let ordinals = args.text("gpus", "0").split(',').map(str::parse).collect::<Result<Vec<i32>, _>>()?;
    let mut gpus = ordinals.into_iter().map(Gpu::open).collect::<cuda::Result<Vec<Arc<Gpu>>>>()?;
    let each: [Work; 3] = [launch, ask, allocate];
    let start = |(gpu, work): (Arc<Gpu>, Work)| {
        thread::spawn(move || {
            gpu.enter()
                .map_err(Into::into)
                .and_then(|()| work(&gpu, memory, pause, end))
                .map_err(|e: Box<dyn std::error::Error>| e.to_string())
        })
    };
    let all = gpus.iter().flat_map(|gpu| each.map(|work| (gpu.clone(), work)));
    let threads: Vec<_> = all.map(start).collect();
    report.integer("threads", threads.len() as u64);
    if args.given("later") {
        // SAFETY: the handler only sets a flag.
        unsafe { libc::signal(libc::SIGUSR2, told_of_another as extern "C" fn(i32) as usize) };
        while !(TOLD_OF_ANOTHER.load(Ordering::SeqCst) || has_ended(end)) {
            thread::sleep(Duration::from_millis(5));
        }
        let gpu = Gpu::open(args.number("later", "1") as i32)?;
        gpus.push(gpu.clone());
        launch(&gpu, memory, pause, end)?;
    }
    for thread in threads {
        thread.join().map_err(|_| "a thread panicked")??;
    }
    // The exit of the joined thread ends the process.
    exit.map(thread::JoinHandle::join);
    report.text("uuids", &gpus.iter().map(|gpu| gpu.uuid()).collect::<cuda::Result<Vec<_>>>()?.join(","));
    if args.given("nvml") {
        report.text("nvml_uuid", &Nvml::open(0)?.devices(Lookup::Library)?.1);
    }
    Ok(())
}

static TOLD_OF_ANOTHER: AtomicBool = AtomicBool::new(false);

extern "C" fn told_of_another(_: i32) {
    TOLD_OF_ANOTHER.store(true, Ordering::SeqCst);
}

/// Whether the time is over, or SIGUSR1 has arrived.
fn has_ended(end: Instant) -> bool {
    signal::has_come() || Instant::now() >= end
}

fn launch(gpu: &Gpu, memory: usize, pause: Duration, end: Instant) -> Outcome {
    let (stream, buffer) = (Stream::new()?, Buffer::new(Kind::Alloc, memory)?);
    gpu.fill(buffer.at, buffer.count(), 1, stream.0)?;
    let mut rounds = 1;
    while !has_ended(end) {
        gpu.add(buffer.at, buffer.count(), 1, stream.0)?;
        rounds += 1;
        stream.synchronise()?;
        expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * rounds)?;
        signal::pause(pause);
    }
    Ok(())
}

/// Makes calls that the library does not hook.
fn ask(_: &Gpu, _: usize, pause: Duration, end: Instant) -> Outcome {
    let mut event = 0;
    cu!(cuEventCreate(&mut event, 2))?;
    while !has_ended(end) {
        let mut name = [0; 64];
        cu!(cuEventRecord(event, 0))?;
        cu!(cuDeviceGetName(name.as_mut_ptr(), 64, 0))?;
        cu!(cuEventSynchronize(event))?;
        signal::pause(pause * 2);
    }
    cu!(cuEventDestroy_v2(event))?;
    Ok(())
}

fn allocate(gpu: &Gpu, memory: usize, pause: Duration, end: Instant) -> Outcome {
    let mut value = 0;
    while !has_ended(end) {
        value += 1;
        let stream = Stream::new()?;
        let buffers = (0..3).map(|_| Buffer::new(Kind::Alloc, memory / 8)).collect::<cuda::Result<Vec<_>>>()?;
        for buffer in &buffers {
            gpu.fill(buffer.at, buffer.count(), value, stream.0)?;
        }
        stream.synchronise()?;
        for buffer in buffers {
            expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * u64::from(value))?;
            buffer.free()?;
        }
        signal::pause(pause * 3);
    }
    Ok(())
}
