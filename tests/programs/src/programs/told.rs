//! Works on request. For each line on standard input, the program runs a kernel on its memory and
//! reports the kernel's duration, which includes restoring the memory. Then the program works on
//! all of its memory.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind},
    report::Report,
};
use std::{
    io::{Write, stdin, stdout},
    time::Instant,
};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, writes) = (args.size("mem", "64M"), args.text("writes", "none"));
    let gpu = Gpu::open(0)?;
    let buffer = Buffer::new(Kind::Alloc, memory as usize & !3)?;
    gpu.fill(buffer.at, buffer.count(), 1, 0)?;
    gpu.mix(buffer.at, buffer.count(), 7, 0)?;
    let mut sum = gpu.sum(buffer.at, buffer.count())?;
    let say = |text: &str| writeln!(stdout(), "{text}").and_then(|()| stdout().flush());
    say("ready")?;
    let mut rounds = 0;
    for line in stdin().lines() {
        line?;
        let begin = Instant::now();
        gpu.add(buffer.at, 1, 0, 0)?;
        gpu.synchronise()?;
        let back = begin.elapsed();
        expect("sum", gpu.sum(buffer.at, buffer.count())?, sum)?;
        if writes == "all" {
            gpu.mix(buffer.at, buffer.count(), 7, 0)?;
            sum = gpu.sum(buffer.at, buffer.count())?;
        }
        rounds += 1;
        say(&format!("{:.6}", back.as_secs_f64()))?;
    }
    buffer.free()?;
    report.integer("rounds", rounds);
    Ok(())
}
