//! Hooks of queries about the size of a GPU's memory. All of them give the same answer
//! ([`crate::gpu::memory_info`]).

use crate::{
    driver::{
        context::{current_context, is_current_broken},
        put, query,
        types::*,
    },
    gpu::{self, memory_info, rules},
};

/// Lowers a size that the driver has reported for a GPU to the program's limit on that GPU.
fn total(result: CUresult, device: CUdevice, bound: impl FnOnce(u64)) -> CUresult {
    if result == SUCCESS
        && rules::are_limits_set()
        && let Some(gpu) = gpu::find_managed(device)
    {
        bound(gpu.memory_limit());
    }
    result
}

hooks! { real, flavour;
    [cuDeviceTotalMem_v2] (bytes: *mut Size, device: CUdevice) {
        total(real(), device, |bound| {
            // SAFETY: the driver has just written `bytes`.
            unsafe { bytes.write((bytes.read() as u64).min(bound) as Size) }
        })
    }
    [cuDeviceTotalMem] (bytes: *mut u32, device: CUdevice) {
        total(real(), device, |bound| {
            // SAFETY: the driver has just written `bytes`, a size capped to 32 bits.
            unsafe { bytes.write(u64::from(bytes.read()).min(bound) as u32) }
        })
    }
    [cuMemGetInfo_v2] (free: *mut Size, total: *mut Size) {
        let Some(gpu) = gpu::current().filter(|gpu| gpu.space().is_some()) else { return real() };
        if current_context().is_ok_and(|context| context.is_null()) || is_current_broken() {
            return real();
        }
        let told = memory_info::of(gpu, gpu.total(), query::free_memory);
        // SAFETY: the pointers are the program's own. The driver allows NULL.
        unsafe {
            put(free, told.free as Size);
            put(total, told.total as Size);
        }
        SUCCESS
    }
}
