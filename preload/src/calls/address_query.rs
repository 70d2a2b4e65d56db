//! Queries about addresses at which the program itself has mapped memory of this library.

use super::export::is_exportable;
use crate::{
    driver::{self, put, types::*},
    gpu::Gpu,
    memory::{
        engine::{self, GRANULE},
        space::{Allocation, Space},
    },
    registry::{
        self,
        virtual_memory::{Mapping, Memory, TABLE},
    },
};
use core::ffi::c_void;

type P = *mut c_void;

/// Returns the driver's answer while the memory is on the GPU, and the recorded answer otherwise.
fn driver_or_record(
    memory: &Memory,
    real: impl FnOnce() -> CUresult,
    recorded: impl FnOnce(&mut Space) -> CUresult,
) -> Option<CUresult> {
    // The lock keeps the memory from being evicted between the test and the answer.
    let mut space = memory.gpu.space()?.lock();
    Some(if space.on_gpu(memory.base).is_some() { real() } else { recorded(&mut space) })
}

/// Returns the location of this memory's GPU.
fn home(memory: &Memory) -> Location {
    Location { kind: MEM_LOCATION_TYPE_DEVICE, id: memory.gpu.index as i32 }
}

pub fn get_access(
    flags: *mut u64,
    location: *const Location,
    address: CUdeviceptr,
    real: impl Fn() -> CUresult,
) -> CUresult {
    let table = TABLE.lock();
    let found = table.at(address);
    if found.is_none() && !registry::is_ours(address) {
        return real();
    }
    let is_known = |l: &&Location| matches!(l.kind, MEM_LOCATION_TYPE_DEVICE | MEM_LOCATION_TYPE_HOST);
    // SAFETY: `location` is the program's pointer, which the driver would dereference too.
    let Some(location) = unsafe { location.as_ref() }.filter(is_known).filter(|_| !flags.is_null()) else {
        return ERROR_INVALID_VALUE;
    };
    let Some((mapping, memory)) = found else {
        // Driver 580 gives this answer for memory that the program did not map.
        // SAFETY: `flags` is the program's pointer, and not NULL.
        unsafe { put(flags, 0) };
        return SUCCESS;
    };
    let recorded = |space: &mut Space| {
        // For the host, driver 580 gives the same answer as for the memory's own GPU.
        let asked = if location.kind == MEM_LOCATION_TYPE_HOST { home(&memory) } else { *location };
        let access = space.aliases(memory.base).map_or(0, |aliases| aliases.access(mapping.at, asked));
        // SAFETY: `flags` is the program's pointer, and not NULL.
        unsafe { put(flags, access as u64) };
        SUCCESS
    };
    driver_or_record(&memory, &real, recorded).unwrap_or_else(real)
}

pub fn properties(prop: *mut AllocationProp, handle: Handle) -> CUresult {
    let table = TABLE.lock();
    let Some(memory) = table.memory(handle).filter(|_| !prop.is_null()) else { return ERROR_INVALID_VALUE };
    let Some(space) = memory.gpu.space() else { return ERROR_INVALID_VALUE };
    let space = space.lock();
    if let Some(handle) = space.on_gpu(memory.base) {
        // SAFETY: `prop` is the program's pointer. The handle is the library's own, and stays valid while the
        // space is locked.
        return unsafe { driver::cuMemGetAllocationPropertiesFromHandle(prop, handle) };
    }
    let made = engine::properties(memory.gpu.index as CUdevice, memory.flags);
    // SAFETY: `prop` is the program's pointer, and not NULL.
    unsafe { prop.write_unaligned(made) };
    SUCCESS
}

/// The mapping that a query concerns, and the library's memory behind it.
#[derive(Debug)]
struct AddressInfo {
    mapping: Mapping,
    memory: Memory,
    reservation: (u64, u64),
    /// The access rights of the memory's own GPU to the mapping.
    rights: i32,
    /// True if the memory is evicted. The driver then knows nothing about the address.
    away: bool,
}

/// Answers a query about an address at which the program has mapped memory of this library. The memory
/// does not move until `answer` returns. Returns `None` if the address has no such mapping.
fn query<R>(address: CUdeviceptr, answer: impl FnOnce(&AddressInfo) -> R) -> Option<R> {
    let table = TABLE.lock();
    let (mapping, memory) = table.at(address)?;
    let mut space = memory.gpu.space()?.lock();
    let rights = space.aliases(memory.base).map_or(0, |aliases| aliases.access(mapping.at, home(&memory)));
    let away = space.on_gpu(memory.base).is_none();
    let reservation = table.reservation(address).unwrap_or((mapping.at, mapping.len));
    Some(answer(&AddressInfo { mapping, memory, reservation, rights, away }))
}

