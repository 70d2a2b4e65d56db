//! Takes random steps with memory of several kinds and sizes. Contents must persist until the
//! memory is freed.

use super::{Outcome, Random, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Error, Gpu, Kind, cu},
    report::Report,
    signal,
};
use std::time::{Duration, Instant};

struct Held {
    buffer: Buffer,
    value: u32,
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (limit, seed) = (args.size("mem", "256M"), args.size("seed", "1"));
    let (time, least) = (Duration::from_secs_f64(args.number("seconds", "2")), args.size("steps", "0"));
    let gpu = Gpu::open(0)?;
    let mut random = Random::new(seed);
    let mut held: Vec<Held> = Vec::new();
    let (mut steps, mut refused) = (0, 0);
    let start = Instant::now();
    while (start.elapsed() < time || steps < least) && !signal::has_come() {
        steps += 1;
        let used: u64 = held.iter().map(|h| h.buffer.count() * 4).sum();
        let pick = random.below(held.len() as u64) as usize;
        match random.below(10) {
            0..=3 => {
                let kind = [Kind::Alloc, Kind::Alloc, Kind::Vmm, Kind::Async][random.below(4) as usize];
                let len =
                    if random.below(3) == 0 { 4 + 4 * random.below(4096) } else { 4 + 4 * random.below(limit / 16) };
                if used + len.next_multiple_of(2 << 20) > limit {
                    continue;
                }
                let value = random.next() as u32;
                match Buffer::new(kind, len as usize) {
                    Ok(buffer) => {
                        gpu.fill(buffer.at, buffer.count(), value, 0)?;
                        held.push(Held { buffer, value });
                    }
                    Err(e) if e.code == Error::OUT_OF_MEMORY => refused += 1,
                    Err(e) => return Err(e.into()),
                }
            }
            4..=5 if !held.is_empty() => {
                // The last launch may still run: freeing must wait for it.
                let old = held.swap_remove(pick);
                gpu.add(old.buffer.at, old.buffer.count(), 1, 0)?;
                old.buffer.free()?;
            }
            6 if !held.is_empty() && used * 2 < limit => {
                let Held { buffer, value } = held.swap_remove(pick);
                match Buffer::new(Kind::Alloc, buffer.count() as usize * 8) {
                    Ok(grown) => {
                        gpu.fill(grown.at, grown.count(), value, 0)?;
                        cu!(cuMemcpyDtoD_v2(grown.at, buffer.at, buffer.count() as usize * 4))?;
                        held.push(Held { buffer: grown, value });
                    }
                    Err(e) if e.code == Error::OUT_OF_MEMORY => {
                        refused += 1;
                        held.push(Held { buffer, value });
                    }
                    Err(e) => return Err(e.into()),
                }
            }
            7..=8 if !held.is_empty() => {
                let add = random.next() as u32;
                gpu.add(held[pick].buffer.at, held[pick].buffer.count(), add, 0)?;
                held[pick].value = held[pick].value.wrapping_add(add);
            }
            9 if !held.is_empty() => check(&gpu, &held[pick])?,
            _ => {}
        }
    }
    held.iter().try_for_each(|h| check(&gpu, h))?;
    held.into_iter().try_for_each(|h| h.buffer.free())?;
    report.integer("steps", steps);
    report.integer("refused", refused);
    Ok(())
}

fn check(gpu: &Gpu, held: &Held) -> Outcome {
    expect("sum", gpu.sum(held.buffer.at, held.buffer.count())?, held.buffer.count() * u64::from(held.value))
}
