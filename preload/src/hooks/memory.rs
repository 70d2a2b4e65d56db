//! Hooks of allocations, frees, and queries about addresses.

use crate::{
    calls::{address_query, allocate, export, pinned},
    driver::{self, context::is_current_broken, hook::hooks, put, types::*},
    registry::{self, pinned::Kind},
};
use core::ffi::c_void;

type P = *mut c_void;

/// The pitch of `cuMemAllocPitch` is a multiple of this.
const PITCH: usize = 512;

hooks! { real, flavour;
    [cuMemAlloc_v2] (place: *mut CUdeviceptr, size: Size) { allocate::allocate(place, size, real) }
    [cuMemAllocPitch_v2] (place: *mut CUdeviceptr, pitch: *mut Size, width: Size, height: Size, element: u32) {
        let row = width.checked_next_multiple_of(PITCH);
        let size = row.and_then(|row| row.checked_mul(height)).filter(|_| matches!(element, 4 | 8 | 16));
        let (Some(row), Some(size), false) = (row, size, pitch.is_null()) else { return real() };
        // Memory of the driver has the driver's pitch.
        let mut ours = true;
        let result = allocate::allocate(place, size, || { ours = false; real() });
        if ours && result == SUCCESS {
            // SAFETY: the program's own place.
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
            true if is_current_broken() => real(), // broken by the work for which it has waited
            true => SUCCESS,
            false => pinned::free(Kind::Address, address, real),
        }
    }

    [cuMemGetAddressRange_v2] (base: *mut CUdeviceptr, size: *mut Size, address: CUdeviceptr) {
        let allocated = registry::find(address).map(|(_, allocation)| Ok((allocation.base, allocation.size)));
        let (begin, len) = match allocated.or_else(|| address_query::extent(address)).filter(|_| !is_current_broken()) {
            Some(Ok(extent)) => extent,
            Some(Err(error)) => return error,
            None => return real(),
        };
        // SAFETY: the program's own places; the driver allows NULL.
        unsafe {
            put(base, begin);
            put(size, len as usize);
        }
        SUCCESS
    }
    [cuPointerGetAttribute] (data: P, which: i32, address: CUdeviceptr) {
        if which == pointer_attribute::P2P_TOKENS && !data.is_null() {
            return export::announcing(address, real, |_| real());
        }
        let Some((gpu, allocation)) = registry::find(address).filter(|_| !data.is_null()) else {
            return address_query::attribute(data, which, address, real);
        };
        // SAFETY: the program's own place for that attribute.
        unsafe { address_query::write_own(data, which, address, gpu, &allocation) }.unwrap_or_else(real)
    }
    [cuPointerGetAttributes] (n: u32, which: *const i32, data: *mut P, address: CUdeviceptr) {
        // SAFETY: the program's own array of that length.
        let asks_for = |attribute| !which.is_null() && (0..n as usize).any(|i| unsafe { *which.add(i) } == attribute);
        if asks_for(pointer_attribute::P2P_TOKENS) {
            let _ = export::announcing(address, || SUCCESS, |_| SUCCESS);
        }
        let Some((gpu, allocation)) = registry::find(address).filter(|_| !which.is_null() && !data.is_null()) else {
            return address_query::attributes(n, which, data, address, real);
        };
        // First the driver answers, since some attributes are known only to it; it knows nothing about addresses that
        // are not mapped. Like the driver, this returns no error for an attribute that an address does not have.
        let result = real();
        if result != SUCCESS {
            return result;
        }
        for i in 0..n as usize {
            // SAFETY: the program's own arrays of that length.
            unsafe {
                let (which, data) = (*which.add(i), *data.add(i));
                address_query::write_own(data, which, address, gpu, &allocation);
            }
        }
        SUCCESS
    }
    [cuPointerSetAttribute] (value: *const c_void, which: i32, address: CUdeviceptr) {
        // SYNC_MEMOPS, the only attribute that can be set, announces that another device will get access to the memory.
        if value.is_null() || which != pointer_attribute::SYNC_MEMOPS {
            return real();
        }
        export::announcing(address, real, |chunks| {
            for chunk in chunks {
                // SAFETY: the program's own value, for a chunk that is mapped. The driver's answer does not affect how
                // it copies.
                unsafe { driver::cuPointerSetAttribute(value, which, chunk) };
            }
            SUCCESS
        })
    }
    [cuMemGetHandleForAddressRange] (handle: P, address: CUdeviceptr, size: Size, kind: i32, flags: u64) {
        // The handle keeps referring to the chunks that are mapped now.
        match registry::find_own(address) {
            Some((gpu, allocation)) if !handle.is_null() => export::escaping(gpu, allocation.base, |_| real()),
            _ => export::escaping_at(address, size, real),
        }
    }
}
