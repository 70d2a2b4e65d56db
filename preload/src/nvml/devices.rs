//! The GPUs that NVML shows. If this library and not the program has set `CUDA_VISIBLE_DEVICES`, NVML
//! counts and numbers the same GPUs as CUDA. Lookups by UUID or PCI bus are not changed.

use super::{Device, ERROR_LIBRARY_NOT_FOUND, Function, Return, SUCCESS, uuid};
use crate::{
    client::placement,
    sys::{errno, pad::pad_and_jump},
};
use alloc::format;
use core::{ffi::c_char, mem::transmute, ptr::NonNull};

pub static COUNT: Function = Function::new(c"nvmlDeviceGetCount");
pub static COUNT_2: Function = Function::new(c"nvmlDeviceGetCount_v2");
pub static BY_INDEX: Function = Function::new(c"nvmlDeviceGetHandleByIndex");
pub static BY_INDEX_2: Function = Function::new(c"nvmlDeviceGetHandleByIndex_v2");
pub static INDEX: Function = Function::new(c"nvmlDeviceGetIndex");
static BY_UUID: Function = Function::new(c"nvmlDeviceGetHandleByUUID");

/// An index that no GPU has. NVML returns its own error for it.
const NONE: u32 = u32::MAX;

fn count(real: &Function, count: *mut u32) -> Return {
    type Real = unsafe extern "C" fn(*mut u32) -> Return;
    let Some(real) = real.address() else { return ERROR_LIBRARY_NOT_FOUND };
    // SAFETY: NVML's export of this name has this signature, and the argument is the program's own.
    let result = unsafe { transmute::<usize, Real>(real)(count) };
    if let (SUCCESS, Some(place), Some(visible)) = (result, NonNull::new(count), placement::visible_gpus()) {
        // SAFETY: NVML has just written there.
        unsafe { place.write_unaligned(visible.len() as u32) };
    }
    result
}

fn by_index(real: &Function, index: u32, device: *mut Device) -> Return {
    type Real = unsafe extern "C" fn(u32, *mut Device) -> Return;
    type ByUuid = unsafe extern "C" fn(*const c_char, *mut Device) -> Return;
    let Some(real) = real.address() else { return ERROR_LIBRARY_NOT_FOUND };
    let visible = placement::visible_gpus().zip(BY_UUID.address());
    let Some((mut visible, by_uuid)) = visible else {
        // SAFETY: NVML's export of this name has this signature, and the arguments are the program's own.
        return unsafe { transmute::<usize, Real>(real)(index, device) };
    };
    match visible.nth(index as usize) {
        Some(uuid) => {
            let name = errno::preserve(|| format!("GPU-{uuid}\0"));
            // SAFETY: NVML's export of this name has this signature. `name` ends with NUL, and `device` is the
            // program's own pointer.
            unsafe { transmute::<usize, ByUuid>(by_uuid)(name.as_ptr().cast(), device) }
        }
        // SAFETY: NVML's export of this name has this signature, and `device` is the program's own.
        None => unsafe { transmute::<usize, Real>(real)(NONE, device) },
    }
}

/// The hook of `nvmlDeviceGetCount`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetCount(device_count: *mut u32) -> Return {
    pad_and_jump!(on_nvml_device_get_count);
}

unsafe extern "C" fn on_nvml_device_get_count(device_count: *mut u32) -> Return {
    count(&COUNT, device_count)
}

/// The hook of `nvmlDeviceGetCount_v2`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(device_count: *mut u32) -> Return {
    pad_and_jump!(on_nvml_device_get_count_v2);
}

unsafe extern "C" fn on_nvml_device_get_count_v2(device_count: *mut u32) -> Return {
    count(&COUNT_2, device_count)
}

/// The hook of `nvmlDeviceGetHandleByIndex`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex(index: u32, device: *mut Device) -> Return {
    pad_and_jump!(on_nvml_device_get_handle_by_index);
}

unsafe extern "C" fn on_nvml_device_get_handle_by_index(index: u32, device: *mut Device) -> Return {
    by_index(&BY_INDEX, index, device)
}

/// The hook of `nvmlDeviceGetHandleByIndex_v2`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Device) -> Return {
    pad_and_jump!(on_nvml_device_get_handle_by_index_v2);
}

unsafe extern "C" fn on_nvml_device_get_handle_by_index_v2(index: u32, device: *mut Device) -> Return {
    by_index(&BY_INDEX_2, index, device)
}

/// The hook of `nvmlDeviceGetIndex`.
///
/// # Safety
/// NVML's requirements.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn nvmlDeviceGetIndex(device: Device, index: *mut u32) -> Return {
    pad_and_jump!(on_nvml_device_get_index);
}

unsafe extern "C" fn on_nvml_device_get_index(device: Device, index: *mut u32) -> Return {
    type Real = unsafe extern "C" fn(Device, *mut u32) -> Return;
    let Some(real) = INDEX.address() else { return ERROR_LIBRARY_NOT_FOUND };
    // SAFETY: NVML's export of this name has this signature, and the arguments are the program's own.
    let result = unsafe { transmute::<usize, Real>(real)(device, index) };
    if let (SUCCESS, Some(place), Some(mut visible)) = (result, NonNull::new(index), placement::visible_gpus()) {
        let number = errno::preserve(|| {
            let uuid = uuid(device)?;
            visible.position(|known| known == uuid)
        });
        // SAFETY: NVML has just written there.
        number.into_iter().for_each(|number| unsafe { place.write_unaligned(number as u32) });
    }
    result
}
