//! Mapping and unmapping memory that the program created, and setting access rights for it.

use super::vmm::{changing, drop_unused, whole};
use crate::{
    driver::{self, types::*},
    gpu::peers,
    memory::engine::GRANULE,
    registry::{pinned as account, virtual_memory as vmm, virtual_memory::TABLE},
};
use alloc::vec::Vec;

/// More entries than there are locations that could be given access.
const MANY: usize = 256;

pub(super) fn map(address: CUdeviceptr, size: u64, offset: u64, handle: Handle, flags: u64) -> CUresult {
    let mut table = TABLE.lock();
    let Some(memory) = table.memory(handle) else { return ERROR_INVALID_VALUE };
    if !whole(size) || flags != 0 || !address.is_multiple_of(GRANULE) {
        return ERROR_INVALID_VALUE;
    }
    // The driver maps memory as a whole or not at all.
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

pub(super) fn unmap(address: CUdeviceptr, size: u64, real: impl FnOnce() -> CUresult) -> CUresult {
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
    // The driver splits no mapping, and accepts gaps (580).
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

pub(super) fn set_access(
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
            MEM_LOCATION_TYPE_HOST => return ERROR_NOT_SUPPORTED, // as the driver says for memory of a GPU (580)
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
    // While memory is away, the driver does not check this.
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
