//! Hooks of queries about a GPU.

use crate::{
    connection,
    driver::types::*,
    gpu::{self, Gpu, rules},
};
use nvshare_wire::scheduler::FABRIC_HANDLES;

/// The answer of the driver to an attribute, without FABRIC handles of memory if the program gets none.
///
/// Only the driver of one host knows a memory's file descriptor, so memory behind a descriptor can move.
/// A FABRIC handle is valid on other hosts too, so its memory would have to stay. Programs such as
/// PyTorch prefer FABRIC handles wherever the driver supports them, also on hosts without a fabric to
/// other hosts. The scheduler has asked NVML whether such a fabric exists; without a scheduler, the
/// answer is the driver's.
fn without_fabric(attribute: i32, device: CUdevice, value: i32) -> i32 {
    let without = match attribute {
        DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED => 0,
        DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => value & !MEM_HANDLE_TYPE_FABRIC,
        _ => return value,
    };
    let uuid = || gpu::find_managed(device).and_then(Gpu::uuid);
    let is_withheld = value != without
        && connection::is_connected()
        && uuid().is_some_and(|uuid| !rules::permits(uuid, FABRIC_HANDLES));
    if is_withheld { without } else { value }
}

hooks! { real, flavour;
    [cuDeviceGetAttribute] (value: *mut i32, attribute: i32, device: CUdevice) {
        let result = real();
        // SAFETY: the driver has just written `value`, because it has succeeded.
        if let (SUCCESS, Some(value)) = (result, unsafe { value.as_mut() }) {
            *value = without_fabric(attribute, device, *value);
        }
        result
    }
}
