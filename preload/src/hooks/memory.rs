//! Allocations, frees, and queries about addresses. An allocation by a program that holds the GPU lock waits until its memory
//! is on the GPU. One by another program only reserves addresses, unless the driver refuses memory that the scheduler has
//! allowed, a stream is captured, or another device may reach memory: then it waits, too. Other calls do not wait.

use crate::{
    connection,
    driver::{
        self, check,
        context::{current_context, is_current_broken},
        hook::hooks,
        put,
        types::*,
    },
    env::{settings, trace::trace},
    gate::{self, closed, threads},
    gpu::{
        self, Gpu,
        limit_request::{self, Outcome},
    },
    hooks::{address_info, gated, pinned, vmm},
    memory::{
        engine::{self, GRANULE},
        foreign_devices, slab,
        space::{Allocated, Allocation, Backing, Space},
    },
    registry::{self, pinned::Kind},
    sys::{
        sync::Mutex,
        thread::stack_pointer,
        time::{self, Instant},
    },
    work::capture,
};
use alloc::vec::Vec;
use core::{ffi::c_void, time::Duration};

type P = *mut c_void;

/// The pitch of `cuMemAllocPitch` is a multiple of this.
const PITCH: usize = 512;
/// The interval between looks whether freed memory is available.
const FREED_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The interval between looks whether memory of other programs is available.
const OTHERS_POLL_INTERVAL: Duration = Duration::from_millis(3);
/// The longest wait of an allocation for freed memory that work may still use.
const FREED_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest wait of an allocation for its memory, until other clients have made room or the scheduler says that they cannot.
const BACKING_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest wait of an allocation for memory of programs outside nvshare, one of which may just have ended.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(400);
/// The same while the scheduler, which would know, is away: until the client runs without one.
const AWAY_TIMEOUT: Duration = Duration::from_millis(3500);
/// The longest wait without a scheduler until the client's thread has looked whether other clients can make room
/// ([`crate::client::offline`]), which it does within 200 ms.
const OFFLINE_TIMEOUT: Duration = Duration::from_millis(500);

fn allocate(place: *mut CUdeviceptr, size: Size, real: impl FnOnce() -> CUresult) -> CUresult {
    let gpu = if gate::is_active() && !place.is_null() && size > 0 { gpu::current() } else { None };
    let Some((gpu, space)) = gpu.and_then(|g| Some((g, g.space()?))) else { return real() };
    crate::sys::errno::preserved(|| {
        let context = match working_context() {
            Ok(Some(context)) => context,
            Ok(None) => return real(),
            Err(error) => return error,
        };
        let beyond = settings::get().oversubscribe;
        let result = with_retries(gpu, space, size, |space| space.allocate(size as u64, context, beyond, &gpu.work));
        trace!("GPU {}: allocate {size}: {result:x?}", gpu.index);
        match result {
            Ok(Allocated { backing, address }) => {
                let undo = |space: &mut Space| space.undo(address);
                if !is_backed_in_time(gpu, space, backing, undo) {
                    return ERROR_OUT_OF_MEMORY;
                }
                // SAFETY: the program's own place, not NULL.
                unsafe { *place = address };
                SUCCESS
            }
            Err(error) => error,
        }
    })
}

/// Waits until new memory is on the GPU, as it would be without nvshare: if the program may run now, so that its next launch
/// would wait; if the driver had no room although the allowance did, so that the allocation fails and not a launch; or if what uses it
/// passes no gate: what is captured, and another device. `false` if no room can be made; the allocation is undone then.
pub(super) fn is_backed_in_time(
    gpu: &'static Gpu,
    space: &Mutex<Space>,
    backing: Backing,
    undo: impl FnOnce(&mut Space),
) -> bool {
    // A thread inside the gate would keep the client from draining.
    let is_inside = !threads::mine().is_outside_for(stack_pointer());
    if backing == Backing::There || is_inside {
        return true;
    }
    let begin = Instant::now();
    let is_reached_by_others = foreign_devices::may_reach_memory();
    while connection::is_connected() {
        let account = space.lock().account;
        if account.can_run() || account.is_lost {
            return true;
        }
        let must_be_there = is_reached_by_others || capture::any();
        let is_late = begin.elapsed() >= BACKING_TIMEOUT;
        if gpu.is_mapping_denied() || (is_late && must_be_there) {
            let mut guard = space.lock();
            let before = guard.account;
            undo(&mut guard);
            guard.account.counts.refused += 1;
            let after = guard.account;
            gpu.account_changed(&before, &after);
            gpu.forget_denials();
            return false;
        }
        let has_turn = !gpu.gate.is_closed_for(closed::LOCK);
        // An open gate although memory is lacking: no context works any more, as the next call will say.
        if !gpu.gate.is_closed_for(closed::MEMORY) || is_late {
            break;
        }
        match must_be_there {
            // With the lock comes the memory, of clients that run now, too. Running work may wait for this thread.
            true => gpu.wait(closed::MEMORY),
            false if backing == Backing::Later && !has_turn => break,
            false => gpu.wait_to_allocate(),
        }
    }
    true // it comes later, as for a program without the lock
}

