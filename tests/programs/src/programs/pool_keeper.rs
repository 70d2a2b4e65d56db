//! A pool that never releases memory. The program allocates memory, frees nearly all of it, and
//! then idles.

use super::Outcome;
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, late::late_cu},
    report::Report,
};
use std::{thread, time::Duration};

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`
const RELEASE_THRESHOLD: u32 = 4;

/// The blocks are large, so that each segment contains only a few.
const PIECE: usize = 8 << 20;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, live) = (args.size("mem", "96M") as usize, args.size("live", "8M") as usize);
    let gpu = Gpu::open(0)?;
    let mut pool = 0;
    late_cu!(cuDeviceGetDefaultMemPool(&mut pool, gpu.device))?;
    late_cu!(cuMemPoolSetAttribute(pool, RELEASE_THRESHOLD, &u64::MAX))?;
    let mut pieces = (0..memory / PIECE).map(|_| Buffer::new(Kind::Async, PIECE)).collect::<Result<Vec<_>, _>>()?;
    for (number, piece) in pieces.iter().enumerate() {
        gpu.mix(piece.at, piece.count(), number as u32, 0)?;
    }
    for piece in pieces.drain(live / PIECE..) {
        piece.free()?;
    }
    gpu.synchronise()?;
    eprintln!("holding");
    thread::sleep(Duration::from_secs_f64(args.number("seconds", "5")));
    report.integer("pieces", pieces.len() as u64);
    Ok(())
}
