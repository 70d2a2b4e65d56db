//! The semantics of memory pools, call by call: the owner of a block, invalid frees, and the
//! accounting of used, kept and released memory.

use super::{Outcome, expect};
use crate::{
    args::Args,
    cuda::{
        Gpu, Stream,
        api::Location,
        cu,
        late::{PoolProperties, late_cu},
        read,
    },
    report::Report,
};

const INVALID_VALUE: u32 = 1;
const MIB: usize = 1 << 20;

/// `CUmemPool_attribute`
const RELEASE_THRESHOLD: u32 = 4;
const RESERVED: u32 = 5;
const USED: u32 = 7;
const USED_HIGH: u32 = 8;

/// `CUpointer_attribute`
const CONTEXT: u32 = 1;
const DEVICE_ORDINAL: u32 = 9;
const LEGACY_IPC: u32 = 10;
const RDMA: u32 = 15;
const POOL: u32 = 17;

pub fn run(args: &Args, report: &mut Report) -> Outcome {
    let gpu = Gpu::open(0)?;
    let stream = Stream::new()?;
    blocks(&gpu, &stream)?;
    frees(&gpu, &stream)?;
    pools(&gpu, &stream)?;
    statistics(&gpu, &stream)?;
    captures(&gpu, &stream)?;
    contexts(&gpu)?;
    if args.given("reserve") {
        reserve(&gpu, &stream, args.size("reserve", "0") as usize)?;
    }
    drop(stream);
    reset(&gpu)?;
    report.integer("checked", 1);
    Ok(())
}

fn allocate(len: usize, stream: &Stream) -> Result<u64, crate::cuda::Error> {
    let mut at = 0;
    cu!(cuMemAllocAsync(&mut at, len, stream.0))?;
    Ok(at)
}

fn allocate_from(pool: usize, len: usize, stream: &Stream) -> Result<u64, crate::cuda::Error> {
    let mut at = 0;
    late_cu!(cuMemAllocFromPoolAsync(&mut at, len, pool, stream.0))?;
    Ok(at)
}

fn free(at: u64, stream: &Stream) -> Result<(), crate::cuda::Error> {
    cu!(cuMemFreeAsync(at, stream.0))
}

fn create(gpu: &Gpu, handle_types: u32) -> Result<usize, crate::cuda::Error> {
    let location = Location { kind: 1, id: gpu.device };
    let properties =
        PoolProperties { kind: 1, handle_types, location, security: 0, max_size: 0, usage: 0, reserved: [0; 54] };
    let mut pool = 0;
    late_cu!(cuMemPoolCreate(&mut pool, &properties))?;
    Ok(pool)
}

fn default_of(gpu: &Gpu) -> Result<usize, crate::cuda::Error> {
    let mut pool = 0;
    late_cu!(cuDeviceGetDefaultMemPool(&mut pool, gpu.device))?;
    Ok(pool)
}

fn current_of(gpu: &Gpu) -> Result<usize, crate::cuda::Error> {
    let mut pool = 0;
    late_cu!(cuDeviceGetMemPool(&mut pool, gpu.device))?;
    Ok(pool)
}

fn get(pool: usize, which: u32) -> Result<u64, crate::cuda::Error> {
    let mut value = 0;
    late_cu!(cuMemPoolGetAttribute(pool, which, &mut value))?;
    Ok(value)
}

fn set(pool: usize, which: u32, value: u64) -> Result<(), crate::cuda::Error> {
    late_cu!(cuMemPoolSetAttribute(pool, which, &value))
}

fn about(at: u64, which: u32) -> Result<u64, crate::cuda::Error> {
    let mut value = 0;
    late_cu!(cuPointerGetAttribute(&mut value, which, at))?;
    Ok(value)
}

fn fails(what: &str, result: Result<(), crate::cuda::Error>, code: u32) -> Outcome {
    expect(what, result.err().map_or(0, |error| error.code), code)
}

