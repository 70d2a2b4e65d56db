//! Hooks for memory that the program reserves, creates and maps itself. The program receives *virtual
//! handles* ([`crate::registry::virtual_memory`]), so that the memory can be evicted, and restored at
//! all addresses where the program has mapped it.
//!
//! None of these calls waits for the GPU lock. While memory is evicted, the calls only record how the
//! memory will be mapped when it is restored. The gate is closed until then. A call that exports memory
//! waits until the memory is on the GPU, and pins it there.

use crate::{
    calls::{
        address_query::{get_access, properties},
        driver_memory,
        export::{bind, bind_at, escape_handle},
        mappings::{attach, create, map, movable, release, set_access, unmap, whole},
    },
    driver::{self, after, types::*},
    registry::{
        self,
        driver_memory::Kind,
        virtual_memory::{TABLE, is_virtual},
    },
    submit::fast::{ONE, enqueue},
};
use core::ffi::c_void;

type P = *mut c_void;

/// `CUarrayMapInfo`.
#[derive(Debug)]
#[repr(C)]
pub struct ArrayMap {
    place: [u64; 7],
    operation: i32,
    handle_kind: i32,
    memory: Handle,
    offset: u64,
    devices: u32,
    flags: u32,
    reserved: [u32; 2],
}

/// Whether a list maps memory of this library into an array. Such a mapping would have to change
/// whenever the memory moves.
///
/// # Safety
/// `list` is NULL or has `n` entries.
unsafe fn maps_ours(list: *const ArrayMap, n: u32) -> bool {
    // SAFETY: `list` has `n` entries: the caller's contract. An entry that unmaps may have no handle, but
    // always has the field.
    !list.is_null() && (0..n as usize).any(|i| is_virtual(unsafe { (*list.add(i)).memory }))
}

