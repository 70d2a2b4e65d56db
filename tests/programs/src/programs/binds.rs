//! Binds exportable memory to a multicast object and to a logical endpoint, by handle and by
//! address, like libraries for several GPUs. Each call must have the same result with and without
//! nvshare, even a call that fails. The results for other memory are only reported.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Gpu,
        api::{Access, Location, Properties},
        cu,
        late::{ArrayMap, MulticastProperties, cuMemMapArrayAsync, late_cu},
    },
    report::Report,
};

const STEP: usize = 2 << 20;
const DESCRIPTOR: u32 = 1;
const INVALID_VALUE: u32 = 1;
const HERE: Location = Location { kind: 1, id: 0 };

fn code(result: crate::cuda::Result<()>) -> u32 {
    result.map_or_else(|error| error.code, |()| 0)
}

fn create(len: usize, handle_types: u32) -> crate::cuda::Result<u64> {
    let mut memory = 0;
    let properties = Properties { kind: 1, handle_types, location: HERE, ..Properties::default() };
    cu!(cuMemCreate(&mut memory, len, &properties, 0)).map(|()| memory)
}

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let len = (args.size("mem", "160M") as usize).next_multiple_of(STEP);
    let gpu = Gpu::open(0)?;
    let (mut at, mut object) = (0, 0);
    let memory = create(len, DESCRIPTOR)?;
    cu!(cuMemAddressReserve(&mut at, len, 0, 0, 0))?;
    cu!(cuMemMap(at, len, 0, memory, 0))?;
    cu!(cuMemSetAccess(at, len, &Access { location: HERE, flags: 3 }, 1))?;
    let properties = MulticastProperties { devices: 1, size: 3 * len, ..MulticastProperties::default() };
    late_cu!(cuMulticastCreate(&mut object, &properties))?;
    late_cu!(cuMulticastAddDevice(object, 0))?;

    // Binds the whole memory, and a part of it.
    late_cu!(cuMulticastBindMem(object, 0, memory, 0, len, 0))?;
    late_cu!(cuMulticastBindMem(object, len, memory, STEP, len - 2 * STEP, 0))?;
    late_cu!(cuMulticastBindAddr(object, 2 * len, at + STEP as u64, len - STEP, 0))?;
    late_cu!(cuLogicalEndpointBindMem(7, 0, 0, memory, STEP as u64, (len - STEP) as u64, 0))?;
    for (what, result) in [
        ("more than there is", late_cu!(cuMulticastBindMem(object, 2 * len, memory, STEP, len, 0))),
        ("nothing", late_cu!(cuMulticastBindMem(object, 2 * len, memory, 0, 0, 0))),
        ("memory that is bound", late_cu!(cuMulticastBindMem(object, len / 2, memory, 0, len, 0))),
        ("more to an endpoint", late_cu!(cuLogicalEndpointBindMem(7, 0, 0, memory, 0, (len + STEP) as u64, 0))),
        ("more addresses", late_cu!(cuMulticastBindAddr(object, 2 * len, at + STEP as u64, len, 0))),
    ] {
        expect(what, code(result), INVALID_VALUE)?;
    }
    late_cu!(cuMulticastUnbind(object, 0, 2 * len, len))?;
    late_cu!(cuMulticastBindMem(object, 2 * len, memory, 0, len, 0))?;

    let other = create(len, 0)?;
    late_cu!(cuMulticastUnbind(object, 0, 0, len))?;
    report.integer("other", code(late_cu!(cuMulticastBindMem(object, 0, other, 0, len, 0))).into());
    // SAFETY: the list has one entry, and the count is 1.
    let mapped = unsafe { cuMemMapArrayAsync(&ArrayMap { memory: other, ..ArrayMap::default() }, 1, 0) };
    report.integer("array", mapped.into());

    gpu.fill(at, len as u64 / 4, 1, 0)?;
    expect("sum", gpu.sum(at, len as u64 / 4)?, len as u64 / 4)?;
    report.integer("mem", len as u64);
    Ok(())
}
