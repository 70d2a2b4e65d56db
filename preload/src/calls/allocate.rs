//! Allocations and frees. An allocation by a program that holds the GPU lock waits until its memory is
//! on the GPU. An allocation by another program usually only reserves addresses. It waits in three
//! cases: the driver refuses memory that the scheduler has allowed, a stream is being captured, or
//! another device may access the memory.

use super::driver_memory;
use crate::{
    connection,
    driver::{
        self, check,
        context::{current_or_null, is_current_broken},
        put_result,
        types::*,
    },
    env::{settings, trace::trace},
    gpu::{
        self, Gpu,
        limit_request::{self, Outcome},
    },
    memory::{
        engine, foreign_devices, slab,
        space::{Allocated, Backing, Space},
    },
    registry::driver_memory::Kind,
    submit::{self, captures, closed, threads},
    sys::{
        sync::Mutex,
        thread::stack_pointer,
        time::{self, Instant},
    },
};
use alloc::vec::Vec;
use core::time::Duration;

/// The interval between checks whether freed memory is available.
const FREED_POLL_INTERVAL: Duration = Duration::from_micros(100);
/// The interval between checks whether memory of other programs has become available.
const OTHERS_POLL_INTERVAL: Duration = Duration::from_millis(3);
/// The longest time that an allocation waits for freed memory that work may still use.
const FREED_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time that an allocation waits until other clients have made room for it. The wait
/// ends earlier if the scheduler says that other clients cannot make room.
const BACKING_TIMEOUT: Duration = Duration::from_secs(60);
/// The longest time that an allocation waits for memory of a program without nvshare, which may be exiting.
/// Without a scheduler, the allocation waits equally long for the check whether other clients can make room
/// ([`crate::client::offline`]). The check takes at most 200 ms.
const OTHERS_TIMEOUT: Duration = Duration::from_millis(500);

pub fn allocate(place: *mut CUdeviceptr, size: Size, real: impl FnOnce() -> CUresult) -> CUresult {
    let gpu = if !place.is_null() && size > 0 { gpu::current() } else { None };
    let Some((gpu, space)) = gpu.and_then(|g| Some((g, g.space()?))) else { return real() };
    let Some(context) = usable_context() else { return real() };
    let beyond = settings::get().oversubscribe;
    let take = |space: &mut Space| space.allocate(size as u64, context, beyond, &gpu.work);
    let allocated = allocate_backed(gpu, space, size, take, Space::undo);
    // SAFETY: `place` is the program's pointer, and not NULL.
    unsafe { put_result(place, allocated) }
}

/// Allocates memory with `take`, and waits until it is on the GPU, if it must be there
/// ([`is_backed_in_time`]). `undo` frees the memory. Returns its address.
pub fn allocate_backed(
    gpu: &'static Gpu,
    space: &Mutex<Space>,
    size: Size,
    take: impl Fn(&mut Space) -> Result<Allocated, CUresult>,
    undo: impl FnOnce(&mut Space, u64),
) -> Result<u64, CUresult> {
    let result = with_retries(gpu, space, size, false, take);
    trace!("GPU {}: allocation of {size} bytes: {result:x?}", gpu.index);
    let Allocated { address, backing } = result?;
    let is_backed = is_backed_in_time(gpu, space, backing, |space| undo(space, address));
    if is_backed { Ok(address) } else { Err(ERROR_OUT_OF_MEMORY) }
}