hooks! { real, flavour;
    [cuMemCreate] (handle: *mut Handle, size: Size, prop: *const AllocationProp, flags: u64) {
        if !attach(prop) {
            return ERROR_OUT_OF_MEMORY;
        }
        match movable(handle, size, prop, flags) {
            Some((gpu, space, flags)) => create(handle, size, gpu, space, flags),
            None if handle.is_null() || flags != 0 || !whole(size as u64) => real(), // the driver reports the error
            None => driver_memory::allocate(registry::driver_memory::gpu_of(prop), Kind::Chunk, handle, size as u64, real),
        }
    }
    [cuMemRelease] (handle: Handle) {
        if is_virtual(handle) { release(handle) } else { driver_memory::free(Kind::Chunk, handle, real) }
    }
    [cuMemRetainAllocationHandle] (handle: *mut Handle, address: P) {
        if registry::is_ours(address as CUdeviceptr) {
            return ERROR_INVALID_VALUE; // like the driver, for memory that cuMemCreate did not create
        }
        let mut table = TABLE.lock();
        if let Some(found) = table.at(address as CUdeviceptr).and_then(|(mapping, _)| mapping.handle) {
            if handle.is_null() {
                return ERROR_INVALID_VALUE;
            }
            table.retain(found);
            // SAFETY: `handle` is the program's own pointer and not NULL.
            unsafe { handle.write(found) };
            return SUCCESS;
        }
        drop(table);
        let result = real();
        // SAFETY: the driver has just written `handle`.
        if let (SUCCESS, Some(handle)) = (result, unsafe { handle.as_ref() }) {
            registry::driver_memory::retain(*handle);
        }
        result
    }
    [cuMemGetAllocationPropertiesFromHandle] (prop: *mut AllocationProp, handle: Handle) {
        if is_virtual(handle) { properties(prop, handle) } else { real() }
    }
    [cuMemExportToShareableHandle] (shareable: P, handle: Handle, kind: i32, flags: u64) {
        if !is_virtual(handle) {
            return real();
        }
        let types = TABLE.lock().memory(handle).map(|memory| memory.flags.handle_types);
        // This check comes first, so that memory that cannot be exported is not restored to the
        // GPU.
        if types.is_none_or(|types| types == 0 || types & kind == 0) || shareable.is_null() {
            return ERROR_INVALID_VALUE;
        }
        // SAFETY: these are the program's arguments, with the driver's handle instead of the virtual one.
        escape_handle(handle, |handle| unsafe { driver::cuMemExportToShareableHandle(shareable, handle, kind, flags) })
    }

    [cuMemAddressReserve] (place: *mut CUdeviceptr, size: Size, alignment: Size, wanted: CUdeviceptr, flags: u64) {
        let result = real();
        // SAFETY: the driver has just written `place`.
        if let (SUCCESS, Some(at)) = (result, unsafe { place.as_ref() }) {
            TABLE.lock().reserve(*at, size as u64);
        }
        result
    }
    [cuMemAddressFree] (address: CUdeviceptr, size: Size) {
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        let mut table = TABLE.lock();
        if table.ours_among(address, size as u64).is_some() {
            return ERROR_INVALID_VALUE; // like the driver, if memory is mapped there
        }
        after(real(), || table.unreserve(address))
    }
    [cuMemMap] (address: CUdeviceptr, size: Size, offset: Size, handle: Handle, flags: u64) {
        if is_virtual(handle) {
            return map(address, size as u64, offset as u64, handle, flags);
        }
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        let mut table = TABLE.lock();
        if table.ours_among(address, size as u64).is_some() {
            return ERROR_INVALID_VALUE; // in use, even if the driver has no mapping there now
        }
        after(real(), || {
            let is_counted = registry::driver_memory::retain(handle);
            table.map(address, size as u64, is_counted.then_some(handle));
        })
    }
    [cuMemUnmap] (address: CUdeviceptr, size: Size) {
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        unmap(address, size as u64, real)
    }
    [cuMemSetAccess] (address: CUdeviceptr, size: Size, wanted: *const AccessDesc, count: Size) {
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        set_access(address, size as u64, wanted, count, real)
    }
    [cuMemGetAccess] (flags: *mut u64, location: *const Location, address: CUdeviceptr) {
        get_access(flags, location, address, real)
    }

    [cuMulticastBindMem] (object: Handle, at: Size, memory: Handle, offset: Size, size: Size, flags: u64) {
        // SAFETY: these are the program's arguments, with the driver's handle instead of the virtual one.
        bind(memory, real, |memory| unsafe { driver::cuMulticastBindMem(object, at, memory, offset, size, flags) })
    }
    [cuMulticastBindMem_v2] (
        object: Handle, device: CUdevice, at: Size, memory: Handle, offset: Size, size: Size, flags: u64,
    ) {
        // SAFETY: these are the program's arguments, with the driver's handle instead of the virtual one.
        bind(memory, real, |memory| unsafe {
            driver::cuMulticastBindMem_v2(object, device, at, memory, offset, size, flags)
        })
    }
    [cuLogicalEndpointBindMem] (
        endpoint: u32, device: CUdevice, at: u64, memory: Handle, offset: u64, size: u64, flags: u64,
    ) {
        // SAFETY: these are the program's arguments, with the driver's handle instead of the virtual one.
        bind(memory, real, |memory| unsafe {
            driver::cuLogicalEndpointBindMem(endpoint, device, at, memory, offset, size, flags)
        })
    }
    [cuMulticastBindAddr] (object: Handle, at: Size, address: CUdeviceptr, size: Size, flags: u64) {
        bind_at(address, size, real)
    }
    [cuMulticastBindAddr_v2] (object: Handle, device: CUdevice, at: Size, address: CUdeviceptr, size: Size, flags: u64) {
        bind_at(address, size, real)
    }
    [cuLogicalEndpointBindAddr] (endpoint: u32, device: CUdevice, at: u64, address: CUdeviceptr, size: u64, flags: u64) {
        bind_at(address, size as Size, real)
    }
    // Memory that is created for sparse arrays belongs to the driver. But arrays with deferred
    // mapping accept any memory, also memory of this library.
    [cuMemMapArrayAsync | cuMemMapArrayAsync_ptsz] (list: *const ArrayMap, n: u32, stream: CUstream) {
        // SAFETY: `list` has `n` entries, as the program states.
        if unsafe { maps_ours(list, n) } { ERROR_NOT_SUPPORTED } else { enqueue(flavour.stream(stream), ONE, real) }
    }
}
