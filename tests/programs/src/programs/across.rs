//! Two GPUs of one process that access each other's memory until SIGUSR1: by copies, by kernels, by
//! mappings.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Buffer, Gpu, Kind, api, cu,
        late::{self, late_cu},
    },
    report::Report,
    signal,
};
use std::{sync::Arc, thread};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "16M"), args.size("rounds", "20"));
    let pause = args.milliseconds("pause-ms", "10");
    let how = args.text("how", "copy");
    let pair = Pair { far: Gpu::open(1)?, near: Gpu::open(0)? };
    let mut total = 7_u32;
    pair.near.enter()?;
    let own = Buffer::new(Kind::Alloc, memory as usize)?;
    let back = Buffer::new(Kind::Alloc, memory as usize)?;
    let count = own.count();
    pair.near.fill(own.at, count, total, 0)?;
    pair.far.enter()?;
    let plain = Buffer::new(Kind::Alloc, memory as usize)?;
    let pool = if how == "pool" { Some(pair.pool()?) } else { None };
    let other = match pool {
        Some(pool) => pair.allocate(pool, memory as usize)?,
        None if how == "map" => pair.map(memory as usize)?,
        None => plain.at,
    };
    pair.near.enter()?;
    if how == "kernel" {
        late_cu!(cuCtxEnablePeerAccess(pair.far.context, 0))?;
    }
    for round in (0..rounds as u32).take_while(|_| !signal::has_come()) {
        total = total.wrapping_add(2 * round + 3);
        pair.near.enter()?;
        match how {
            "copy" | "pitched" => {
                pair.near.add(own.at, count, round + 1, 0)?;
                match round % 2 {
                    _ if how == "pitched" => pitched(other, own.at, memory as usize)?,
                    0 => cu!(cuMemcpyDtoD_v2(other, own.at, memory as usize))?,
                    _ => late_cu!(cuMemcpyPeer(other, pair.far.context, own.at, pair.near.context, memory as usize))?,
                }
                pair.near.synchronise()?;
                pair.far.enter()?;
                pair.far.add(other, count, round + 2, 0)?;
                pair.far.synchronise()?;
                let (to, from) = (pair.near.context, pair.far.context);
                match how {
                    "copy" => late_cu!(cuMemcpyPeerAsync(own.at, to, other, from, memory as usize, 0))?,
                    _ => pitched(own.at, other, memory as usize)?,
                }
                pair.far.synchronise()?;
            }
            _ => {
                // Each GPU works on the memory of the other.
                if round == 0 {
                    pair.near.fill(other, count, 7, 0)?;
                }
                pair.near.add(other, count, round + 1, 0)?;
                match pool {
                    Some(pool) => pair.touch_and_free_async(pool)?,
                    None => pair.touch_and_free(how == "kernel")?,
                }
                pair.near.synchronise()?;
                pair.far.enter()?;
                pair.far.add(other, count, round + 2, 0)?;
                pair.far.synchronise()?;
            }
        }
        pair.near.enter()?;
        let at = if matches!(how, "copy" | "pitched") { own.at } else { other };
        expect("sum", pair.near.sum(at, count)?, count * u64::from(total))?;
        thread::sleep(pause);
    }
    pair.near.fill(back.at, count, total, 0)?;
    pair.near.synchronise()?;
    report.integer("rounds", rounds);
    report.integer("mem", memory);
    Ok(())
}

/// A pitched copy.
fn pitched(to: u64, from: u64, len: usize) -> crate::cuda::Result<()> {
    const WIDTH: usize = 4096;
    let side = |device| late::Side2D { kind: 2, device, pitch: WIDTH, ..Default::default() };
    late_cu!(cuMemcpy2D_v2(&late::Copy2D { from: side(from), to: side(to), width: WIDTH, height: len / WIDTH }))
}

struct Pair {
    near: Arc<Gpu>,
    far: Arc<Gpu>,
}

impl Pair {
    /// Memory of the far GPU, mapped for both.
    fn map(&self, len: usize) -> crate::cuda::Result<u64> {
        let place = |id| api::Location { kind: 1, id };
        let (mut at, mut handle) = (0, 0);
        let properties = api::Properties { kind: 1, location: place(1), ..Default::default() };
        cu!(cuMemCreate(&mut handle, len, &properties, 0))?;
        cu!(cuMemAddressReserve(&mut at, len, 0, 0, 0))?;
        cu!(cuMemMap(at, len, 0, handle, 0))?;
        cu!(cuMemRelease(handle))?;
        let access = [0, 1].map(|id| api::Access { location: place(id), flags: 3 });
        cu!(cuMemSetAccess(at, len, access.as_ptr(), 2))?;
        Ok(at)
    }

    /// A pool of the far GPU that both can access.
    fn pool(&self) -> crate::cuda::Result<usize> {
        let place = |id| api::Location { kind: 1, id };
        let properties = late::PoolProperties {
            kind: 1,
            handle_types: 0,
            location: place(1),
            security: 0,
            max_size: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut pool = 0;
        late_cu!(cuMemPoolCreate(&mut pool, &properties))?;
        late_cu!(cuMemPoolSetAccess(pool, &api::Access { location: place(0), flags: 3 }, 1))?;
        Ok(pool)
    }

    fn allocate(&self, pool: usize, len: usize) -> crate::cuda::Result<u64> {
        let mut at = 0;
        self.far.enter()?;
        late_cu!(cuMemAllocFromPoolAsync(&mut at, len, pool, 0))?;
        self.far.synchronise()?;
        Ok(at)
    }

    /// Runs work of the near GPU on memory from the far GPU's pool. The memory is freed and
    /// allocated again in the near GPU's stream.
    fn touch_and_free_async(&self, pool: usize) -> Outcome {
        const LEN: usize = 4 << 20;
        let short = self.allocate(pool, LEN)?;
        self.near.enter()?;
        self.near.fill(short, LEN as u64 / 4, 1, 0)?;
        self.near.add(short, LEN as u64 / 4, 1, 0)?;
        cu!(cuMemFreeAsync(short, 0))?;
        let mut at = 0;
        late_cu!(cuMemAllocFromPoolAsync(&mut at, LEN, pool, 0))?;
        self.near.fill(at, LEN as u64 / 4, 2, 0)?;
        Ok(cu!(cuMemFreeAsync(at, 0))?)
    }

    /// Runs work of one GPU on memory of the other, and frees the memory immediately.
    fn touch_and_free(&self, enabled: bool) -> Outcome {
        if !enabled {
            return Ok(());
        }
        self.far.enter()?;
        let short = Buffer::new(Kind::Alloc, 4 << 20)?;
        self.near.enter()?;
        self.near.fill(short.at, short.count(), 1, 0)?;
        self.near.add(short.at, short.count(), 1, 0)?;
        Ok(short.free()?)
    }
}
