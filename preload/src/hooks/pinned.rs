//! Allocations that the driver makes and no engine can move: allowed within the limit, and counted
//! ([`crate::memory::pinned`]).

use crate::{
    capture, client,
    cuda::*,
    driver,
    gpu::{self, Gpu},
    hooks::{hooks, memory},
    memory::pinned::{self, Kind},
    settings,
};
use core::ffi::c_void;

type P = *mut c_void;

/// An allocation of so many bytes, whose name the driver writes to `place`.
fn allocate(
    gpu: Option<&'static Gpu>,
    kind: Kind,
    place: *const u64,
    size: u64,
    real: impl FnOnce() -> CUresult,
) -> CUresult {
    if !client::is_on() {
        return real();
    }
    if !pinned::fits(gpu, size) && !settings::get().oversubscribe {
        return ERROR_OUT_OF_MEMORY;
    }
    let result = real();
    // SAFETY: the driver has just written there.
    if let (SUCCESS, Some(name)) = (result, unsafe { place.as_ref() }) {
        crate::errno::preserved(|| pinned::add(gpu, kind, *name, size));
    }
    result
}

/// The same in stream order; what is captured is the graph's.
fn allocate_async(place: *const u64, size: Size, stream: CUstream, real: impl FnOnce() -> CUresult) -> CUresult {
    if capture::any() && capture::is_capturing(stream) {
        return real();
    }
    allocate(gpu::current(), Kind::Address, place, size as u64, real)
}

type Requirements = unsafe fn(*mut [u64; 4], CUarray, CUdevice) -> CUresult;

/// An array, whose size only the driver knows, and only once it is made.
fn make_array(place: *const CUarray, requirements: Requirements, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    // SAFETY: the driver has just written there.
    if let (true, SUCCESS, Some(array), Some(gpu)) =
        (client::is_on(), result, unsafe { place.as_ref() }, gpu::current())
    {
        let mut needs = [0; 4];
        // SAFETY: a valid place of that size.
        if unsafe { requirements(&mut needs, *array, gpu.index as CUdevice) } == SUCCESS {
            crate::errno::preserved(|| pinned::add(Some(gpu), Kind::Array, *array as u64, needs[0]));
        }
    }
    result
}

/// A call that gives up what the name stands for.
pub(super) fn free(kind: Kind, name: u64, real: impl FnOnce() -> CUresult) -> CUresult {
    let result = real();
    if result == SUCCESS && client::is_on() {
        crate::errno::preserved(|| pinned::remove(kind, name));
    }
    result
}

hooks! { real, flavour;
    [cuMemCreate] (handle: *mut Handle, size: Size, prop: *const AllocationProp, flags: u64) {
        allocate(pinned::gpu_of(prop), Kind::Chunk, handle, size as u64, real)
    }
    [cuMemRelease] (handle: Handle) { free(Kind::Chunk, handle, real) }
    [cuMemRetainAllocationHandle] (handle: *mut Handle, address: P) {
        let result = real();
        // SAFETY: the driver has just written there.
        if let (true, SUCCESS, Some(handle)) = (client::is_on(), result, unsafe { handle.as_ref() }) {
            pinned::retain(*handle);
        }
        result
    }
    [cuMemMap] (address: CUdeviceptr, size: Size, offset: Size, handle: Handle, flags: u64) {
        let result = real();
        if result == SUCCESS && client::is_on() {
            pinned::map(address, handle);
        }
        result
    }
    [cuMemUnmap] (address: CUdeviceptr, size: Size) {
        let result = real();
        if result == SUCCESS && client::is_on() {
            crate::errno::preserved(|| pinned::unmap(address, size));
        }
        result
    }

    [cuArrayCreate_v2 | cuArray3DCreate_v2] (array: *mut CUarray, descriptor: P) {
        make_array(array, driver::cuArrayGetMemoryRequirements, real)
    }
    [cuMipmappedArrayCreate] (array: *mut CUarray, descriptor: P, levels: u32) {
        make_array(array, driver::cuMipmappedArrayGetMemoryRequirements, real)
    }
    [cuArrayDestroy | cuMipmappedArrayDestroy] (array: CUarray) { free(Kind::Array, array as u64, real) }

    [cuMemAllocManaged] (place: *mut CUdeviceptr, size: Size, flags: u32) {
        allocate(gpu::current(), Kind::Address, place, size as u64, real)
    }
    [cuMemAllocAsync | cuMemAllocAsync_ptsz] (place: *mut CUdeviceptr, size: Size, stream: CUstream) {
        allocate_async(place, size, flavour.stream(stream), real)
    }
    [cuMemAllocFromPoolAsync | cuMemAllocFromPoolAsync_ptsz] (place: *mut CUdeviceptr, size: Size, pool: P, stream: CUstream) {
        allocate_async(place, size, flavour.stream(stream), real)
    }
    [cuMemFreeAsync | cuMemFreeAsync_ptsz] (address: CUdeviceptr, stream: CUstream) {
        if memory::free(address) { SUCCESS } else { free(Kind::Address, address, real) }
    }
}
