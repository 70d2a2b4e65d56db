//! Two contexts of one GPU. The primary context is retained repeatedly while another reference
//! exists, and it ends before the other context.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{Buffer, Gpu, Kind, cu},
    report::Report,
};
use std::{sync::Arc, thread};

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let (memory, rounds) = (args.size("mem", "16M") as usize, args.size("rounds", "8"));
    let pause = args.milliseconds("pause-ms", "50");
    let primary = Gpu::open(0)?;
    let (device, mut own) = (primary.device, 0);
    cu!(cuCtxCreate_v2(&mut own, 0, device))?;
    let own = Gpu::in_current(device, own)?;
    let [first, second] = [&primary, &own].map(|gpu| -> Result<(Arc<Gpu>, Buffer), Box<dyn std::error::Error>> {
        gpu.enter()?;
        let buffer = Buffer::new(Kind::Alloc, memory)?;
        gpu.fill(buffer.at, buffer.count(), 1, 0)?;
        Ok((gpu.clone(), buffer))
    });
    let (first, second) = (first?, second?);
    let round = |(gpu, buffer): &(Arc<Gpu>, Buffer), value: u64| -> Outcome {
        gpu.enter()?;
        gpu.mix(buffer.at, buffer.count(), 3, 0)?;
        gpu.unmix(buffer.at, buffer.count(), 3, 0)?;
        gpu.add(buffer.at, buffer.count(), 1, 0)?;
        expect("sum", gpu.sum(buffer.at, buffer.count())?, buffer.count() * value)?;
        thread::sleep(pause);
        Ok(())
    };
    for value in 2..rounds + 2 {
        let mut same = 0;
        cu!(cuDevicePrimaryCtxRetain(&mut same, device))?;
        expect("the primary context", same as u64, primary.context as u64)?;
        round(&first, value)?;
        cu!(cuDevicePrimaryCtxRelease_v2(device))?;
        round(&second, value)?;
    }
    first.1.free()?;
    second.0.enter()?;
    cu!(cuDevicePrimaryCtxRelease_v2(device))?;
    for value in rounds + 2..2 * rounds + 2 {
        round(&second, value)?;
    }
    second.1.free()?;
    cu!(cuCtxDestroy_v2(own.context))?;
    report.integer("rounds", rounds);
    Ok(())
}
