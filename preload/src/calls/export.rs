//! Calls that share memory with other processes or devices. The memory is restored to the GPU first,
//! and never evicted from then on.

use super::access::with_memory_on;
use crate::{
    driver::types::*,
    gpu::Gpu,
    memory::space::Space,
    registry::{
        self,
        virtual_memory::{TABLE, is_virtual},
    },
    sys::sync::Mutex,
};
use alloc::vec::Vec;

/// Whether the library can export the allocation to other processes.
pub fn is_exportable(address: CUdeviceptr, gpu: &Gpu) -> bool {
    let can = |space: &Mutex<Space>| {
        let space = space.lock();
        space.find(address).is_some() && space.engine().shares(space.gpu())
    };
    gpu.space().is_some_and(can)
}

/// Exports the memory at `address` with `call`. The range is restored first, and never evicted from
/// then on.
pub fn escape(gpu: &'static Gpu, address: CUdeviceptr, call: impl FnOnce() -> CUresult) -> CUresult {
    with_memory_on(gpu, || {
        let pin = |space: &mut Space| space.range_of(address).is_some_and(|base| space.pin(base));
        if gpu.change(pin) == Some(true) { call() } else { ERROR_NOT_SUPPORTED }
    })
}

/// Makes a call that gives another device access to the memory at this address. The memory is
/// restored before the call, and stays pinned from then on.
pub fn escape_around(address: CUdeviceptr, real: impl FnOnce() -> CUresult) -> CUresult {
    match registry::find(address) {
        Some((_, allocation)) if allocation.is_foreign() => real(), // foreign memory does not move
        Some((gpu, allocation)) => escape(gpu, allocation.base, real),
        None => escape_at(address, 1, real),
    }
}

/// Like [`escape_around`], for a call that says whether another device accesses the memory from now on
/// (`begins`). The memory stays on the GPU until the access ends or the memory is freed. A call that fails
/// changes nothing.
///
/// The library relies on the program: a device that keeps accessing the memory after the program has announced
/// the end is not noticed.
pub fn announce_around(
    address: CUdeviceptr,
    begins: bool,
    real: impl FnOnce() -> CUresult,
    announce: impl FnOnce(Vec<u64>) -> CUresult,
) -> CUresult {
    let target = match registry::find(address) {
        Some((_, allocation)) if allocation.is_foreign() => None,
        Some((gpu, allocation)) => Some((gpu, None, allocation.base)),
        None => TABLE.lock().at(address).map(|(mapping, memory)| (memory.gpu, Some(memory.base), mapping.at)),
    };
    let Some((gpu, created, place)) = target else { return real() };
    with_memory_on(gpu, || {
        let keep = |space: &mut Space| {
            let base = created.or_else(|| space.range_of(place))?;
            let is_new = space.announce(base, place)?;
            Some((base, is_new, space.chunk_addresses(base)))
        };
        let Some((base, is_new, chunks)) = gpu.change(keep).flatten() else { return ERROR_NOT_SUPPORTED };
        let result = if created.is_some() { real() } else { announce(chunks) };
        let is_over = if result == SUCCESS { !begins } else { is_new };
        if is_over {
            gpu.change(|space| space.withdraw(base, place));
        }
        result
    })
}

/// Shares the memory behind a handle with other processes, GPUs or hosts. `call` receives the
/// driver's handle, so the memory must be a single chunk. The memory is restored first, and never
/// evicted from then on.
pub fn escape_handle(handle: Handle, call: impl FnOnce(Handle) -> CUresult) -> CUresult {
    let Some(memory) = TABLE.lock().memory(handle) else { return ERROR_INVALID_VALUE };
    with_memory_on(memory.gpu, || {
        let pinned = {
            // Looks up the handle again, because the program may have released it since.
            let table = TABLE.lock();
            let Some(memory) = table.memory(handle) else { return ERROR_INVALID_VALUE };
            memory.gpu.change(|space| space.pin_chunk(memory.base)).flatten()
        };
        pinned.map_or(ERROR_NOT_SUPPORTED, call)
    })
}

/// Makes a call that shares memory by address. Pins the memory if it is this library's.
pub fn escape_at(address: CUdeviceptr, size: Size, call: impl FnOnce() -> CUresult) -> CUresult {
    let Some((_, memory)) = TABLE.lock().at(address) else { return call() };
    with_memory_on(memory.gpu, || {
        {
            let table = TABLE.lock();
            for mapping in table.overlaps_of(address, size as u64) {
                if let Some(memory) = table.behind(&mapping) {
                    memory.gpu.change(|space| space.pin(memory.base));
                }
            }
        }
        call()
    })
}

/// Makes a call that binds memory to an object. Other GPUs or hosts access the memory through that
/// object.
pub fn bind(memory: Handle, real: impl FnOnce() -> CUresult, call: impl FnOnce(Handle) -> CUresult) -> CUresult {
    if is_virtual(memory) { escape_handle(memory, call) } else { real() }
}

/// Makes a call that binds memory by address.
pub fn bind_at(address: CUdeviceptr, size: Size, real: impl FnOnce() -> CUresult) -> CUresult {
    if registry::is_ours(address) {
        return ERROR_INVALID_VALUE; // like the driver, for memory not from cuMemCreate
    }
    escape_at(address, size, real)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{driver::fake::Driver, gpu::fake, memory::engine::GRANULE};

    #[test]
    fn only_calls_that_succeed_change_what_is_announced() {
        const FAILURE: CUresult = 999;
        let driver = Driver::new();
        let (gpu, context) = fake::attach(&driver);
        let allocated = gpu.space().expect("a space").lock().allocate(GRANULE, context as usize, false, &gpu.work);
        let at = allocated.expect("room").address;
        for (begins, result, pinned) in [
            (true, FAILURE, 0),
            (true, SUCCESS, GRANULE),
            (true, FAILURE, GRANULE),
            (false, FAILURE, GRANULE),
            (false, SUCCESS, 0),
        ] {
            assert_eq!(announce_around(at, begins, || unreachable!("the library's memory"), |_| result), result);
            assert_eq!(gpu.account().map(|account| account.pinned), Some(pinned), "{begins} {result}");
        }
    }
}