/// Waits for memory that another thread is allocating, before a call beside a capture that names memory: such a call passes no gate.
pub(super) fn wait_beside_capture(gpu: &Gpu) {
    let begin = Instant::now();
    while gpu.gate.is_closed_for(closed::MEMORY)
        && capture::any()
        && gate::is_active()
        && threads::mine().is_outside()
        && begin.elapsed() < BACKING_TIMEOUT
    {
        gpu.wait(closed::MEMORY);
    }
}

/// `cuMemAllocManaged`: all but small allocations are moved by prefetching, so they count as demand like other memory.
fn allocate_managed(place: *mut CUdeviceptr, size: Size, flags: u32, real: impl Fn() -> CUresult) -> CUresult {
    let counted = || pinned::allocate(gpu::current(), Kind::Address, place, size as u64, &real);
    let movable = gate::is_active() && !place.is_null() && size as u64 > slab::LARGEST && flags == MEM_ATTACH_GLOBAL;
    let gpu = if movable { gpu::current() } else { None };
    let Some((gpu, space)) = gpu.and_then(|gpu| Some((gpu, gpu.space()?))) else { return counted() };
    if !engine::can_prefetch(gpu.index as CUdevice) {
        return counted();
    }
    crate::sys::errno::preserved(|| {
        let context = match working_context() {
            Ok(Some(context)) => context,
            Ok(None) => return real(),
            Err(error) => return error,
        };
        let beyond = settings::get().oversubscribe;
        let make = || {
            check(real())?;
            // SAFETY: the driver has just written there.
            Ok(unsafe { place.read() })
        };
        let take = |space: &mut Space| space.allocate_managed(size as u64, context, beyond, &gpu.work, make);
        let result = with_retries(gpu, space, size, take);
        trace!("GPU {}: allocate {size} of managed memory: {result:x?}", gpu.index);
        result.map_or_else(|error| error, |_| SUCCESS)
    })
}

/// The current context; `None` if it does not work, so that the driver must return the error.
pub(super) fn working_context() -> Result<Option<usize>, CUresult> {
    let context = current_context()?;
    Ok(Some(context as usize).filter(|context| *context != 0 && !is_current_broken()))
}

/// Allocates memory, and tries again for a while if there is none.
pub(super) fn with_retries<T>(
    gpu: &Gpu,
    space: &Mutex<Space>,
    size: Size,
    take: impl Fn(&mut Space) -> Result<T, CUresult>,
) -> Result<T, CUresult> {
    let mut begin = Instant::now();
    loop {
        let mut guard = space.lock();
        let before = guard.account;
        let mut result = take(&mut guard);
        if matches!(result, Err(ERROR_OUT_OF_MEMORY)) && guard.release_pools(&gpu.work) > 0 {
            result = take(&mut guard);
        }
        let after = guard.account;
        gpu.account_changed(&before, &after);
        if !matches!(result, Err(ERROR_OUT_OF_MEMORY)) {
            return result;
        }
        // Memory that was freed beside a capture, or while work of other contexts may use it.
        let is_pending = guard.has_freed() || guard.has_pending_in_pools();
        let comes = is_pending && !capture::any() && begin.elapsed() < FREED_TIMEOUT;
        let timeout = if connection::is_connected() { OTHERS_TIMEOUT } else { AWAY_TIMEOUT };
        let mut may_come = guard.account.fits_without_others(size as u64, gpu.total()) && begin.elapsed() < timeout;
        let is_unknown = !connection::is_connected() && guard.account.awaits_company();
        let may_find_room = is_unknown && begin.elapsed() < OFFLINE_TIMEOUT;
        drop(guard);
        let asked = Instant::now();
        let outcome = limit_request::raise(gpu, size as u64, after.limit);
        begin = begin + asked.elapsed(); // a rule may let that take long
        match outcome {
            Outcome::Raised if begin.elapsed() < FREED_TIMEOUT => continue,
            Outcome::Denied => may_come = false,
            Outcome::Raised | Outcome::Beyond => {}
        }
        if !(comes || may_come || may_find_room) {
            gpu.count_refusal();
            return result;
        }
        time::sleep(if comes { FREED_POLL_INTERVAL } else { OTHERS_POLL_INTERVAL });
    }
}

