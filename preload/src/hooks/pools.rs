//! Hooks of memory pools: allocations and frees in stream order. Memory of plain pools can be moved
//! like any other memory ([`crate::registry::pools`]). Some pools are served by the driver: shareable
//! or limited pools, pools outside GPUs, and pools with unknown properties. Their allocations count as
//! pinned. Allocations made during a stream capture belong to the graph.

use crate::{
    calls::{
        allocate::{allocate_backed, change, free_later},
        driver_memory,
    },
    connection,
    driver::{self, after, context::current_or_null, put, put_result, query, types::*},
    env::settings,
    gpu::{self, Gpu, peers::couple},
    memory::space::{Allocated, Backing, Space, has_pending_frees},
    registry::{
        driver_memory::Kind,
        pools::{self, Properties, attribute},
    },
    submit::{self, captures},
    sys::{sync::Mutex, time::Instant},
};
use core::{ffi::c_void, time::Duration};
use nvshare_pools::{Awaited, StreamName};
use nvshare_wire::MAX_SLOTS;

type P = *mut c_void;

/// The longest time that a call spins until frees are done. An event takes 4 µs on an idle GPU [H200].
const DONE_SPIN: Duration = Duration::from_micros(50);

/// Returns the name of a valid stream that is not capturing. Returns `None` for other streams, which
/// are left to the driver.
fn name_of(stream: CUstream) -> Option<StreamName> {
    if stream == STREAM_PER_THREAD {
        submit::expect_blocking_streams();
    }
    if query::is_capturing(stream) != Ok(false) {
        return None;
    }
    // SAFETY: the place and the stream are valid.
    let id = captures::beside(|_| query::value(|id| unsafe { driver::cuStreamGetId(stream, id) }));
    let is_default = stream as usize <= STREAM_PER_THREAD as usize;
    let context = if is_default { current_or_null() as u64 } else { 0 };
    Some(StreamName { context, id: id.ok()? })
}

/// Makes the driver's stream-ordered allocation and counts it as pinned.
fn allocate_pinned(place: *const u64, size: Size, stream: CUstream, real: impl Fn() -> CUresult) -> CUresult {
    if captures::any() && captures::is_capturing(stream) {
        return real();
    }
    driver_memory::allocate(gpu::of_stream(stream), Kind::Address, place, size as u64, real)
}

/// Returns the pool from which the GPU allocates if the program names none.
fn current_pool(gpu: &Gpu) -> Option<CUmemoryPool> {
    // SAFETY: the place is valid.
    query::handle(|pool| unsafe { driver::cuDeviceGetMemPool(pool, gpu.index as CUdevice) }).ok()
}

/// Allocates from `pool`, or from the current pool of the stream's GPU if `pool` is `None`.
fn allocate(
    place: *mut CUdeviceptr,
    size: Size,
    pool: Option<CUmemoryPool>,
    stream: CUstream,
    real: impl Fn() -> CUresult,
) -> CUresult {
    let is_possible = !place.is_null() && size > 0 && settings::get().movable_pools;
    if is_possible && let Some(allocated) = allocate_movable(size, pool, stream) {
        // SAFETY: `place` is the program's own pointer and not NULL.
        return unsafe { put_result(place, allocated) };
    }
    allocate_pinned(place, size, stream, real)
}

/// Allocates movable memory. Returns `None` if the driver must serve the allocation.
fn allocate_movable(size: Size, pool: Option<CUmemoryPool>, stream: CUstream) -> Option<Result<CUdeviceptr, CUresult>> {
    let gpu = gpu::of_stream(stream)?;
    let space = gpu.space()?;
    let name = name_of(stream)?;
    let pool = pool.or_else(|| current_pool(gpu)).filter(|pool| !pool.is_null())?;
    let order = || gpu.work.order_blocking_streams(stream);
    let order: Option<&dyn Fn() -> bool> = if submit::is_marked_at_once(stream) { Some(&order) } else { None };
    let reuse = |space: &mut Space| space.allocate_from_pool(pool as u64, name, order, size as u64, &gpu.work);
    if let Some(address) = reuse(&mut space.lock()) {
        return Some(Ok(address));
    }
    if !pools::is_ours(pool, gpu, space) {
        return None;
    }
    let beyond = settings::get().oversubscribe;
    let take = |space: &mut Space| match reuse(space) {
        Some(address) => Ok(Allocated { address, backing: Backing::There }),
        None => space.allocate_with_pool(pool as u64, size as u64, beyond, &gpu.work),
    };
    let undo = |space: &mut Space, address| space.undo_in_pool(address, &gpu.work);
    Some(allocate_backed(gpu, space, size, take, undo))
}

