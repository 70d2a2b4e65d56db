//! GPUs that this library leaves alone: they are shared in another way, or not at all, or the engines cannot move their memory.
//! Checked once for each GPU, before the program's first context there.

use crate::driver::{self, types::*};
use core::ffi::CStr;

const DEVICE_ATTRIBUTE_INTEGRATED: i32 = 18;
const DEVICE_ATTRIBUTE_COMPUTE_MODE: i32 = 20;
const DEVICE_ATTRIBUTE_MPS_ENABLED: i32 = 133;
const COMPUTE_MODE_PROHIBITED: i32 = 2;
const COMPUTE_MODE_EXCLUSIVE_PROCESS: i32 = 3;

/// The device through which CUDA works under the Windows Subsystem for Linux.
const WSL: &CStr = c"/dev/dxg";

/// Why this GPU is not supported; `None` if it is.
pub fn reason(gpu: CUdevice) -> Option<&'static str> {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: a valid place. What a driver does not know is 0.
        if unsafe { driver::cuDeviceGetAttribute(&mut value, which, gpu) } == SUCCESS { value } else { 0 }
    };
    let mps = attribute(DEVICE_ATTRIBUTE_MPS_ENABLED) != 0;
    let integrated = attribute(DEVICE_ATTRIBUTE_INTEGRATED) != 0;
    match attribute(DEVICE_ATTRIBUTE_COMPUTE_MODE) {
        _ if integrated => Some("it is integrated: its memory is the host's"),
        _ if mps => Some("it is shared by MPS"),
        COMPUTE_MODE_EXCLUSIVE_PROCESS => Some("its compute mode is exclusive-process"),
        COMPUTE_MODE_PROHIBITED => Some("its compute mode is prohibited"),
        _ if exists(WSL) => Some("this is WSL"),
        _ => None,
    }
}

fn exists(path: &CStr) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXISTS).is_ok()
}
