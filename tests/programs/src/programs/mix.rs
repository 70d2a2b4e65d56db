//! Works in rounds on all of its memory until SIGUSR1. Every round can be undone exactly. So the
//! final check of every element detects a lost, repeated or reordered launch.

use super::{Outcome, Random, expect};
use crate::{
    args::Args,
    cuda::{self, Buffer, Gpu, Kind, cu},
    report::Report,
    signal,
};
use std::time::{Duration, Instant};

/// Number of elements in each chunk that are copied to the host and compared one by one.
const SAMPLES: u64 = 64;
/// Nanoseconds for which an endless program keeps the GPU busy after each round. Spinning costs the
/// simulated GPU hardly any processor time.
const SPIN: u64 = 10_000_000;
const INVALID_DEVICE: u32 = 101;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let kind = Kind::parse(args.text("kind", "alloc")).ok_or("--kind: want alloc, vmm, managed or async")?;
    let (memory, chunks) = (args.size("mem", "64M"), args.size("chunks", "4").max(1));
    let (rounds, spin) = match args.text("rounds", "10") {
        "endless" => (u64::MAX, SPIN),
        _ => (args.size("rounds", "10"), 0),
    };
    let (gpu_time, cpu_time) = (args.milliseconds("gpu-ms", "20"), args.milliseconds("cpu-ms", "0"));
    let mut random = Random::new(args.size("seed", "1"));

    if args.given("lock") {
        // SAFETY: `mlockall` takes no pointers.
        expect("result of mlockall", unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE) }, 0)?;
    }
    let gpu = Gpu::open(args.size("device", "0") as i32)?;
    let buffers =
        (0..chunks).map(|_| Buffer::new(kind, (memory / chunks) as usize & !3)).collect::<cuda::Result<Vec<_>>>()?;
    let first = |i: usize| 0x1000_0000 + i as u32;
    for (i, buffer) in buffers.iter().enumerate() {
        gpu.fill(buffer.at, buffer.count(), first(i), 0)?;
    }
    gpu.synchronise()?;
    if args.given("setuid") {
        let user = args.size("setuid", "65534") as libc::uid_t;
        // SAFETY: `setresuid` takes no pointers.
        expect("result of setresuid", unsafe { libc::setresuid(user, user, user) }, 0)?;
        eprintln!("runs as user {user}");
    }

    let mut passes = if args.given("reps") { args.size("reps", "1") } else { 1 };
    let mut done = Vec::new();
    let (mut busy, mut longest) = (Duration::ZERO, Duration::ZERO);
    for round in (0..rounds).take_while(|_| !signal::has_come()) {
        let (seed, value) = (random.next() as u32, random.next() as u32);
        if args.given("no-device") {
            let (ordinal, mut context) = (args.size("no-device", "1") as i32, 0);
            let refused = cu!(cuDevicePrimaryCtxRetain(&mut context, ordinal)).err().map_or(0, |e| e.code);
            expect("result of a context on a GPU that does not exist", refused, INVALID_DEVICE)?;
        }
        let start = Instant::now();
        for buffer in &buffers {
            gpu.mix(buffer.at, buffer.count(), seed, 0)?;
        }
        for _ in 0..passes {
            for buffer in &buffers {
                gpu.add(buffer.at, buffer.count(), value, 0)?;
            }
        }
        if spin > 0 {
            gpu.spin(spin, 0)?;
        }
        gpu.synchronise()?;
        let took = start.elapsed();
        busy += took;
        longest = longest.max(took);
        done.push((seed, value.wrapping_mul(passes as u32)));
        if round == 0 && !args.given("reps") {
            let pass = took.as_secs_f64() / (passes + 1) as f64;
            passes = (gpu_time.as_secs_f64() / pass.max(1e-6)).clamp(1.0, 1e5) as u64;
        }
        if cpu_time >= Duration::from_secs(1) {
            eprintln!("round {round} is over");
        }
        think(cpu_time, args.text("cpu", "sleep") == "burn");
    }

    for (seed, added) in done.iter().rev() {
        for buffer in &buffers {
            gpu.add(buffer.at, buffer.count(), added.wrapping_neg(), 0)?;
            gpu.unmix(buffer.at, buffer.count(), *seed, 0)?;
        }
    }
    for (i, buffer) in buffers.iter().enumerate() {
        expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * u64::from(first(i)))?;
        for _ in 0..SAMPLES.min(buffer.count()) {
            expect("element", cuda::read(buffer.at + 4 * random.below(buffer.count()))?, first(i))?;
        }
    }
    report.integer("mem", memory);
    report.integer("rounds", done.len() as u64);
    report.integer("passes", passes);
    report.number("gpu_seconds", busy.as_secs_f64());
    report.number("longest_round", longest.as_secs_f64());
    buffers.into_iter().try_for_each(Buffer::free)?;
    Ok(())
}

/// Spends time on the CPU, asleep or busy.
fn think(time: Duration, burn: bool) {
    if !burn {
        return signal::pause(time);
    }
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}