/// Waits until new memory is on the GPU, in three cases:
///
/// - The client has the lock. Its next launch would wait anyway.
/// - The driver had no room for the memory, although the allowance has room. If no room can be
///   made, the allocation must fail, not a later launch.
/// - Captured work or other devices may use the memory without passing a gate.
///
/// If no room can be made, undoes the allocation and returns `false`.
fn is_backed_in_time(gpu: &'static Gpu, space: &Mutex<Space>, backing: Backing, undo: impl FnOnce(&mut Space)) -> bool {
    // If a thread waited here inside the gate, the client could not drain.
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
        let must_be_there = is_reached_by_others || captures::any();
        let is_late = begin.elapsed() >= BACKING_TIMEOUT;
        if gpu.is_mapping_denied() || (is_late && must_be_there) {
            gpu.change(|space| {
                undo(space);
                space.account.counts.refused += 1;
            });
            gpu.forget_denials();
            return false;
        }
        let has_turn = !gpu.gate.is_closed_for(closed::LOCK);
        // If the gate is open although memory is missing, no context works any more. The program's next call
        // returns the error.
        if !gpu.gate.is_closed_for(closed::MEMORY) || is_late {
            break;
        }
        match must_be_there {
            // The wait requests the lock. For a client that requests the lock, the scheduler evicts
            // memory even from clients that are running now. The thread counts as waiting with
            // work, because running work may depend on this thread.
            true => gpu.wait(closed::MEMORY),
            false if backing == Backing::Later && !has_turn => break,
            false => gpu.wait_to_allocate(),
        }
    }
    true // mapped later, as for a program without the lock
}

/// Waits for memory that another thread is allocating. Must be called before a call that names memory
/// during a capture, because such a call passes no gate.
pub fn wait_beside_capture(gpu: &Gpu) {
    let begin = Instant::now();
    while gpu.gate.is_closed_for(closed::MEMORY)
        && captures::any()
        && submit::is_active()
        && threads::mine().is_outside()
        && begin.elapsed() < BACKING_TIMEOUT
    {
        gpu.wait(closed::MEMORY);
    }
}

/// Handles `cuMemAllocManaged`. All but small allocations are moved by prefetching, so they count as
/// demand like other memory.
pub fn allocate_managed(place: *mut CUdeviceptr, size: Size, flags: u32, real: impl Fn() -> CUresult) -> CUresult {
    let counted = || driver_memory::allocate(gpu::current(), Kind::Managed, place, size as u64, &real);
    let movable = !place.is_null() && size as u64 > slab::LARGEST && flags == MEM_ATTACH_GLOBAL;
    let gpu = if movable { gpu::current() } else { None };
    let Some((gpu, space)) = gpu.and_then(|gpu| Some((gpu, gpu.space()?))) else { return counted() };
    if !engine::can_prefetch(gpu.index as CUdevice) {
        return counted();
    }
    let Some(context) = usable_context() else { return real() };
    let beyond = settings::get().oversubscribe;
    let make = || {
        check(real())?;
        // SAFETY: the driver has just written the address there.
        Ok(unsafe { place.read() })
    };
    let take = |space: &mut Space| space.allocate_managed(size as u64, context, beyond, &gpu.work, make);
    let result = with_retries(gpu, space, size, true, take);
    trace!("GPU {}: allocation of {size} managed bytes: {result:x?}", gpu.index);
    result.map_or_else(|error| error, |_| SUCCESS)
}

/// Returns the current context, or `None` if that context does not work. The driver must then return
/// the error.
pub fn usable_context() -> Option<usize> {
    Some(current_or_null() as usize).filter(|context| *context != 0 && !is_current_broken())
}

/// Allocates managed memory or other memory. If none is available, retries for a limited time.
fn with_retries<T>(
    gpu: &Gpu,
    space: &Mutex<Space>,
    size: Size,
    is_managed: bool,
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
        // Freed memory is pending if it was freed during a capture, or if work of other contexts
        // may still use it.
        let is_pending = guard.has_freed() || guard.pools.has_pending();
        let comes = is_pending && !captures::any() && begin.elapsed() < FREED_TIMEOUT;
        let fits = guard.account.fits_without_others(size as u64, gpu.total());
        let is_unknown = !connection::is_connected() && guard.account.awaits_company();
        let may_come = (fits || is_unknown) && begin.elapsed() < OTHERS_TIMEOUT;
        drop(guard);
        let asked = Instant::now();
        let outcome = limit_request::raise(gpu, size as u64, is_managed, after.limit);
        begin = begin + asked.elapsed(); // excludes a delay of the answer by a rule
        if outcome == Outcome::Raised && begin.elapsed() < FREED_TIMEOUT {
            continue;
        }
        if !(comes || (may_come && outcome != Outcome::Denied)) {
            gpu.count_refusal();
            return result;
        }
        time::sleep(if comes { FREED_POLL_INTERVAL } else { OTHERS_POLL_INTERVAL });
    }
}