/// The time for which a free looks again and again whether work is done: an event takes 4 µs where the GPU is idle [H200].
const FREE_SPIN: Duration = Duration::from_micros(50);

/// The longest wait of a free while it cannot be told whether work is done.
const FREE_TIMEOUT: Duration = Duration::from_millis(100);

/// Frees an allocation of ours, on any GPU, once the work that may use it is done. `false` if it is not ours.
pub(super) fn free_later(address: CUdeviceptr) -> bool {
    free_with(address, |_, _, _| {})
}

/// The same like the driver's own function, which returns when all work in the memory's context is done, in whatever stream:
/// programs may rely on that. Not beside a capture, whose end may depend on the calling thread.
fn free(address: CUdeviceptr) -> bool {
    free_with(address, |gpu, space, id| {
        let begin = Instant::now();
        while gate::is_active() && !capture::any() {
            match space.lock().is_awaited(id, &gpu.work) {
                Some(false) => break,
                None if begin.elapsed() >= FREE_TIMEOUT => break,
                _ if begin.elapsed() < FREE_SPIN => core::hint::spin_loop(),
                _ => time::sleep(FREED_POLL_INTERVAL),
            }
        }
    })
}

fn free_with(address: CUdeviceptr, wait: impl Fn(&Gpu, &Mutex<Space>, u64)) -> bool {
    let free = |gpu: &Gpu| {
        let Some(space) = gpu.space() else { return false };
        let Some(id) = changing(gpu, space, |space| space.free(address, &gpu.work)) else { return false };
        if space.lock().has_freed() {
            wait(gpu, space, id);
            changing(gpu, space, |space| space.reclaim(&gpu.work));
        }
        true
    };
    gate::is_active() && crate::sys::errno::preserved(|| gpu::attached().any(free))
}

/// Frees memory, and has the client's thread free what has to wait.
pub(super) fn changing<R>(gpu: &Gpu, space: &Mutex<Space>, change: impl FnOnce(&mut Space) -> R) -> R {
    let mut guard = space.lock();
    let before = guard.account;
    let result = change(&mut guard);
    let after = guard.account;
    gpu.account_changed(&before, &after);
    if guard.has_freed() || guard.has_dying_pools() {
        connection::wake();
    }
    result
}

/// The interval between looks whether the mover is done with memory that is to be freed.
const MOVING_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Frees managed memory in this thread, which waits for work as without this library. `None` if that is not how the memory at
/// this address is freed.
fn free_managed(address: CUdeviceptr) -> Option<CUresult> {
    // SAFETY: memory of ours, which nothing else knows any more.
    let by_driver = |base| unsafe { driver::cuMemFree_v2(base) };
    let free = |gpu: &'static Gpu| {
        let space = gpu.space()?;
        // What could not be freed when it should have been.
        let mut unfreed = space.lock().take_unfreed();
        unfreed.retain(|base| by_driver(*base) != SUCCESS);
        if !unfreed.is_empty() {
            space.lock().keep_unfreed(unfreed);
        }
        let freeing = loop {
            match space.lock().take_managed(address) {
                Ok(taken) => break taken?,
                Err(_) if !gate::is_active() => return None,
                Err(_) => {}
            }
            time::sleep(MOVING_POLL_INTERVAL);
        };
        let result = by_driver(freeing.base());
        let mut guard = space.lock();
        let before = guard.account;
        guard.end_of_freeing(freeing, result == SUCCESS);
        let after = guard.account;
        gpu.account_changed(&before, &after);
        Some(result)
    };
    if gate::is_active() { crate::sys::errno::preserved(|| gpu::attached().find_map(free)) } else { None }
}

