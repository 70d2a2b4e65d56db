//! Memory that is bound to an object through which several GPUs, or other hosts, reach it. What is bound stays on the GPU.
//!
//! Memory that the program has created is one allocation for it, and may be several chunks for the driver: each is bound by
//! itself.

use crate::{
    driver::{self, types::*},
    gate,
    hooks::{
        gated::{ONE, gated, naming_on},
        hooks,
        vmm::{changing, is_ours},
    },
    memory::space::Part,
    registry::{
        self,
        virtual_memory::{Memory, TABLE, Table},
    },
};

/// What is bound: so many bytes from this offset of the memory on, at this offset of the object.
#[derive(Clone, Copy)]
struct Wanted {
    at: u64,
    offset: u64,
    size: u64,
}

/// Binds memory of ours, all of it or nothing. `find` finds it in the table; `bind` binds one part at an offset of the object;
/// `unbind` undoes that for a GPU, an offset of the object and a length.
fn bind(
    wanted: Wanted,
    find: impl Fn(&Table) -> Option<Memory>,
    bind: impl Fn(u64, &Part) -> CUresult,
    unbind: impl Fn(CUdevice, u64, u64) -> CUresult,
) -> CUresult {
    let Wanted { at, offset, size } = wanted;
    let Some(memory) = find(&TABLE.lock()) else { return ERROR_INVALID_VALUE };
    // What the driver would refuse need not be on the GPU for it.
    let is_within = offset.checked_add(size).is_some_and(|end| end <= memory.len);
    if size == 0 || !is_within || at.checked_add(size).is_none() {
        return ERROR_INVALID_VALUE;
    }
    naming_on(memory.gpu, || {
        // Again: it may have been released meanwhile, and is not while the table is locked.
        let table = TABLE.lock();
        let Some(memory) = find(&table) else { return ERROR_INVALID_VALUE };
        let parts = changing(&memory, |space| space.pin(memory.base).then(|| space.parts(memory.base, offset, size)));
        let Some(parts) = parts.flatten() else { return ERROR_NOT_SUPPORTED };
        let mut bound = 0;
        for part in &parts {
            let result = bind(at + bound, part);
            if result != SUCCESS {
                if bound > 0 {
                    unbind(memory.gpu.index as CUdevice, at, bound);
                }
                return result;
            }
            bound += part.len;
        }
        SUCCESS
    })
}

/// The same for memory that is named by an address, which is the driver's if nothing of ours is mapped there.
fn bind_address(
    at: u64,
    address: CUdeviceptr,
    size: u64,
    real: impl FnOnce() -> CUresult,
    bind_part: impl Fn(u64, CUdeviceptr, u64) -> CUresult,
    unbind: impl Fn(CUdevice, u64, u64) -> CUresult,
) -> CUresult {
    if registry::is_ours(address) {
        return ERROR_INVALID_VALUE; // as for any memory that cuMemCreate did not make
    }
    let mapping = if gate::is_active() { TABLE.lock().at(address) } else { None };
    let Some((mapping, _)) = mapping else { return real() };
    let offset = address - mapping.at;
    let find = |table: &Table| table.at(address).filter(|(found, _)| found.id == mapping.id).map(|(_, memory)| memory);
    let part = |at, part: &Part| bind_part(at, mapping.at + part.offset, part.len);
    bind(Wanted { at, offset, size }, find, part, unbind)
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
    [cuMulticastBindMem] (object: Handle, at: Size, memory: Handle, offset: Size, size: Size, flags: u64) {
        if !is_ours(memory) {
            return real();
        }
        // SAFETY: the program's own arguments, and the driver's handles for its own.
        unsafe {
            bind(
                Wanted { at: at as u64, offset: offset as u64, size: size as u64 },
                |table| table.memory(memory),
                |at, part| driver::cuMulticastBindMem(object, at as Size, part.handle, part.inside as Size, part.len as Size, flags),
                |device, at, len| driver::cuMulticastUnbind(object, device, at as Size, len as Size),
            )
        }
    }
    [cuMulticastBindMem_v2] (
        object: Handle, device: CUdevice, at: Size, memory: Handle, offset: Size, size: Size, flags: u64,
    ) {
        if !is_ours(memory) {
            return real();
        }
        // SAFETY: as above.
        unsafe {
            bind(
                Wanted { at: at as u64, offset: offset as u64, size: size as u64 },
                |table| table.memory(memory),
                |at, part| {
                    let (inside, len) = (part.inside as Size, part.len as Size);
                    driver::cuMulticastBindMem_v2(object, device, at as Size, part.handle, inside, len, flags)
                },
                |_, at, len| driver::cuMulticastUnbind(object, device, at as Size, len as Size),
            )
        }
    }
    [cuLogicalEndpointBindMem] (
        endpoint: u32, device: CUdevice, at: u64, memory: Handle, offset: u64, size: u64, flags: u64,
    ) {
        if !is_ours(memory) {
            return real();
        }
        // SAFETY: as above.
        unsafe {
            bind(
                Wanted { at, offset, size },
                |table| table.memory(memory),
                |at, part| driver::cuLogicalEndpointBindMem(endpoint, device, at, part.handle, part.inside, part.len, flags),
                |_, at, len| driver::cuLogicalEndpointUnbind(endpoint, device, at, len),
            )
        }
    }
    [cuMulticastBindAddr] (object: Handle, at: Size, address: CUdeviceptr, size: Size, flags: u64) {
        // SAFETY: as above.
        unsafe {
            bind_address(
                at as u64,
                address,
                size as u64,
                real,
                |at, address, len| driver::cuMulticastBindAddr(object, at as Size, address, len as Size, flags),
                |device, at, len| driver::cuMulticastUnbind(object, device, at as Size, len as Size),
            )
        }
    }
    [cuMulticastBindAddr_v2] (object: Handle, device: CUdevice, at: Size, address: CUdeviceptr, size: Size, flags: u64) {
        // SAFETY: as above.
        unsafe {
            bind_address(
                at as u64,
                address,
                size as u64,
                real,
                |at, address, len| driver::cuMulticastBindAddr_v2(object, device, at as Size, address, len as Size, flags),
                |_, at, len| driver::cuMulticastUnbind(object, device, at as Size, len as Size),
            )
        }
    }
    [cuLogicalEndpointBindAddr] (endpoint: u32, device: CUdevice, at: u64, address: CUdeviceptr, size: u64, flags: u64) {
        // SAFETY: as above.
        unsafe {
            bind_address(
                at,
                address,
                size,
                real,
                |at, address, len| driver::cuLogicalEndpointBindAddr(endpoint, device, at, address, len, flags),
                |_, at, len| driver::cuLogicalEndpointUnbind(endpoint, device, at, len),
            )
        }
    }
    // Sparse arrays have memory that is created for them, which is the driver's; others can be mapped later, from any memory.
    [cuMemMapArrayAsync | cuMemMapArrayAsync_ptsz] (list: *const ArrayMap, n: u32, stream: CUstream) {
        // SAFETY: the program passes that many entries.
        if unsafe { maps_ours(list, n) } { ERROR_NOT_SUPPORTED } else { gated(flavour.stream(stream), ONE, real) }
    }
}