/// Returns the start and length of the mapping at this address. If the memory's own GPU has no
/// access, returns the error that driver 580 returns. Returns `None` if the address has no mapping
/// of this library's memory.
pub fn extent(address: CUdeviceptr) -> Option<Result<(u64, u64), CUresult>> {
    query(address, |a| if a.rights == 0 { Err(ERROR_NOT_FOUND) } else { Ok((a.mapping.at, a.mapping.len)) })
}

/// Writes attributes that the driver cannot report while memory is evicted, or would report differently
/// after a restore. Returns `None` for all other attributes. The values match driver 580.
///
/// # Safety
/// `data` is valid for the attribute `which`.
unsafe fn write(data: P, which: i32, address: CUdeviceptr, asked: &AddressInfo) -> Option<CUresult> {
    use crate::driver::types::pointer_attribute::*;
    let AddressInfo { mapping, memory, reservation, rights, away } = asked;
    // SAFETY: the caller's contract. Each value is written with the type that the driver uses for the
    // attribute.
    unsafe {
        match which {
            BUFFER_ID | MEMORY_BLOCK_ID => put(data.cast(), mapping.id),
            RANGE_START_ADDR => put(data.cast(), reservation.0),
            RANGE_SIZE => put(data.cast(), reservation.1),
            MAPPING_BASE_ADDR => put(data.cast(), mapping.at),
            MAPPING_SIZE => put(data.cast(), mapping.len),
            _ if !away => return None,
            CONTEXT => put(data.cast(), 0u64),
            MEMORY_TYPE => put(data.cast(), MEMORYTYPE_DEVICE),
            DEVICE_POINTER if *rights == 0 => {
                put(data.cast(), 0u64);
                return Some(ERROR_INVALID_VALUE);
            }
            DEVICE_POINTER => put(data.cast(), address),
            SYNC_MEMOPS => put(data.cast(), 1u32),
            IS_MANAGED | IS_LEGACY_CUDA_IPC_CAPABLE | IS_HW_DECOMPRESS_CAPABLE => put(data.cast(), 0u32),
            IS_GPU_DIRECT_RDMA_CAPABLE => put(data.cast(), u32::from(memory.flags.rdma)),
            MAPPED => put(data.cast(), 1u32),
            DEVICE_ORDINAL => put(data.cast(), memory.gpu.index as i32),
            ACCESS_FLAGS => put(data.cast(), *rights),
            ALLOWED_HANDLE_TYPES => put(data.cast(), memory.flags.handle_types as u64),
            MEMPOOL_HANDLE => put(data.cast(), 0u64),
            _ => return None,
        }
    }
    Some(SUCCESS)
}

/// Writes an attribute of an allocation of this library. Returns `None` if the driver must answer.
/// Flags are 4 bytes, as in driver 580.
///
/// # Safety
/// `data` is valid for `attribute`.
pub unsafe fn write_own(data: P, attribute: i32, address: CUdeviceptr, gpu: &Gpu, a: &Allocation) -> Option<CUresult> {
    use crate::driver::types::pointer_attribute::*;
    // SAFETY: the caller's contract. Each value is written with the type that the driver uses for the
    // attribute.
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
            // Other devices cannot access memory of pools (driver 580).
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

/// `cuPointerGetAttribute` for an address outside this library's allocations.
pub fn attribute(data: P, which: i32, address: CUdeviceptr, real: impl Fn() -> CUresult) -> CUresult {
    if data.is_null() {
        return real();
    }
    let answered = query(address, |asked| match real() {
        // `ERROR_INVALID_VALUE` means that the driver does not know the address, or that the address lacks
        // this attribute.
        // SAFETY: `data` is the program's pointer to a value of this attribute.
        result @ (SUCCESS | ERROR_INVALID_VALUE) => unsafe { write(data, which, address, asked) }.unwrap_or(result),
        error => error,
    });
    answered.unwrap_or_else(real)
}

/// `cuPointerGetAttributes`. The driver answers first, because only it knows some attributes. Like the driver, this
/// function returns no error for an attribute that an address does not have.
pub fn attributes(
    n: u32,
    which: *const i32,
    data: *mut P,
    address: CUdeviceptr,
    real: impl Fn() -> CUresult,
) -> CUresult {
    if which.is_null() || data.is_null() {
        return real();
    }
    let answer = |write: &dyn Fn(P, i32) -> Option<CUresult>| {
        let result = real();
        if result == SUCCESS {
            for i in 0..n as usize {
                // SAFETY: `which` and `data` are the program's arrays of length `n`.
                let (which, data) = unsafe { (*which.add(i), *data.add(i)) };
                write(data, which);
            }
        }
        result
    };
    if let Some((gpu, allocation)) = registry::find(address) {
        // SAFETY: `data` is the program's pointer to a value of this attribute.
        return answer(&|data, which| unsafe { write_own(data, which, address, gpu, &allocation) });
    }
    // SAFETY: `data` is the program's pointer to a value of this attribute.
    let answered = query(address, |asked| answer(&|data, which| unsafe { write(data, which, address, asked) }));
    answered.unwrap_or_else(real)
}