/// Whether the allocation can be exported to other processes.
fn is_exportable(address: CUdeviceptr, gpu: &Gpu) -> bool {
    let can = |space: &Mutex<Space>| {
        let space = space.lock();
        space.find(address).is_some() && space.engine().shares(space.gpu())
    };
    gpu.space().is_some_and(can)
}

/// Makes a call that exports our memory: its range is on the GPU then, and stays there for good. `call` gets the addresses of
/// the chunks.
pub(super) fn escaping(gpu: &'static Gpu, address: CUdeviceptr, call: impl FnOnce(Vec<u64>) -> CUresult) -> CUresult {
    gated::naming_on(gpu, || {
        let Some(space) = gpu.space() else { return ERROR_NOT_SUPPORTED };
        let mut guard = space.lock();
        let before = guard.account;
        let Some(base) = guard.range_of(address) else { return ERROR_NOT_SUPPORTED };
        if !guard.pin(base) {
            return ERROR_NOT_SUPPORTED;
        }
        let after = guard.account;
        gpu.account_changed(&before, &after);
        let chunks = guard.chunk_addresses(base);
        drop(guard);
        call(chunks)
    })
}

/// Makes a call that hands the memory at this address to another device. The memory is on the GPU before the call, and is pinned from
/// then on. `announce` gets the addresses of the chunks if the memory is ours.
fn announcing(
    address: CUdeviceptr,
    real: impl FnOnce() -> CUresult,
    announce: impl FnOnce(Vec<u64>) -> CUresult,
) -> CUresult {
    match registry::find(address) {
        Some((_, allocation)) if allocation.is_foreign() => real(), // foreign memory does not move
        Some((gpu, allocation)) => escaping(gpu, allocation.base, announce),
        None => vmm::escaping_at(address, 1, real),
    }
}

/// Writes an attribute of one of our allocations. `None` if the driver must answer. Flags are 4 bytes (driver 580).
///
/// # Safety
/// `data` is valid for that attribute.
unsafe fn attribute(data: P, attribute: i32, address: CUdeviceptr, gpu: &Gpu, a: &Allocation) -> Option<CUresult> {
    use crate::driver::types::pointer_attribute::*;
    // SAFETY: the caller's promise; each attribute's type is the driver's.
    unsafe {
        match attribute {
            CONTEXT => put(data.cast(), a.context),
            MEMORY_TYPE => put(data.cast(), MEMORYTYPE_DEVICE),
            DEVICE_POINTER => put(data.cast(), address),
            HOST_POINTER => {
                put(data.cast(), 0u64);
                return Some(ERROR_INVALID_VALUE);
            }
            IS_LEGACY_CUDA_IPC_CAPABLE => put(data.cast(), u32::from(a.pool == 0 && is_exportable(address, gpu))),
            SYNC_MEMOPS => put(data.cast(), 1u32),
            IS_MANAGED | IS_HW_DECOMPRESS_CAPABLE => put(data.cast(), 0u32),
            // Other devices do not reach memory of pools (driver 580).
            IS_GPU_DIRECT_RDMA_CAPABLE => put(data.cast(), u32::from(a.pool == 0 && gpu.is_rdma_capable())),
            ACCESS_FLAGS => put(data.cast(), MEM_ACCESS_FLAGS_PROT_READWRITE),
            BUFFER_ID | MEMORY_BLOCK_ID => put(data.cast(), a.id),
            DEVICE_ORDINAL => put(data.cast(), gpu.index as i32),
            RANGE_START_ADDR => put(data.cast(), a.base),
            RANGE_SIZE => put(data.cast(), a.size),
            // Small allocations share a mapping.
            MAPPING_BASE_ADDR => put(data.cast(), a.base - a.base % GRANULE),
            MAPPING_SIZE => {
                let end = (a.base + a.size).next_multiple_of(GRANULE);
                put(data.cast(), end - (a.base - a.base % GRANULE));
            }
            MAPPED => put(data.cast(), 1u32),
            ALLOWED_HANDLE_TYPES => put(data.cast(), 0u64),
            MEMPOOL_HANDLE => put(data.cast(), a.pool),
            _ => return None,
        }
    }
    Some(SUCCESS)
}