/// Frees memory that belongs to a pool of this library. If the stream cannot accept work, the driver
/// reports the error. Returns `None` for other memory.
fn free_in_pool(address: CUdeviceptr, stream: CUstream, real: impl Fn() -> CUresult) -> Option<CUresult> {
    let name = name_of(stream);
    let mut spaces = gpu::in_use().filter_map(|gpu| Some((gpu, gpu.space()?)));
    let (gpu, space) = spaces.find(|(_, space)| space.lock().is_of_pool(address))?;
    let Some(name) = name else { return Some(real()) };
    // If the stream belongs to another GPU, the block is reusable only when all work of both GPUs is done.
    let other = if gpu::are_several() { gpu::of_stream(stream) } else { None }.filter(|other| other.index != gpu.index);
    if let Some(other) = other {
        couple(gpu, other);
    }
    let mut space = space.lock();
    if !space.free_in_pool(address, if other.is_none() { Some(name) } else { None }) {
        return None; // another thread has freed it first
    }
    if space.pools.has_dying() {
        connection::wake();
    }
    Some(SUCCESS)
}

fn free(address: CUdeviceptr, stream: CUstream, real: impl Fn() -> CUresult) -> CUresult {
    if settings::get().movable_pools
        && let Some(result) = free_in_pool(address, stream, &real)
    {
        return result;
    }
    if free_later(address) { SUCCESS } else { driver_memory::free(Kind::Address, address, real) }
}

/// Whether the stream is non-blocking: it does not synchronize with the legacy stream. A free in a
/// blocking stream is ordered after the work of all blocking streams, but synchronizing the stream
/// possibly does not wait for all of that work.
fn is_apart(stream: CUstream) -> bool {
    // SAFETY: the place and the stream are valid.
    let flags = captures::beside(|_| query::value(|flags| unsafe { driver::cuStreamGetFlags(stream, flags) }));
    let is_default = stream as usize <= STREAM_PER_THREAD as usize;
    !is_default && flags.is_ok_and(|flags| flags & STREAM_NON_BLOCKING != 0)
}

/// A call that waits for work.
#[derive(Debug, Clone, Copy)]
enum Wait {
    Stream(CUstream),
    /// Waits for all work of this context.
    Context(CUcontext),
    Event,
}

/// Makes a call that waits for work. Then marks the frees behind that work as done, and releases memory
/// above the thresholds of pools.
#[inline]
fn wait_for_work(wait: impl FnOnce() -> Wait, real: impl Fn() -> CUresult) -> CUresult {
    if has_pending_frees() && submit::is_active() { release_after(wait(), real) } else { real() }
}

#[cold]
fn release_after(wait: Wait, real: impl Fn() -> CUresult) -> CUresult {
    let mut frees = [0; MAX_SLOTS as usize];
    let stream = crate::sys::errno::preserve(|| {
        for gpu in gpu::in_use() {
            if let (Some(frees), Some(space)) = (frees.get_mut(gpu.index as usize), gpu.space()) {
                *frees = space.lock().pools.frees();
            }
        }
        if let Wait::Stream(stream) = wait { name_of(stream).filter(|_| is_apart(stream)) } else { None }
    });
    let result = real();
    if result != SUCCESS {
        return result;
    }
    crate::sys::errno::preserve(|| {
        for (gpu, frees) in gpu::in_use().filter_map(|gpu| Some((gpu, *frees.get(gpu.index as usize)?))) {
            if frees == 0 {
                continue;
            }
            let awaited = match wait {
                Wait::Stream(_) => stream.map_or(Awaited::Some, Awaited::Stream),
                Wait::Context(context) if gpu.work.is_all_in(context) => Awaited::All,
                Wait::Context(_) | Wait::Event => Awaited::Some,
            };
            change(gpu, |space| space.synchronize_pools(awaited, frees, &gpu.work));
        }
    });
    result
}

/// Spins briefly until pending frees are done. If no work is running, they are done soon.
fn see_done(gpu: &Gpu, space: &Mutex<Space>) {
    let begin = Instant::now();
    while space.lock().pools.look_if_pending(&gpu.work) && begin.elapsed() < DONE_SPIN {
        core::hint::spin_loop();
    }
}

