//! Memory that the program reserves, creates and maps itself. The program gets *virtual handles*
//! ([`crate::registry::virtual_memory`]), so that the memory can leave the GPU and come back at all the addresses where the
//! program has mapped it.
//!
//! None of these calls waits for the GPU lock. While memory is away, they only record how it will be mapped when it is back;
//! the gate is closed until then. A call that exports memory waits until the memory is on the GPU, where it is then pinned.

use super::{
    address_info::{get_access, properties},
    mappings::{map, set_access, unmap},
};
use crate::{
    driver::{self, hook::hooks, types::*},
    env::{settings, trace::trace},
    gate,
    gpu::Gpu,
    hooks::{
        gated::{ONE, gated, naming_on},
        memory::{self},
        pinned,
    },
    memory::{
        engine::{Flags, GRANULE, has},
        space::Space,
    },
    registry::{
        self, pinned as account,
        pinned::Kind,
        virtual_memory as vmm,
        virtual_memory::{Memory, TABLE},
    },
    sys::sync::Mutex,
};
use core::ffi::c_void;

type P = *mut c_void;

pub(super) fn whole(len: u64) -> bool {
    len != 0 && len.is_multiple_of(GRANULE)
}

/// Whether this is a virtual handle. In the child of a fork it does not matter: the driver refuses every call there.
pub(super) fn is_ours(handle: Handle) -> bool {
    gate::is_active() && vmm::is_virtual(handle)
}

