//! Memory that the program reserves, makes and maps itself: it gets *virtual handles* ([`crate::registry::virtual_memory`]), so that what
//! is behind them can leave the GPU and come back, at all the addresses where the program has mapped it.
//!
//! None of these calls waits for the GPU lock. While memory is away, they only record what it will be like when it is
//! back; the gate is closed until then. What others get hold of is the driver's, and stays: then the call waits for the
//! memory, and the memory is pinned.

use crate::{
    driver::{self, types::*},
    env::{settings, trace::trace},
    gate,
    gpu::{Gpu, peers},
    hooks::{
        gated::naming_on,
        hooks,
        memory::{self, put},
        pinned,
    },
    memory::{
        engine::{self, Flags, GRANULE, has},
        space::Space,
    },
    registry::{
        self, pinned as account,
        pinned::Kind,
        virtual_memory as vmm,
        virtual_memory::{Mapping, Memory, TABLE},
    },
    sys::sync::Mutex,
};
use alloc::vec::Vec;
use core::ffi::c_void;

type P = *mut c_void;

/// More entries than there are places that could be given access.
const MANY: usize = 256;

fn whole(len: u64) -> bool {
    len != 0 && len.is_multiple_of(GRANULE)
}

// ---- memory ----

/// Whether a handle is for this library to look up. In a forked child it is not: there the driver refuses everything.
fn is_ours(handle: Handle) -> bool {
    gate::is_active() && vmm::is_virtual(handle)
}

/// Where memory can be made that moves: plain memory of a GPU that this library moves memory of. The driver makes any
/// other, and says what is wrong with a call.
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

/// Changes the space that a memory is in, and sees to what follows from it.
fn changing<R>(memory: &Memory, change: impl FnOnce(&mut Space) -> R) -> Option<R> {
    let mut guard = memory.gpu.space()?.lock();
    let before = guard.account;
    let result = change(&mut guard);
    let after = guard.account;
    memory.gpu.account_changed(&before, &after);
    Some(result)
}

