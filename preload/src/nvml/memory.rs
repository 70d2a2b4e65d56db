//! The memory sizes that NVML shows to a program with a CUDA context on the GPU or with a limit, which
//! agree with CUDA's ([`memory_info`]). NVML shows the real sizes to all other programs, such as
//! monitors. It also shows the real sizes of MIG slices.

use super::{Device, ERROR_LIBRARY_NOT_FOUND, Function, Return, SUCCESS, uuid};
use crate::{
    gpu::{
        self, Gpu,
        memory_info::{self, MemoryInfo},
        rules,
    },
    submit,
    sys::{errno, pad::pad_and_jump},
};
use core::{
    mem::{size_of, transmute},
    ptr::NonNull,
};

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

pub static MEMORY: Function = Function::new(c"nvmlDeviceGetMemoryInfo");
pub static MEMORY_2: Function = Function::new(c"nvmlDeviceGetMemoryInfo_v2");
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

/// The hook of `nvmlDeviceGetMemoryInfo`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) -> Return {
    pad_and_jump!(on_nvml_device_get_memory_info);
}

unsafe extern "C" fn on_nvml_device_get_memory_info(device: Device, memory: *mut Memory) -> Return {
    type Real = unsafe extern "C" fn(Device, *mut Memory) -> Return;
    let Some(real) = MEMORY.address() else { return ERROR_LIBRARY_NOT_FOUND };
    // SAFETY: NVML's export of this name has this signature, and the arguments are the program's own.
    let result = unsafe { transmute::<usize, Real>(real)(device, memory) };
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

/// The hook of `nvmlDeviceGetMemoryInfo_v2`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut Memory2) -> Return {
    pad_and_jump!(on_nvml_device_get_memory_info_v2);
}

unsafe extern "C" fn on_nvml_device_get_memory_info_v2(device: Device, memory: *mut Memory2) -> Return {
    type Real = unsafe extern "C" fn(Device, *mut Memory2) -> Return;
    let Some(real) = MEMORY_2.address() else { return ERROR_LIBRARY_NOT_FOUND };
    // SAFETY: NVML's export of this name has this signature, and the arguments are the program's own.
    let result = unsafe { transmute::<usize, Real>(real)(device, memory) };
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
