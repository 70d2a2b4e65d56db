//! Mapping and unmapping memory that the program created with `cuMemCreate`, and setting access rights
//! for it.

use super::allocate;
use crate::{
    connection,
    driver::{self, after, put_result, query, types::*},
    env::settings,
    gpu::{self, Gpu, peers},
    memory::{
        engine::{Flags, GRANULE, has},
        space::Space,
    },
    registry::{
        driver_memory, shared, virtual_memory as vmm,
        virtual_memory::{Mapping, Memory, TABLE, Table},
    },
    sys::sync::Mutex,
};
use alloc::vec::Vec;

/// Upper bound on the number of access descriptors in one call. More than the number of locations.
const MANY: usize = 256;

pub fn whole(len: u64) -> bool {
    len != 0 && len.is_multiple_of(GRANULE)
}

/// Attaches the GPU on which a program creates memory. The program need not have a context there:
/// services that create memory for other processes have none. Returns `false` if the GPU has no room.
pub fn attach(prop: *const AllocationProp) -> bool {
    // SAFETY: `prop` is the program's pointer, which the driver would dereference too. NULL is handled.
    let location = unsafe { prop.as_ref() }.map(|prop| prop.location);
    let device = location.filter(|location| location.kind == MEM_LOCATION_TYPE_DEVICE).map(|location| location.id);
    // A GPU that has refused this program may have room now.
    let is_missing = |device: &CUdevice| gpu::by_ordinal(*device).is_none_or(Gpu::is_refused);
    let Some(device) = device.filter(is_missing) else { return true };
    let is_admitted = Gpu::attach(device, shared::introduce);
    connection::wake();
    is_admitted
}