fn blocks(gpu: &Gpu, stream: &Stream) -> Outcome {
    let pool = default_of(gpu)?;
    expect("the current pool", current_of(gpu)?, pool)?;
    for len in [4, 1000, MIB, 3 * MIB, 40 * MIB] {
        let at = allocate(len, stream)?;
        expect("alignment", at % 512, 0)?;
        expect("the pool of an address", about(at + 3, POOL)?, pool as u64)?;
        expect("its context", about(at, CONTEXT)?, 0)?;
        expect("its GPU", about(at, DEVICE_ORDINAL)?, gpu.device as u64)?;
        expect("whether it has handles of the old kind", about(at, LEGACY_IPC)?, 0)?;
        expect("whether other devices reach it", about(at, RDMA)?, 0)?;
        let (mut base, mut size) = (0, 0);
        late_cu!(cuMemGetAddressRange_v2(&mut base, &mut size, at + 2))?;
        expect("where it begins", base, at)?;
        gpu.fill(at, len as u64 / 4, 7, stream.0)?;
        stream.synchronise()?;
        expect("what was written", read(at + (len as u64 - 4) / 4 * 4)?, 7)?;
        free(at, stream)?;
    }
    Ok(stream.synchronise()?)
}

fn frees(gpu: &Gpu, stream: &Stream) -> Outcome {
    let at = allocate(MIB, stream)?;
    fails("freeing the middle", free(at + 512, stream), INVALID_VALUE)?;
    free(at, stream)?;
    stream.synchronise()?;
    fails("freeing twice", free(at, stream), INVALID_VALUE)?;
    let mut plain = 0;
    cu!(cuMemAlloc_v2(&mut plain, 8 * MIB))?;
    gpu.fill(plain, 4, 1, stream.0)?;
    free(plain, stream)?;
    let at = allocate(8 * MIB, stream)?;
    stream.synchronise()?;
    cu!(cuMemFree_v2(at))?;
    fails("freeing what was freed otherwise", free(at, stream), INVALID_VALUE)?;
    Ok(())
}

fn pools(gpu: &Gpu, stream: &Stream) -> Outcome {
    let (default, other) = (default_of(gpu)?, create(gpu, 0)?);
    fails("destroying the default pool", late_cu!(cuMemPoolDestroy(default)), INVALID_VALUE)?;
    late_cu!(cuDeviceSetMemPool(gpu.device, other))?;
    let at = allocate(MIB, stream)?;
    expect("the pool that was chosen", about(at, POOL)?, other as u64)?;
    let by_name = allocate_from(default, MIB, stream)?;
    expect("the pool that was named", about(by_name, POOL)?, default as u64)?;
    gpu.fill(at, 4, 9, stream.0)?;
    late_cu!(cuMemPoolDestroy(other))?;
    expect("the pool after that one is gone", current_of(gpu)?, default)?;
    stream.synchronise()?;
    expect("memory of a pool that is gone", read(at)?, 9)?;
    free(at, stream)?;
    free(by_name, stream)?;
    // The library leaves a pool with exportable memory to the driver.
    let shareable = create(gpu, 1)?;
    let at = allocate_from(shareable, MIB, stream)?;
    expect("a shareable pool", about(at, POOL)?, shareable as u64)?;
    gpu.fill(at, 4, 5, stream.0)?;
    stream.synchronise()?;
    expect("its memory", read(at)?, 5)?;
    free(at, stream)?;
    stream.synchronise()?;
    Ok(late_cu!(cuMemPoolDestroy(shareable))?)
}

fn statistics(gpu: &Gpu, stream: &Stream) -> Outcome {
    let pool = create(gpu, 0)?;
    set(pool, RELEASE_THRESHOLD, u64::MAX)?;
    expect("the threshold", get(pool, RELEASE_THRESHOLD)?, u64::MAX)?;
    let (small, large) = (allocate_from(pool, MIB, stream)?, allocate_from(pool, 40 * MIB, stream)?);
    let used = get(pool, USED)?;
    expect("as much as was asked for", used >= 41 * MIB as u64, true)?;
    expect("no more than is reserved", used <= get(pool, RESERVED)?, true)?;
    free(large, stream)?;
    stream.synchronise()?;
    expect("after a free", get(pool, USED)? < 40 * MIB as u64, true)?;
    expect("the most", get(pool, USED_HIGH)?, used)?;
    set(pool, USED_HIGH, 0)?;
    expect("the most since", get(pool, USED_HIGH)?, get(pool, USED)?)?;
    expect("what is kept", get(pool, RESERVED)? >= 41 * MIB as u64, true)?;
    late_cu!(cuMemPoolTrimTo(pool, 0))?;
    let kept = get(pool, RESERVED)?;
    expect("what is in use is kept", kept >= MIB as u64 && kept < 40 * MIB as u64, true)?;
    set(pool, RELEASE_THRESHOLD, 0)?;
    free(small, stream)?;
    stream.synchronise()?;
    expect("what is kept beyond the threshold", get(pool, RESERVED)?, 0)?;
    Ok(late_cu!(cuMemPoolDestroy(pool))?)
}