/// The GPU, the space and the flags with which movable memory is created for this call: plain memory of a GPU whose memory this
/// library moves. `None` for all other memory, which the driver creates, and for calls whose errors the driver reports.
fn movable(
    place: *mut Handle,
    size: Size,
    prop: *const AllocationProp,
    flags: u64,
) -> Option<(&'static Gpu, &'static Mutex<Space>, Flags)> {
    let gpu = if gate::is_active() { account::gpu_of(prop) } else { None }?;
    let space = gpu.space().filter(|space| space.lock().engine().copies())?;
    // SAFETY: the driver reads it too; it is not NULL, or it would have no GPU.
    let prop = unsafe { prop.as_ref() }?;
    let (device, types) = (prop.location.id, prop.requested_handle_types);
    let is_plain = prop.kind == MEM_ALLOCATION_TYPE_PINNED
        && prop.compression_type == 0
        && prop.usage == 0
        && prop.win32_handle_meta_data.is_null()
        && prop.gpu_direct_rdma_capable <= 1
        && prop.reserved == [0; 4];
    let is_known = match types {
        0 => true,
        MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR => {
            has(device, DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)
        }
        _ => false,
    };
    let rdma = prop.gpu_direct_rdma_capable;
    let fits = rdma == 0 || has(device, DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    let ours = is_plain && is_known && fits && !place.is_null() && flags == 0 && whole(size as u64);
    ours.then_some((gpu, space, Flags { handle_types: types, rdma, ..Flags::default() }))
}

fn create(place: *mut Handle, size: Size, gpu: &'static Gpu, space: &Mutex<Space>, flags: Flags) -> CUresult {
    let beyond = settings::get().oversubscribe;
    let made = memory::with_retries(gpu, space, size, |space| space.create(size as u64, flags, beyond, &gpu.work));
    trace!("GPU {}: create {size}: {made:x?}", gpu.index);
    match made {
        Ok((base, backing)) => {
            if !memory::is_backed_in_time(gpu, space, backing, |space| space.destroy(base)) {
                return ERROR_OUT_OF_MEMORY;
            }
            let handle = TABLE.lock().add(gpu, base, size as u64, flags);
            // SAFETY: the program's own place, not NULL.
            unsafe { place.write(handle) };
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Changes the space that holds this memory, and carries out the consequences.
pub(super) fn changing<R>(memory: &Memory, change: impl FnOnce(&mut Space) -> R) -> Option<R> {
    let mut guard = memory.gpu.space()?.lock();
    let before = guard.account;
    let result = change(&mut guard);
    let after = guard.account;
    memory.gpu.account_changed(&before, &after);
    Some(result)
}

/// Frees memory that has no references.
pub(super) fn drop_unused(memory: Option<Memory>) {
    if let Some(memory) = memory {
        changing(&memory, |space| space.destroy(memory.base));
    }
}

fn release(handle: Handle) -> CUresult {
    let mut table = TABLE.lock();
    if table.memory(handle).is_none() {
        return ERROR_INVALID_VALUE;
    }
    drop_unused(table.release(handle));
    SUCCESS
}

/// Makes a call by which others reach the memory behind a handle: other processes, other GPUs, other hosts. The memory is on
/// the GPU then, and stays. `call` gets the driver's handle, so the memory must be a single chunk.
fn escaping(handle: Handle, call: impl FnOnce(Handle) -> CUresult) -> CUresult {
    let Some(memory) = TABLE.lock().memory(handle) else { return ERROR_INVALID_VALUE };
    naming_on(memory.gpu, || {
        let pinned = {
            // Again: it may have been released meanwhile.
            let table = TABLE.lock();
            let Some(memory) = table.memory(handle) else { return ERROR_INVALID_VALUE };
            changing(&memory, |space| space.pin_chunk(memory.base)).flatten()
        };
        pinned.map_or(ERROR_NOT_SUPPORTED, call)
    })
}

/// The same for a call that names memory by address. Only our memory is pinned.
pub(super) fn escaping_at(address: CUdeviceptr, size: Size, call: impl FnOnce() -> CUresult) -> CUresult {
    let first = if gate::is_active() { TABLE.lock().at(address) } else { None };
    let Some((_, memory)) = first else { return call() };
    naming_on(memory.gpu, || {
        {
            let table = TABLE.lock();
            for mapping in table.overlapping(address, size as u64) {
                if let Some(memory) = table.behind(&mapping) {
                    changing(&memory, |space| space.pin(memory.base));
                }
            }
        }
        call()
    })
}

/// Makes a call that binds memory to an object through which other GPUs, or other hosts, reach it.
fn bind(memory: Handle, real: impl FnOnce() -> CUresult, call: impl FnOnce(Handle) -> CUresult) -> CUresult {
    if is_ours(memory) { escaping(memory, call) } else { real() }
}

/// The same for memory that is named by address.
fn bind_at(address: CUdeviceptr, size: Size, real: impl FnOnce() -> CUresult) -> CUresult {
    if registry::is_ours(address) {
        return ERROR_INVALID_VALUE; // as for any memory that cuMemCreate did not make
    }
    escaping_at(address, size, real)
}

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

/// Whether memory of ours is to be mapped into an array, which would have to follow it.
///
/// # Safety
/// `list` is NULL or has that many entries.
unsafe fn maps_ours(list: *const ArrayMap, n: u32) -> bool {
    // SAFETY: the caller's promise. An entry that unmaps may have no handle, but has the place for one.
    !list.is_null() && (0..n as usize).any(|i| is_ours(unsafe { (*list.add(i)).memory }))
}

hooks! { real, flavour;
    [cuMemCreate] (handle: *mut Handle, size: Size, prop: *const AllocationProp, flags: u64) {
        match movable(handle, size, prop, flags) {
            Some((gpu, space, flags)) => crate::sys::errno::preserved(|| create(handle, size, gpu, space, flags)),
            None if handle.is_null() || flags != 0 || !whole(size as u64) => real(), // the driver reports the error
            None => pinned::allocate(account::gpu_of(prop), Kind::Chunk, handle, size as u64, real),
        }
    }
    [cuMemRelease] (handle: Handle) {
        if is_ours(handle) {
            crate::sys::errno::preserved(|| release(handle))
        } else {
            pinned::free(Kind::Chunk, handle, real)
        }
    }
    [cuMemRetainAllocationHandle] (handle: *mut Handle, address: P) {
        if registry::is_ours(address as CUdeviceptr) {
            return ERROR_INVALID_VALUE; // as for any memory that cuMemCreate did not make
        }
        if gate::is_active() {
            let mut table = TABLE.lock();
            if let Some(found) = table.at(address as CUdeviceptr).and_then(|(mapping, _)| mapping.handle) {
                if handle.is_null() {
                    return ERROR_INVALID_VALUE;
                }
                table.retain(found);
                // SAFETY: the program's own place, not NULL.
                unsafe { handle.write(found) };
                return SUCCESS;
            }
        }
        let result = real();
        // SAFETY: the driver has just written there.
        if let (true, SUCCESS, Some(handle)) = (gate::is_active(), result, unsafe { handle.as_ref() }) {
            account::retain(*handle);
        }
        result
    }
    [cuMemGetAllocationPropertiesFromHandle] (prop: *mut AllocationProp, handle: Handle) {
        if is_ours(handle) { properties(prop, handle) } else { real() }
    }
    [cuMemExportToShareableHandle] (shareable: P, handle: Handle, kind: i32, flags: u64) {
        if !is_ours(handle) {
            return real();
        }
        let types = TABLE.lock().memory(handle).map(|memory| memory.flags.handle_types);
        // Memory that cannot be exported need not be on the GPU for it.
        if types.is_none_or(|types| types == 0 || types & kind == 0) || shareable.is_null() {
            return ERROR_INVALID_VALUE;
        }
        // SAFETY: the program's own arguments, and the driver's handle for its own.
        escaping(handle, |handle| unsafe { driver::cuMemExportToShareableHandle(shareable, handle, kind, flags) })
    }

    [cuMemAddressReserve] (place: *mut CUdeviceptr, size: Size, alignment: Size, wanted: CUdeviceptr, flags: u64) {
        let result = real();
        // SAFETY: the driver has just written there.
        if let (true, SUCCESS, Some(at)) = (gate::is_active(), result, unsafe { place.as_ref() }) {
            TABLE.lock().reserve(*at, size as u64);
        }
        result
    }
    [cuMemAddressFree] (address: CUdeviceptr, size: Size) {
        if !gate::is_active() {
            return real();
        }
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        let mut table = TABLE.lock();
        if table.ours_among(address, size as u64).is_some() {
            return ERROR_INVALID_VALUE; // as if anything were mapped there
        }
        let result = real();
        if result == SUCCESS {
            table.unreserve(address);
        }
        result
    }
    [cuMemMap] (address: CUdeviceptr, size: Size, offset: Size, handle: Handle, flags: u64) {
        if is_ours(handle) {
            return crate::sys::errno::preserved(|| map(address, size as u64, offset as u64, handle, flags));
        }
        if !gate::is_active() {
            return real();
        }
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        let mut table = TABLE.lock();
        if table.ours_among(address, size as u64).is_some() {
            return ERROR_INVALID_VALUE; // in use, although the driver may not know it now
        }
        let result = real();
        if result == SUCCESS {
            table.map(address, size as u64, None);
            account::map(address, handle);
        }
        result
    }
    [cuMemUnmap] (address: CUdeviceptr, size: Size) {
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        if gate::is_active() { crate::sys::errno::preserved(|| unmap(address, size as u64, real)) } else { real() }
    }
    [cuMemSetAccess] (address: CUdeviceptr, size: Size, wanted: *const AccessDesc, count: Size) {
        if registry::are_ours(address, size) {
            return ERROR_INVALID_VALUE;
        }
        if gate::is_active() {
            crate::sys::errno::preserved(|| set_access(address, size as u64, wanted, count, real))
        } else {
            real()
        }
    }
    [cuMemGetAccess] (flags: *mut u64, location: *const Location, address: CUdeviceptr) {
        if gate::is_active() { get_access(flags, location, address, real) } else { real() }
    }

    [cuMulticastBindMem] (object: Handle, at: Size, memory: Handle, offset: Size, size: Size, flags: u64) {
        // SAFETY: the program's own arguments, and the driver's handle for its own.
        bind(memory, real, |memory| unsafe { driver::cuMulticastBindMem(object, at, memory, offset, size, flags) })
    }
    [cuMulticastBindMem_v2] (
        object: Handle, device: CUdevice, at: Size, memory: Handle, offset: Size, size: Size, flags: u64,
    ) {
        // SAFETY: the program's own arguments, and the driver's handle for its own.
        bind(memory, real, |memory| unsafe {
            driver::cuMulticastBindMem_v2(object, device, at, memory, offset, size, flags)
        })
    }
    [cuLogicalEndpointBindMem] (
        endpoint: u32, device: CUdevice, at: u64, memory: Handle, offset: u64, size: u64, flags: u64,
    ) {
        // SAFETY: the program's own arguments, and the driver's handle for its own.
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
    // Sparse arrays have memory that is created for them, which is the driver's; others can be mapped later, from any memory.
    [cuMemMapArrayAsync | cuMemMapArrayAsync_ptsz] (list: *const ArrayMap, n: u32, stream: CUstream) {
        // SAFETY: the program passes that many entries.
        if unsafe { maps_ours(list, n) } { ERROR_NOT_SUPPORTED } else { gated(flavour.stream(stream), ONE, real) }
    }
}