/// Frees what nothing refers to any more.
fn drop_unused(memory: Option<Memory>) {
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

/// Runs a call that gives others the memory behind a handle, or part of it: it is there then, and stays. The call gets the
/// driver's handle.
fn escaping(handle: Handle, call: impl FnOnce(Handle) -> CUresult) -> CUresult {
    let Some(memory) = TABLE.lock().memory(handle) else { return ERROR_INVALID_VALUE };
    naming_on(memory.gpu, || {
        // Looked up again: it may have been released meanwhile.
        let table = TABLE.lock();
        let Some(memory) = table.memory(handle) else { return ERROR_INVALID_VALUE };
        let pinned = changing(&memory, |space| space.on_gpu(memory.base).filter(|_| space.pin(memory.base)));
        pinned.flatten().map_or(ERROR_NOT_SUPPORTED, call)
    })
}

/// The same for a call that names memory by address. Only memory of ours is pinned.
pub(super) fn escaping_at(address: CUdeviceptr, size: Size, call: impl FnOnce() -> CUresult) -> CUresult {
    let first = if gate::is_active() { TABLE.lock().at(address) } else { None };
    let Some((_, memory)) = first else { return call() };
    naming_on(memory.gpu, || {
        let table = TABLE.lock();
        for mapping in table.overlapping(address, size as u64) {
            if let Some(memory) = table.behind(&mapping) {
                changing(&memory, |space| space.pin(memory.base));
            }
        }
        call()
    })
}

// ---- mappings ----

fn map(address: CUdeviceptr, size: u64, offset: u64, handle: Handle, flags: u64) -> CUresult {
    let mut table = TABLE.lock();
    let Some(memory) = table.memory(handle) else { return ERROR_INVALID_VALUE };
    if !whole(size) || flags != 0 || !address.is_multiple_of(GRANULE) {
        return ERROR_INVALID_VALUE;
    }
    // The driver maps memory whole or not at all.
    if offset != 0 || size != memory.len {
        return ERROR_NOT_SUPPORTED;
    }
    if !table.is_reserved(address, size) || !table.overlapping(address, size).is_empty() {
        return ERROR_INVALID_VALUE;
    }
    match changing(&memory, |space| space.add_alias(memory.base, address)) {
        Some(Ok(())) => {
            table.map(address, size, Some(handle));
            SUCCESS
        }
        Some(Err(error)) => error,
        None => ERROR_INVALID_VALUE,
    }
}

fn unmap(address: CUdeviceptr, size: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let mut table = TABLE.lock();
    let Some(found) = table.ours_among(address, size) else {
        let gone = table.overlapping(address, size);
        let result = real();
        if result == SUCCESS {
            gone.iter().for_each(|mapping| drop_unused(table.unmap(mapping.at)));
            account::unmap(address, size as usize);
        }
        return result;
    };
    // The driver cuts no mapping, and minds no hole (580).
    if !whole(size) || !vmm::are_within(&found, address, size) {
        return ERROR_INVALID_VALUE;
    }
    for mapping in found {
        match table.behind(&mapping) {
            Some(memory) => {
                changing(&memory, |space| space.remove_alias(memory.base, mapping.at));
            }
            None => {
                // SAFETY: the program asked for it.
                unsafe { driver::cuMemUnmap(mapping.at, mapping.len as usize) };
                account::unmap(mapping.at, mapping.len as usize);
            }
        }
        drop_unused(table.unmap(mapping.at));
    }
    SUCCESS
}

fn set_access(
    address: CUdeviceptr,
    size: u64,
    wanted: *const AccessDesc,
    count: Size,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    let table = TABLE.lock();
    let Some(found) = table.ours_among(address, size) else { return real() };
    if wanted.is_null() || count == 0 || count > MANY || !vmm::make_up(&found, address, size) {
        return ERROR_INVALID_VALUE;
    }
    // SAFETY: the program passes that many entries.
    let wanted: Vec<_> = (0..count).map(|i| unsafe { wanted.add(i).read_unaligned() }).collect();
    for desc in &wanted {
        let mut value = 0;
        match desc.location.kind {
            MEM_LOCATION_TYPE_DEVICE if matches!(desc.flags, 0 | 1 | 3) => {}
            MEM_LOCATION_TYPE_HOST => return ERROR_NOT_SUPPORTED, // for memory of a GPU (580)
            _ => return ERROR_INVALID_VALUE,
        }
        let attribute = DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        // SAFETY: a valid place.
        let known = unsafe { driver::cuDeviceGetAttribute(&mut value, attribute, desc.location.id) };
        if known != SUCCESS {
            return ERROR_INVALID_VALUE;
        }
    }
    let reaches = |from: CUdevice, to: CUdevice| {
        let mut can = 1;
        // SAFETY: a valid place.
        from == to || unsafe { driver::cuDeviceCanAccessPeer(&mut can, from, to) } != SUCCESS || can != 0
    };
    // While it is away, nobody else says so.
    let behind = found.iter().filter_map(|mapping| table.behind(mapping));
    let mut all = behind.flat_map(|memory| wanted.iter().map(move |desc| (desc, memory.gpu.index as CUdevice)));
    if all.any(|(desc, owner)| desc.flags != 0 && !reaches(desc.location.id, owner)) {
        return ERROR_INVALID_DEVICE;
    }
    let owners = found.iter().filter_map(|mapping| table.behind(mapping));
    owners.for_each(|memory| wanted.iter().for_each(|desc| peers::given(memory.gpu, desc.location.id)));
    for mapping in found {
        let result = match table.behind(&mapping) {
            Some(memory) => changing(&memory, |space| {
                space.aliases(memory.base).map_or(Ok(()), |aliases| aliases.set_access(mapping.at, &wanted))
            }),
            // SAFETY: the program asked for it.
            None => match unsafe { driver::cuMemSetAccess(mapping.at, mapping.len as usize, wanted.as_ptr(), count) } {
                SUCCESS => None,
                error => Some(Err(error)),
            },
        };
        if let Some(Err(error)) = result {
            return error;
        }
    }
    SUCCESS
}

// ---- questions ----

/// Answers with what the driver says while the memory at an address is on the GPU, and from the record while it is not.
fn driver_or_record(
    memory: &Memory,
    real: impl FnOnce() -> CUresult,
    recorded: impl FnOnce(&mut Space) -> CUresult,
) -> Option<CUresult> {
    // Locked, so that it does not leave between the look and the answer.
    let mut space = memory.gpu.space()?.lock();
    Some(if space.on_gpu(memory.base).is_some() { real() } else { recorded(&mut space) })
}

/// The GPU that it is memory of.
fn home(memory: &Memory) -> Location {
    Location { kind: MEM_LOCATION_TYPE_DEVICE, id: memory.gpu.index as i32 }
}

fn get_access(
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
    // SAFETY: the driver reads it too.
    let Some(location) = unsafe { location.as_ref() }.filter(is_known).filter(|_| !flags.is_null()) else {
        return ERROR_INVALID_VALUE;
    };
    let Some((mapping, memory)) = found else {
        // Of memory that the program did not map, the driver says this (580).
        // SAFETY: the program's own place, not NULL.
        unsafe { put(flags, 0) };
        return SUCCESS;
    };
    let recorded = |space: &mut Space| {
        // Of the host it says what it says of the memory's own GPU (580).
        let asked = if location.kind == MEM_LOCATION_TYPE_HOST { home(&memory) } else { *location };
        let access = space.aliases(memory.base).map_or(0, |aliases| aliases.access(mapping.at, asked));
        // SAFETY: the program's own place, not NULL.
        unsafe { put(flags, access as u64) };
        SUCCESS
    };
    driver_or_record(&memory, &real, recorded).unwrap_or_else(real)
}

fn properties(prop: *mut AllocationProp, handle: Handle) -> CUresult {
    let table = TABLE.lock();
    let Some(memory) = table.memory(handle).filter(|_| !prop.is_null()) else { return ERROR_INVALID_VALUE };
    let Some(space) = memory.gpu.space() else { return ERROR_INVALID_VALUE };
    let space = space.lock();
    if let Some(handle) = space.on_gpu(memory.base) {
        // SAFETY: the program's own place, and a handle of ours.
        return unsafe { driver::cuMemGetAllocationPropertiesFromHandle(prop, handle) };
    }
    let made = engine::properties(memory.gpu.index as CUdevice, memory.flags);
    // SAFETY: the program's own place, not NULL.
    unsafe { prop.write_unaligned(made) };
    SUCCESS
}

/// A mapping of ours that the program asks about.
#[derive(Debug)]
struct AddressInfo {
    mapping: Mapping,
    memory: Memory,
    reservation: (u64, u64),
    /// What its GPU may do there.
    rights: i32,
    /// It is not on the GPU, so the driver knows nothing of it.
    away: bool,
}

/// Answers about an address where the program has mapped memory of ours, which neither comes nor goes meanwhile; `None` where
/// it has not.
fn query<R>(address: CUdeviceptr, answer: impl FnOnce(&AddressInfo) -> R) -> Option<R> {
    if !gate::is_active() {
        return None;
    }
    let table = TABLE.lock();
    let (mapping, memory) = table.at(address)?;
    let mut space = memory.gpu.space()?.lock();
    let rights = space.aliases(memory.base).map_or(0, |aliases| aliases.access(mapping.at, home(&memory)));
    let away = space.on_gpu(memory.base).is_none();
    let reservation = table.reservation(address).unwrap_or((mapping.at, mapping.len));
    Some(answer(&AddressInfo { mapping, memory, reservation, rights, away }))
}

/// Where what is mapped at an address begins, and how long it is; an error if the GPU may not touch it, like the driver's
/// (580). `None` where nothing of ours is.
pub(super) fn extent(address: CUdeviceptr) -> Option<Result<(u64, u64), CUresult>> {
    query(address, |a| if a.rights == 0 { Err(ERROR_NOT_FOUND) } else { Ok((a.mapping.at, a.mapping.len)) })
}

/// Writes an attribute of a mapping of ours: those that would change when memory comes back, and those that the driver does
/// not know while it is away. `None` for others. The answers are those of driver 580.
///
/// # Safety
/// `data` is valid for that attribute.
unsafe fn write(data: P, which: i32, address: CUdeviceptr, asked: &AddressInfo) -> Option<CUresult> {
    use crate::driver::types::pointer_attribute::*;
    let AddressInfo { mapping, memory, reservation, rights, away } = asked;
    // SAFETY: the caller's promise; each attribute's type is the driver's.
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

/// `cuPointerGetAttribute` of an address that no allocation of ours has.
pub(super) fn attribute(data: P, which: i32, address: CUdeviceptr, real: impl Fn() -> CUresult) -> CUresult {
    if data.is_null() {
        return real();
    }
    let answered = query(address, |asked| match real() {
        // The driver does not know the address, or it knows it and has no such attribute.
        // SAFETY: the program's own place for that attribute.
        result @ (SUCCESS | ERROR_INVALID_VALUE) => unsafe { write(data, which, address, asked) }.unwrap_or(result),
        error => error,
    });
    answered.unwrap_or_else(real)
}

/// `cuPointerGetAttributes` of such an address.
pub(super) fn attributes(
    n: u32,
    which: *const i32,
    data: *mut P,
    address: CUdeviceptr,
    real: impl Fn() -> CUresult,
) -> CUresult {
    if which.is_null() || data.is_null() {
        return real();
    }
    let answered = query(address, |asked| {
        let result = real();
        if result == SUCCESS {
            for i in 0..n as usize {
                // SAFETY: the program's own arrays of that length.
                unsafe {
                    let (which, data) = (*which.add(i), *data.add(i));
                    write(data, which, address, asked);
                }
            }
        }
        result
    });
    answered.unwrap_or_else(real)
}

hooks! { real, flavour;
    [cuMemCreate] (handle: *mut Handle, size: Size, prop: *const AllocationProp, flags: u64) {
        match movable(handle, size, prop, flags) {
            Some((gpu, space, flags)) => crate::sys::errno::preserved(|| create(handle, size, gpu, space, flags)),
            None if handle.is_null() || flags != 0 || !whole(size as u64) => real(), // the driver's error
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
            return ERROR_INVALID_VALUE; // as for any memory that the program did not make with cuMemCreate
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
        // What cannot be exported need not be there for it.
        if types.is_none_or(|types| types == 0 || types & kind == 0) || shareable.is_null() {
            return ERROR_INVALID_VALUE;
        }
        // SAFETY: the program's own arguments, and the driver's handle for its own.
        escaping(handle, |handle| unsafe { driver::cuMemExportToShareableHandle(shareable, handle, kind, flags) })
    }
    [cuMulticastBindMem] (object: Handle, offset: Size, memory: Handle, memory_offset: Size, size: Size, flags: u64) {
        if !is_ours(memory) {
            return real();
        }
        // SAFETY: the program's own arguments, and the driver's handle for its own.
        escaping(memory, |memory| unsafe { driver::cuMulticastBindMem(object, offset, memory, memory_offset, size, flags) })
    }
    [cuMulticastBindMem_v2] (
        object: Handle, device: CUdevice, offset: Size, memory: Handle, memory_offset: Size, size: Size, flags: u64,
    ) {
        if !is_ours(memory) {
            return real();
        }
        // SAFETY: the program's own arguments, and the driver's handle for its own.
        escaping(memory, |memory| unsafe {
            driver::cuMulticastBindMem_v2(object, device, offset, memory, memory_offset, size, flags)
        })
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
            return ERROR_INVALID_VALUE; // as with anything mapped there
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
            return ERROR_INVALID_VALUE; // taken, although the driver may not know it now
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
}