fn trim(pool: CUmemoryPool, keep: Size) {
    if let Some((gpu, space)) = pools::find(pool as u64) {
        see_done(gpu, space);
        change(gpu, |space| space.trim_pool(pool as u64, keep as u64));
    }
}

fn attribute_set(pool: CUmemoryPool, which: i32) {
    let Some((_, space)) = pools::find(pool as u64) else { return };
    match which {
        attribute::RESERVED_MEM_HIGH => space.lock().pools.reset_high(pool as u64, false),
        attribute::USED_MEM_HIGH => space.lock().pools.reset_high(pool as u64, true),
        _ => {
            if let Some(policy) = pools::policy_of(pool) {
                space.lock().pools.set_policy(pool as u64, policy);
            }
        }
    }
}

/// Adds the statistics of this library's pool to the statistics of the driver's pool.
///
/// # Safety
/// `value` is valid for that attribute.
unsafe fn add_statistics(pool: CUmemoryPool, which: i32, value: P) {
    let Some(statistics) = pools::find(pool as u64).and_then(|(_, space)| space.lock().pools.statistics(pool as u64))
    else {
        return;
    };
    let bytes = match which {
        attribute::RESERVED_MEM_CURRENT => statistics.reserved,
        attribute::RESERVED_MEM_HIGH => statistics.reserved_high,
        attribute::USED_MEM_CURRENT => statistics.used,
        attribute::USED_MEM_HIGH => statistics.used_high,
        _ => return,
    };
    let value = value.cast::<u64>();
    // SAFETY: `value` is valid for the attribute: the caller's contract. The driver has written to it.
    unsafe { put(value, value.read_unaligned().saturating_add(bytes)) };
}

/// Runs `update` if the call has succeeded and this library may serve pools.
fn update_after(result: CUresult, update: impl FnOnce()) -> CUresult {
    after(result, || {
        if settings::get().movable_pools {
            update();
        }
    })
}

fn destroy(pool: CUmemoryPool, real: impl FnOnce() -> CUresult) -> CUresult {
    if !settings::get().movable_pools {
        return real();
    }
    pools::on_destroy(pool as u64);
    connection::wake(); // the client's thread frees memory that work still uses
    real()
}

hooks! { real, flavour;
    [cuMemAllocAsync | cuMemAllocAsync_ptsz] (place: *mut CUdeviceptr, size: Size, stream: CUstream) {
        allocate(place, size, None, flavour.stream(stream), real)
    }
    [cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz] (
        place: *mut CUdeviceptr, size: Size, pool: CUmemoryPool, stream: CUstream,
    ) { allocate(place, size, Some(pool), flavour.stream(stream), real) }
    [cuMemFreeAsync | cuMemFreeAsync_ptsz] (address: CUdeviceptr, stream: CUstream) {
        free(address, flavour.stream(stream), real)
    }

    [cuMemPoolCreate] (pool: *mut CUmemoryPool, properties: *const Properties) {
        update_after(real(), || {
            // SAFETY: the driver has just written `pool` and read `properties`.
            if let (Some(pool), Some(properties)) = unsafe { (pool.as_ref(), properties.as_ref()) } {
                pools::on_create(*pool as u64, properties);
            }
        })
    }
    [cuMemPoolDestroy] (pool: CUmemoryPool) { destroy(pool, real) }
    [cuMemPoolTrimTo] (pool: CUmemoryPool, keep: Size) { update_after(real(), || trim(pool, keep)) }
    [cuMemPoolSetAttribute] (pool: CUmemoryPool, which: i32, value: P) { update_after(real(), || attribute_set(pool, which)) }
    [cuMemPoolGetAttribute] (pool: CUmemoryPool, which: i32, value: P) {
        // SAFETY: the driver has just written `value`.
        update_after(real(), || unsafe { add_statistics(pool, which, value) })
    }
    [cuMemPoolSetAccess] (pool: CUmemoryPool, list: P, count: Size) { update_after(real(), || pools::access_changed(pool)) }
}

hooks! { always real, flavour;
    [cuStreamSynchronize | cuStreamSynchronize_ptsz] (stream: CUstream) {
        wait_for_work(|| Wait::Stream(flavour.stream(stream)), real)
    }
    [cuCtxSynchronize] () { wait_for_work(|| Wait::Context(current_or_null()), real) }
    [cuCtxSynchronize_v2] (context: CUcontext) { wait_for_work(|| Wait::Context(context), real) }
    [cuEventSynchronize] (event: CUevent) { wait_for_work(|| Wait::Event, real) }
}
