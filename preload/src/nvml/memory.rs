//! The memory sizes that NVML shows to a program with a CUDA context on the GPU or with a limit, which
//! agree with CUDA's ([`memory_info`]). NVML shows the real sizes to all other programs, such as
//! monitors. It also shows the real sizes of MIG slices.

use super::{Device, Return, SUCCESS, uuid};
use crate::{
    gpu::{
        self, Gpu,
        memory_info::{self, MemoryInfo},
        rules,
    },
    submit,
    sys::errno,
};
use core::{mem::size_of, ptr::NonNull};

/// `nvmlMemory_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`, in which `used` does not include `reserved`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Memory2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const _: () = assert!(size_of::<Memory2>() == 40);

/// `nvmlMemory_v2`
const VERSION_2: u32 = size_of::<Memory2>() as u32 | 2 << 24;

/// Converts NVML's `total` and `free` of a GPU to the sizes that the program sees. Returns `None` if
/// the program sees NVML's sizes.
fn sizes(device: Device, total: u64, free: u64) -> Option<MemoryInfo> {
    let is_used = |gpu: &Gpu| gpu.space().is_some() && gpu.work.has_contexts();
    if !submit::is_active() || !(rules::are_limits_set() || gpu::in_use().any(is_used)) {
        return None;
    }
    errno::preserve(|| {
        let gpu = gpu::find_managed_by_uuid(uuid(device)?)?;
        Some(memory_info::of(gpu, total, || Some(free))).filter(|told| told.total < total || is_used(gpu))
    })
}

/// Changes the sizes, which NVML has written to `memory` if `result` is success.
pub fn change(result: Return, device: Device, memory: *mut Memory) -> Return {
    if let (SUCCESS, Some(place)) = (result, NonNull::new(memory)) {
        // SAFETY: NVML has just written there.
        let Memory { total, free, .. } = unsafe { place.read_unaligned() };
        if let Some(MemoryInfo { total, free }) = sizes(device, total, free) {
            // SAFETY: NVML has just written there.
            unsafe { place.write_unaligned(Memory { total, free, used: total - free }) };
        }
    }
    result
}

/// Does the same as [`change`], for the second version of the structure.
pub fn change_2(result: Return, device: Device, memory: *mut Memory2) -> Return {
    // Other versions may have another layout, so they are left unchanged.
    // SAFETY: NVML has just written there, and every version of the structure begins with its version
    // number.
    let place = NonNull::new(memory).filter(|place| unsafe { place.cast::<u32>().read_unaligned() } == VERSION_2);
    if let (SUCCESS, Some(place)) = (result, place) {
        // SAFETY: NVML has just written there.
        let Memory2 { version, total, reserved, free, .. } = unsafe { place.read_unaligned() };
        if let Some(MemoryInfo { total, free }) = sizes(device, total, free) {
            let reserved = reserved.min(total - free);
            // SAFETY: NVML has just written there.
            unsafe { place.write_unaligned(Memory2 { version, total, reserved, free, used: total - free - reserved }) };
        }
    }
    result
}
