//! Hooks of allocations, frees, and queries about addresses.

use crate::{
    calls::{address_query, allocate, driver_memory, export},
    driver::{self, context::is_current_broken, put, types::*},
    registry::{self, driver_memory::Kind},
};
use core::ffi::c_void;

type P = *mut c_void;

/// The granularity of the pitch of `cuMemAllocPitch`, in bytes.
const PITCH: usize = 512;

hooks! { real, flavour;
    [cuMemAlloc_v2] (place: *mut CUdeviceptr, size: Size) { allocate::allocate(place, size, real) }
    [cuMemAllocPitch_v2] (place: *mut CUdeviceptr, pitch: *mut Size, width: Size, height: Size, element: u32) {
        let row = width.checked_next_multiple_of(PITCH);
        let size = row.and_then(|row| row.checked_mul(height)).filter(|_| matches!(element, 4 | 8 | 16));
        let (Some(row), Some(size), false) = (row, size, pitch.is_null()) else { return real() };
        // If the driver serves the allocation, it also sets the pitch.
        let mut ours = true;
        let result = allocate::allocate(place, size, || { ours = false; real() });
        if ours && result == SUCCESS {
            // SAFETY: `pitch` is the program's own pointer.
            unsafe { put(pitch, row) };
        }
        result
    }
    [cuMemAllocManaged] (place: *mut CUdeviceptr, size: Size, flags: u32) { allocate::allocate_managed(place, size, flags, real) }
    [cuMemFree_v2] (address: CUdeviceptr) {
        if is_current_broken() {
            return real();
        }
        if let Some(result) = allocate::free_managed(address) {
            return result;
        }
        match allocate::free(address) {
            true if is_current_broken() => real(), // the awaited work has broken the context
            true => SUCCESS,
            false => driver_memory::free(Kind::Address, address, real),
        }
    }

    [cuMemGetAddressRange_v2] (base: *mut CUdeviceptr, size: *mut Size, address: CUdeviceptr) {
        let allocated = registry::find(address).map(|(_, allocation)| Ok((allocation.base, allocation.size)));
        let (begin, len) = match allocated.or_else(|| address_query::extent(address)).filter(|_| !is_current_broken()) {
            Some(Ok(extent)) => extent,
            Some(Err(error)) => return error,
            None => return real(),
        };
        // SAFETY: the pointers are the program's own. The driver allows NULL.
        unsafe {
            put(base, begin);
            put(size, len as usize);
        }
        SUCCESS
    }
    [cuPointerGetAttribute] (data: P, which: i32, address: CUdeviceptr) {
        if which == pointer_attribute::P2P_TOKENS && !data.is_null() {
            return export::escape_around(address, real);
        }
        let Some((gpu, allocation)) = registry::find(address).filter(|_| !data.is_null()) else {
            return address_query::attribute(data, which, address, real);
        };
        // SAFETY: `data` is the program's own pointer to room for that attribute.
        unsafe { address_query::write_own(data, which, address, gpu, &allocation) }.unwrap_or_else(real)
    }
    [cuPointerGetAttributes] (n: u32, which: *const i32, data: *mut P, address: CUdeviceptr) {
        // SAFETY: `which` is the program's own array of `n` entries.
        let asks_for = |attribute| !which.is_null() && (0..n as usize).any(|i| unsafe { *which.add(i) } == attribute);
        if asks_for(pointer_attribute::P2P_TOKENS) {
            let _ = export::escape_around(address, || SUCCESS);
        }
        address_query::attributes(n, which, data, address, real)
    }
    [cuPointerSetAttribute] (value: *const c_void, which: i32, address: CUdeviceptr) {
        // SYNC_MEMOPS is the only attribute that can be set. It announces that another device will access the
        // memory, or that none does any more.
        if value.is_null() || which != pointer_attribute::SYNC_MEMOPS {
            return real();
        }
        // SAFETY: the driver reads a flag of 4 bytes there.
        let begins = unsafe { value.cast::<u32>().read_unaligned() } != 0;
        export::announce_around(address, begins, real, |chunks| {
            for chunk in chunks {
                // SAFETY: `value` is the program's own, and the chunk is mapped. The result is ignored, because it
                // does not affect how the driver copies.
                unsafe { driver::cuPointerSetAttribute(value, which, chunk) };
            }
            SUCCESS
        })
    }
    [cuMemGetHandleForAddressRange] (handle: P, address: CUdeviceptr, size: Size, kind: i32, flags: u64) {
        // The handle permanently refers to the chunks that are mapped now.
        match registry::find_own(address) {
            Some((gpu, allocation)) if !handle.is_null() => export::escape(gpu, allocation.base, real),
            _ => export::escape_at(address, size, real),
        }
    }
}