hooks! { real, flavour;
    [cuMemAlloc_v2] (place: *mut CUdeviceptr, size: Size) { allocate(place, size, real) }
    [cuMemAllocPitch_v2] (place: *mut CUdeviceptr, pitch: *mut Size, width: Size, height: Size, element: u32) {
        let row = width.checked_next_multiple_of(PITCH);
        let size = row.and_then(|row| row.checked_mul(height)).filter(|_| matches!(element, 4 | 8 | 16));
        let (Some(row), Some(size), false) = (row, size, pitch.is_null()) else { return real() };
        // Memory of the driver has the driver's pitch.
        let mut ours = true;
        let result = allocate(place, size, || { ours = false; real() });
        if ours && result == SUCCESS {
            // SAFETY: the program's own place.
            unsafe { put(pitch, row) };
        }
        result
    }
    [cuMemAllocManaged] (place: *mut CUdeviceptr, size: Size, flags: u32) { allocate_managed(place, size, flags, real) }
    [cuMemFree_v2] (address: CUdeviceptr) {
        if is_current_broken() {
            return real();
        }
        if let Some(result) = free_managed(address) {
            return result;
        }
        match free(address) {
            true if is_current_broken() => real(), // by the work that it has waited for
            true => SUCCESS,
            false => pinned::free(Kind::Address, address, real),
        }
    }

    [cuMemGetAddressRange_v2] (base: *mut CUdeviceptr, size: *mut Size, address: CUdeviceptr) {
        let allocated = registry::find(address).map(|(_, allocation)| Ok((allocation.base, allocation.size)));
        let (begin, len) = match allocated.or_else(|| address_info::extent(address)).filter(|_| !is_current_broken()) {
            Some(Ok(extent)) => extent,
            Some(Err(error)) => return error,
            None => return real(),
        };
        // SAFETY: the program's own places; the driver allows NULL.
        unsafe {
            put(base, begin);
            put(size, len as usize);
        }
        SUCCESS
    }
    [cuPointerGetAttribute] (data: P, which: i32, address: CUdeviceptr) {
        if which == pointer_attribute::P2P_TOKENS && !data.is_null() {
            return announcing(address, real, |_| real());
        }
        let Some((gpu, allocation)) = registry::find(address).filter(|_| !data.is_null()) else {
            return address_info::attribute(data, which, address, real);
        };
        // SAFETY: the program's own place for that attribute.
        unsafe { attribute(data, which, address, gpu, &allocation) }.unwrap_or_else(real)
    }
    [cuPointerGetAttributes] (n: u32, which: *const i32, data: *mut P, address: CUdeviceptr) {
        // SAFETY: the program's own array of that length.
        let asks_for = |attribute| !which.is_null() && (0..n as usize).any(|i| unsafe { *which.add(i) } == attribute);
        if asks_for(pointer_attribute::P2P_TOKENS) {
            let _ = announcing(address, || SUCCESS, |_| SUCCESS);
        }
        let Some((gpu, allocation)) = registry::find(address).filter(|_| !which.is_null() && !data.is_null()) else {
            return address_info::attributes(n, which, data, address, real);
        };
        // First the driver answers what only it knows; it knows nothing about addresses that are not mapped. Like the driver,
        // this returns no error for an attribute that an address does not have.
        let result = real();
        if result != SUCCESS {
            return result;
        }
        for i in 0..n as usize {
            // SAFETY: the program's own arrays of that length.
            unsafe {
                let (which, data) = (*which.add(i), *data.add(i));
                attribute(data, which, address, gpu, &allocation);
            }
        }
        SUCCESS
    }
    [cuPointerSetAttribute] (value: *const c_void, which: i32, address: CUdeviceptr) {
        // SYNC_MEMOPS, the only attribute that can be set, announces that another device will be given the memory.
        if value.is_null() || which != pointer_attribute::SYNC_MEMOPS {
            return real();
        }
        announcing(address, real, |chunks| {
            for chunk in chunks {
                // SAFETY: the program's own value, for a chunk that is there. The driver copies no differently whatever it answers.
                unsafe { driver::cuPointerSetAttribute(value, which, chunk) };
            }
            SUCCESS
        })
    }
    [cuMemGetHandleForAddressRange] (handle: P, address: CUdeviceptr, size: Size, kind: i32, flags: u64) {
        // The handle goes on referring to the chunks that are mapped now.
        match registry::find_own(address) {
            Some((gpu, allocation)) if !handle.is_null() => escaping(gpu, allocation.base, |_| real()),
            _ => vmm::escaping_at(address, size, real),
        }
    }
}