/// Memory that is allocated in a captured stream belongs to the graph. Other streams are
/// unaffected.
fn captures(gpu: &Gpu, stream: &Stream) -> Outcome {
    let outside = allocate(MIB, stream)?;
    stream.synchronise()?;
    let other = Stream::new()?;
    let (mut graph, mut ready, mut used) = (0, 0, 0);
    cu!(cuStreamBeginCapture_v2(stream.0, 2))?;
    let inside = allocate(MIB, stream)?;
    gpu.fill(inside, 4, 3, stream.0)?;
    gpu.fill(outside, 4, 4, stream.0)?;
    late_cu!(cuMemPoolGetAttribute(default_of(gpu)?, USED, &mut used))?;
    let beside = allocate(MIB, &other)?;
    gpu.fill(beside, 4, 2, other.0)?;
    free(beside, &other)?;
    free(inside, stream)?;
    cu!(cuStreamEndCapture(stream.0, &mut graph))?;
    cu!(cuGraphInstantiateWithFlags(&mut ready, graph, 0))?;
    cu!(cuGraphLaunch(ready, stream.0))?;
    stream.synchronise()?;
    expect("what the graph has written", read(outside)?, 4)?;
    cu!(cuGraphExecDestroy(ready))?;
    cu!(cuGraphDestroy(graph))?;
    free(outside, stream)?;
    Ok(stream.synchronise()?)
}

/// A pool's memory belongs to no context. The memory and pending frees in a context's streams
/// survive the context's destruction.
fn contexts(gpu: &Gpu) -> Outcome {
    let mut context = 0;
    late_cu!(cuCtxCreate_v2(&mut context, 0, gpu.device))?;
    let stream = Stream::new()?;
    let (kept, freed) = (allocate(MIB, &stream)?, allocate(MIB, &stream)?);
    cu!(cuMemsetD8_v2(kept, 6, MIB))?;
    cu!(cuCtxSynchronize())?;
    free(freed, &stream)?;
    std::mem::forget(stream); // destroyed with its context
    late_cu!(cuCtxDestroy_v2(context))?;
    gpu.enter()?;
    let stream = Stream::new()?;
    let other = allocate(MIB, &stream)?;
    gpu.fill(other, MIB as u64 / 4, 2, stream.0)?;
    stream.synchronise()?;
    expect("memory of a context that is gone", read(kept)?, 0x0606_0606)?;
    free(kept, &stream)?;
    free(other, &stream)?;
    Ok(stream.synchronise()?)
}

/// Unused memory that pools keep is available for other allocations.
fn reserve(gpu: &Gpu, stream: &Stream, len: usize) -> Outcome {
    let pool = default_of(gpu)?;
    set(pool, RELEASE_THRESHOLD, u64::MAX)?;
    for len in [len, 4096] {
        let at = allocate(len, stream)?;
        gpu.spin(50_000_000, stream.0)?;
        gpu.fill(at, len as u64 / 4, 1, stream.0)?;
        free(at, stream)?; // before the fill has begun
    }
    let mut plain = 0;
    cu!(cuMemAlloc_v2(&mut plain, len))?;
    gpu.fill(plain, len as u64 / 4, 2, stream.0)?;
    stream.synchronise()?;
    expect("the other's memory", read(plain + len as u64 - 4)?, 2)?;
    Ok(cu!(cuMemFree_v2(plain))?)
}

/// Resets the primary context while blocks are in use.
fn reset(gpu: &Gpu) -> Outcome {
    let stream = Stream::new()?;
    allocate(40 * MIB, &stream)?;
    free(allocate(MIB, &stream)?, &stream)?;
    stream.synchronise()?;
    std::mem::forget(stream); // destroyed with its context
    late_cu!(cuDevicePrimaryCtxReset_v2(gpu.device))?;
    let gpu = Gpu::open(0)?;
    let stream = Stream::new()?;
    let at = allocate(40 * MIB, &stream)?;
    gpu.fill(at, 4, 8, stream.0)?;
    stream.synchronise()?;
    expect("memory after a reset", read(at)?, 8)?;
    free(at, &stream)?;
    Ok(stream.synchronise()?)
}
