//! The driver, as far as limits go: NVML's function that sets them, which the crate for NVML does not know, and what stands
//! for it in tests.

use std::ffi::{CString, c_char, c_uint, c_ulonglong, c_void};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use libloading::Library;
use nvml_wrapper::Device;
use nvml_wrapper::error::{NvmlError, nvml_try};

use crate::scheduler::GpuId;

const LIBRARY: &str = "libnvidia-ml.so.1";
const SYMBOL: &[u8] = b"nvmlDeviceSetMemoryLimits_v1\0";

/// The driver's part.
pub trait Driver {
    /// Sets the limit of a control group, or takes it away.
    fn set(&self, gpu: GpuId, cgroup: &Path, bytes: Option<u64>) -> Result<(), Refusal>;
}

/// Why there is no limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// The driver has no limits.
    Unknown,
    /// It lets us set none.
    Forbidden,
    /// The kernel's own accounting leaves this control group out.
    Uncounted,
    /// It has none for slices.
    Slice,
    /// The GPU is not there now.
    NoGpu,
    Other(String),
}

impl From<NvmlError> for Refusal {
    fn from(e: NvmlError) -> Self {
        match e {
            NvmlError::FunctionNotFound | NvmlError::NotSupported => Self::Unknown,
            NvmlError::NoPermission => Self::Forbidden,
            NvmlError::NotFound => Self::Uncounted,
            NvmlError::GpuLost => Self::NoGpu,
            other => Self::Other(other.to_string()),
        }
    }
}

/// `nvmlSetMemoryLimits_v1_t`
#[repr(C)]
struct SetMemoryLimits {
    /// Whole path of the control group's directory.
    name_space: *const c_char,
    soft_limit: c_ulonglong,
    hard_limit: c_ulonglong,
}

/// No memory is reserved for the control group: NVML would show that much less on the GPU.
const NO_SOFT_LIMIT: c_ulonglong = 0;
/// `NVML_DEVICE_MEMORY_LIMIT_MAX`: there is no limit.
const NO_HARD_LIMIT: c_ulonglong = c_ulonglong::MAX;

type Function = unsafe extern "C" fn(device: *mut c_void, limits: *mut SetMemoryLimits) -> c_uint;

/// NVML's function.
#[derive(Debug)]
pub struct Call {
    function: Function,
    /// Keeps the function where it is.
    _library: Library,
}

impl Call {
    /// By its name, in the library that is loaded already. `None`: this driver has no such limits.
    pub fn find() -> Option<Self> {
        // SAFETY: it is loaded already, by the crate for NVML, so that nothing of it runs now.
        let library = unsafe { Library::new(LIBRARY) }.ok()?;
        // SAFETY: NVML declares it so, for this name for ever.
        let function = *unsafe { library.get::<Function>(SYMBOL) }.ok()?;
        Some(Self { function, _library: library })
    }

    /// Sets the limit of a control group, or takes it away.
    pub fn set(&self, device: &Device<'_>, cgroup: &Path, bytes: Option<u64>) -> Result<(), NvmlError> {
        let path = CString::new(cgroup.as_os_str().as_bytes())?;
        let hard_limit = bytes.unwrap_or(NO_HARD_LIMIT);
        let mut limits = SetMemoryLimits { name_space: path.as_ptr(), soft_limit: NO_SOFT_LIMIT, hard_limit };
        // SAFETY: the device's handle lives as long as NVML, which this borrows, and the text as long as the call.
        nvml_try(unsafe { (self.function)(device.handle().cast(), &mut limits) })
    }
}
