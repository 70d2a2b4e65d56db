//! The GPUs that NVML shows. If this library and not the program has set `CUDA_VISIBLE_DEVICES`, NVML
//! counts and numbers the same GPUs as CUDA. Lookups by UUID or PCI bus are not changed.

use super::{Device, Function, Return, SUCCESS, uuid};
use crate::{client::placement, sys::errno};
use alloc::format;
use core::{ffi::c_char, mem::transmute, ptr::NonNull};

static BY_UUID: Function = Function::new(c"nvmlDeviceGetHandleByUUID");

/// An index that no GPU has. NVML returns its own error for it.
const NONE: u32 = u32::MAX;

/// Changes the number of GPUs, which NVML has written to `count` if `result` is success.
pub fn count(result: Return, count: *mut u32) -> Return {
    if let (SUCCESS, Some(place), Some(visible)) = (result, NonNull::new(count), placement::visible_gpus()) {
        // SAFETY: NVML has just written there.
        unsafe { place.write_unaligned(visible.len() as u32) };
    }
    result
}

/// Looks up the GPU that has this index for CUDA.
pub fn by_index(real: impl Fn(u32, *mut Device) -> Return, index: u32, device: *mut Device) -> Return {
    type ByUuid = unsafe extern "C" fn(*const c_char, *mut Device) -> Return;
    let visible = placement::visible_gpus().zip(BY_UUID.address());
    let Some((mut visible, by_uuid)) = visible else { return real(index, device) };
    let Some(uuid) = visible.nth(index as usize) else { return real(NONE, device) };
    let name = errno::preserve(|| format!("GPU-{uuid}\0"));
    // SAFETY: NVML's export of this name has this signature. `name` ends with NUL, and `device` is the
    // program's own pointer.
    unsafe { transmute::<usize, ByUuid>(by_uuid)(name.as_ptr().cast(), device) }
}

/// Changes the index of a GPU, which NVML has written to `index` if `result` is success.
pub fn index(result: Return, device: Device, index: *mut u32) -> Return {
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