/// How long a free spins until work is done. On an idle GPU, an event takes 4 µs [H200].
const FREE_SPIN: Duration = Duration::from_micros(50);

/// The longest time that a free waits while the library cannot tell whether work is done.
const FREE_TIMEOUT: Duration = Duration::from_millis(100);

/// Frees an allocation of this library, on any GPU, after the work that may use it has ended.
/// Returns `false` if the allocation is not this library's.
pub fn free_later(address: CUdeviceptr) -> bool {
    free_with(address, |_, _, _| {})
}

/// Frees an allocation of this library with the semantics of `cuMemFree`: returns only when all work in
/// all streams of the memory's context is done, because programs may rely on that. Does not wait during
/// a capture, because the end of the capture may depend on the calling thread.
pub fn free(address: CUdeviceptr) -> bool {
    free_with(address, |gpu, space, id| {
        let begin = Instant::now();
        while submit::is_active() && !captures::any() {
            match space.lock().is_awaited(id, &gpu.work) {
                Some(false) => break,
                None if begin.elapsed() >= FREE_TIMEOUT => break,
                _ if begin.elapsed() < FREE_SPIN => core::hint::spin_loop(),
                _ => time::sleep(FREED_POLL_INTERVAL),
            }
        }
    })
}

pub fn free_with(address: CUdeviceptr, wait: impl Fn(&Gpu, &Mutex<Space>, u64)) -> bool {
    let free = |gpu: &Gpu| {
        let Some(space) = gpu.space() else { return false };
        let Some(id) = change(gpu, |space| space.free(address, &gpu.work)).flatten() else { return false };
        if space.lock().has_freed() {
            wait(gpu, space, id);
            change(gpu, |space| space.reclaim(&gpu.work));
        }
        true
    };
    gpu::in_use().any(free)
}

/// Runs `change`, which frees memory, and updates the account. If some memory can only be freed later,
/// wakes the client's thread to do so.
pub fn change<R>(gpu: &Gpu, change: impl FnOnce(&mut Space) -> R) -> Option<R> {
    gpu.change(|space| {
        let result = change(space);
        if space.has_freed() || space.pools.has_dying() {
            connection::wake();
        }
        result
    })
}

/// The interval between checks whether the mover has finished with memory that is to be freed.
const MOVING_POLL_INTERVAL: Duration = Duration::from_micros(100);

/// Frees managed memory on the calling thread, which waits for work as it would without this library.
/// Returns `None` if the library does not move the memory at this address by prefetching.
pub fn free_managed(address: CUdeviceptr) -> Option<CUresult> {
    // SAFETY: the memory is this library's, and no other reference to it exists any more.
    let by_driver = |base| unsafe { driver::cuMemFree_v2(base) };
    let free = |gpu: &'static Gpu| {
        let space = gpu.space()?;
        // Retry memory that an earlier call could not free.
        let unfreed = space.lock().take_unfreed();
        if !unfreed.is_empty() {
            let (freed, refused): (Vec<_>, Vec<_>) = unfreed.into_iter().partition(|u| by_driver(u.base) == SUCCESS);
            let bytes = freed.iter().map(|unfreed| unfreed.len).sum();
            gpu.change(|space| space.end_of_unfreed(refused, bytes));
        }
        let freeing = loop {
            match space.lock().take_managed(address) {
                Ok(taken) => break taken?,
                Err(_) if !submit::is_active() => return None,
                Err(_) => {}
            }
            time::sleep(MOVING_POLL_INTERVAL);
        };
        let result = by_driver(freeing.base());
        gpu.change(|space| space.end_of_freeing(freeing, result == SUCCESS));
        Some(result)
    };
    gpu::in_use().find_map(free)
}
