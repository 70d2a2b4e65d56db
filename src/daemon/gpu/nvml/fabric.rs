//! The fabric of a GPU: NVLink connections to GPUs of other hosts.

use std::ffi::c_void;

use libloading::os::unix::{Library, RTLD_LAZY};
use nvml_wrapper::Device;

/// `nvmlGpuFabricInfo_v2_t`
#[repr(C)]
#[derive(Debug, Default)]
struct FabricInfo {
    version: u32,
    cluster: [u8; 16],
    status: u32,
    clique: u32,
    state: u8,
    health: u32,
}

/// The version of [`FabricInfo`], as NVML expects it.
const VERSION: u32 = size_of::<FabricInfo>() as u32 | 2 << 24;
/// `NVML_GPU_FABRIC_STATE_COMPLETED`
const COMPLETED: u8 = 3;
const SUCCESS: u32 = 0;

type Ask = unsafe extern "C" fn(*mut c_void, *mut FabricInfo) -> u32;

/// Whether a GPU is a member of a fabric that connects several hosts. Such a fabric has a cluster UUID.
/// The links between the GPUs of one host have none. `false` if NVML does not know the fabric, as before
/// driver 545.
///
/// The crate that wraps NVML lacks this call. NVML is open, so the loader returns the same library.
pub fn has_fabric(device: &Device<'_>) -> bool {
    // SAFETY: the library is loaded already, so no initialization code runs.
    let Ok(nvml) = (unsafe { Library::open(Some("libnvidia-ml.so.1"), RTLD_LAZY) }) else { return false };
    // SAFETY: NVML's export of this name has this type.
    let Ok(ask) = (unsafe { nvml.get::<Ask>(b"nvmlDeviceGetGpuFabricInfoV\0") }) else { return false };
    let mut info = FabricInfo { version: VERSION, ..FabricInfo::default() };
    // SAFETY: `device` is a handle of the open NVML, and `info` is a structure of the stated version.
    let result = unsafe { ask(device.handle().cast(), &raw mut info) };
    result == SUCCESS && info.status == SUCCESS && info.state == COMPLETED && info.cluster != [0; 16]
}

const _: () = assert!(size_of::<FabricInfo>() == 36);