/// Returns the GPU, its space and the flags if this call creates movable memory, that is, plain memory
/// of a GPU whose memory this library moves. Otherwise returns `None`, and the driver must create the
/// memory or report an error.
///
/// Without a context, the library cannot move memory.
pub fn movable(
    place: *mut Handle,
    size: Size,
    prop: *const AllocationProp,
    flags: u64,
) -> Option<(&'static Gpu, &'static Mutex<Space>, Flags)> {
    let gpu = driver_memory::gpu_of(prop)?;
    let space = gpu.space().filter(|space| gpu.work.has_contexts() && space.lock().engine().copies())?;
    // SAFETY: `prop` is the program's pointer, which the driver would dereference too. It is not NULL,
    // because `gpu_of` found a GPU.
    let prop = unsafe { prop.as_ref() }?;
    let (device, types) = (prop.location.id, prop.requested_handle_types);
    let is_plain = prop.kind == MEM_ALLOCATION_TYPE_PINNED
        && prop.compression_type == 0
        && prop.usage == 0
        && prop.win32_handle_meta_data == 0
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

pub fn create(place: *mut Handle, size: Size, gpu: &'static Gpu, space: &Mutex<Space>, flags: Flags) -> CUresult {
    let beyond = settings::get().oversubscribe;
    let take = |space: &mut Space| space.create(size as u64, flags, beyond, &gpu.work);
    let base = allocate::allocate_backed(gpu, space, size, take, Space::destroy);
    // SAFETY: `place` is the program's pointer, and not NULL.
    unsafe { put_result(place, base.map(|base| TABLE.lock().add(gpu, base, size as u64, flags))) }
}

/// Frees memory that has no references.
pub fn drop_unused(memory: Option<Memory>) {
    if let Some(memory) = memory {
        memory.gpu.change(|space| space.destroy(memory.base));
    }
}

/// Forgets a mapping that has ended.
fn forget(table: &mut Table, mapping: &Mapping) {
    drop_unused(table.unmap(mapping.at));
    mapping.handle.into_iter().filter(|handle| !vmm::is_virtual(*handle)).for_each(driver_memory::release_mapped);
}

pub fn release(handle: Handle) -> CUresult {
    let mut table = TABLE.lock();
    if table.memory(handle).is_none() {
        return ERROR_INVALID_VALUE;
    }
    drop_unused(table.release(handle));
    SUCCESS
}

pub fn map(address: CUdeviceptr, size: u64, offset: u64, handle: Handle, flags: u64) -> CUresult {
    let mut table = TABLE.lock();
    let Some(memory) = table.memory(handle) else { return ERROR_INVALID_VALUE };
    if !whole(size) || flags != 0 || !address.is_multiple_of(GRANULE) {
        return ERROR_INVALID_VALUE;
    }
    // The driver maps an allocation only as a whole.
    if offset != 0 || size != memory.len {
        return ERROR_NOT_SUPPORTED;
    }
    if !table.is_reserved(address, size) || !table.overlaps_of(address, size).is_empty() {
        return ERROR_INVALID_VALUE;
    }
    match memory.gpu.change(|space| space.add_alias(memory.base, address)) {
        Some(Ok(())) => {
            table.map(address, size, Some(handle));
            SUCCESS
        }
        Some(Err(error)) => error,
        None => ERROR_INVALID_VALUE,
    }
}

pub fn unmap(address: CUdeviceptr, size: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let mut table = TABLE.lock();
    let Some(found) = table.ours_among(address, size) else {
        let gone = table.overlaps_of(address, size);
        return after(real(), || gone.iter().for_each(|mapping| forget(&mut table, mapping)));
    };
    // Like driver 580, this library splits no mapping, but accepts gaps between mappings.
    if !whole(size) || !vmm::are_within(&found, address, size) {
        return ERROR_INVALID_VALUE;
    }
    for mapping in found {
        match table.behind(&mapping) {
            Some(memory) => {
                memory.gpu.change(|space| space.aliases(memory.base).map(|aliases| aliases.remove(mapping.at)));
            }
            None => {
                // SAFETY: the program has requested the call.
                unsafe { driver::cuMemUnmap(mapping.at, mapping.len as usize) };
            }
        }
        forget(&mut table, &mapping);
    }
    SUCCESS
}

pub fn set_access(
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
    // SAFETY: the program passes `count` entries.
    let wanted: Vec<_> = (0..count).map(|i| unsafe { wanted.add(i).read_unaligned() }).collect();
    for desc in &wanted {
        match desc.location.kind {
            MEM_LOCATION_TYPE_DEVICE if matches!(desc.flags, 0 | 1 | 3) => {}
            MEM_LOCATION_TYPE_HOST => return ERROR_NOT_SUPPORTED, // the answer of driver 580 for GPU memory
            _ => return ERROR_INVALID_VALUE,
        }
        let attribute = DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
        if query::device_attribute(desc.location.id, attribute).is_none() {
            return ERROR_INVALID_VALUE;
        }
    }
    let reaches = |from, to| from == to || query::can_access_peer(from, to) != Some(false);
    // Checks that each device can reach the memory. The driver cannot check this while the memory is
    // evicted.
    let behind = found.iter().filter_map(|mapping| table.behind(mapping));
    let mut all = behind.flat_map(|memory| wanted.iter().map(move |desc| (desc, memory.gpu.index as CUdevice)));
    if all.any(|(desc, owner)| desc.flags != 0 && !reaches(desc.location.id, owner)) {
        return ERROR_INVALID_DEVICE;
    }
    let owners = found.iter().filter_map(|mapping| table.behind(mapping));
    owners.for_each(|memory| wanted.iter().for_each(|desc| peers::on_access(memory.gpu, desc.location.id)));
    for mapping in found {
        let result = match table.behind(&mapping) {
            Some(memory) => memory.gpu.change(|space| {
                space.aliases(memory.base).map_or(Ok(()), |aliases| aliases.set_access(mapping.at, &wanted))
            }),
            // SAFETY: the program has requested the call.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        connection::fake::Scheduler,
        driver::fake::{Driver, until},
        gpu::limit_request::{Outcome, raise},
        submit,
    };
    use nvshare_wire::ClientMessage;
    use std::thread;

    /// Attaches a GPU for memory, while the scheduler answers with `answer`. Returns the outcome.
    fn attach_while(device: CUdevice, answer: impl FnOnce(&'static Gpu)) -> bool {
        thread::scope(|scope| {
            let attaching = scope.spawn(move || {
                let location = Location { kind: MEM_LOCATION_TYPE_DEVICE, id: device };
                attach(&AllocationProp { location, ..AllocationProp::default() })
            });
            until(|| gpu::by_ordinal(device).is_some_and(|gpu| gpu.is_introduced()));
            answer(gpu::by_ordinal(device).expect("an attached GPU"));
            attaching.join().expect("no panic")
        })
    }

    #[test]
    fn a_gpu_that_has_refused_a_program_without_a_context_is_asked_at_each_creation_of_memory() {
        let (driver, scheduler) = (Driver::new(), Scheduler::connect());
        submit::set_active(true);
        let device = driver.new_device();
        for _ in 0..2 {
            assert!(!attach_while(device, Gpu::refuse_context));
            let sent = scheduler.sent();
            assert!(matches!(sent[..], [ClientMessage::Attach { .. }, .., ClientMessage::Detach { .. }]), "{sent:?}");
        }
        let gpu = gpu::by_ordinal(device).expect("an attached GPU");
        gpu.space().expect("a space").lock().limit(1, 0, GRANULE, 0);
        assert_eq!(raise(gpu, GRANULE, false, 0), Outcome::Beyond);
        assert_eq!(scheduler.sent(), [], "the scheduler does not know the GPU");
        assert!(attach_while(device, Gpu::admit_context));
    }
}
