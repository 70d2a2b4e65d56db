//! One chunk mapped at many addresses. Some allocators back every unused page with the same zeros
//! in this way.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        self, Gpu,
        api::{Access, Location, Properties},
        cu, read,
    },
    report::Report,
};
use std::time::Instant;

const CHUNK: usize = 2 << 20;
const HERE: Location = Location { kind: 1, id: 0 };

struct Aliases {
    handle: u64,
    start: u64,
}

impl Aliases {
    fn at(&self, index: u64) -> u64 {
        self.start + index * CHUNK as u64
    }

    fn map(&self, index: u64) -> cuda::Result<()> {
        cu!(cuMemMap(self.at(index), CHUNK, 0, self.handle, 0))?;
        cu!(cuMemSetAccess(self.at(index), CHUNK, &Access { location: HERE, flags: 3 }, 1))
    }

    fn unmap(&self, index: u64) -> cuda::Result<()> {
        cu!(cuMemUnmap(self.at(index), CHUNK))
    }
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (count, remapped) = (args.size("count", "32768"), args.size("remapped", "1000"));
    let gpu = Gpu::open(0)?;
    let mut aliases = Aliases { handle: 0, start: 0 };
    let properties = Properties { kind: 1, location: HERE, ..Properties::default() };
    cu!(cuMemAddressReserve(&mut aliases.start, count as usize * CHUNK, 0, 0, 0))?;
    cu!(cuMemCreate(&mut aliases.handle, CHUNK, &properties, 0))?;
    let begin = Instant::now();
    (0..count).try_for_each(|index| aliases.map(index))?;
    report.number("map_seconds", begin.elapsed().as_secs_f64());

    let begin = Instant::now();
    // Spreads the accesses over all addresses.
    let which = |round: u64| round * 7919 % count;
    for round in 0..remapped {
        aliases.unmap(which(round))?;
        aliases.map(which(round))?;
    }
    report.number("remap_us", begin.elapsed().as_secs_f64() * 1e6 / remapped as f64);

    for (round, index) in [0, count / 2, count - 1].into_iter().enumerate() {
        gpu.fill(aliases.at(index), CHUNK as u64 / 4, round as u32 + 1, 0)?;
        gpu.synchronise()?;
        expect("the word at the first alias", read(aliases.at(0))?, round as u32 + 1)?;
        expect("the word at the last alias", read(aliases.at(count - 1))?, round as u32 + 1)?;
    }
    (0..count).try_for_each(|index| aliases.unmap(index))?;
    cu!(cuMemRelease(aliases.handle))?;
    cu!(cuMemAddressFree(aliases.start, count as usize * CHUNK))?;
    Ok(())
}
