//! Queries without side effects, which never wait for running work. [`free_memory`] needs a current
//! context.

use super::{types::*, *};

/// Returns the value that a call writes to its place, if the call succeeds.
///
/// # Errors
/// Returns errors of the call.
pub fn value<T: Default>(call: impl FnOnce(&mut T) -> CUresult) -> Result<T, CUresult> {
    let mut value = T::default();
    check(call(&mut value)).map(|()| value)
}

/// Returns the handle that a call writes to its place, if the call succeeds.
///
/// # Errors
/// Returns errors of the call.
#[inline]
pub fn handle(call: impl FnOnce(&mut *mut c_void) -> CUresult) -> Result<*mut c_void, CUresult> {
    let mut handle = core::ptr::null_mut();
    check(call(&mut handle)).map(|()| handle)
}

/// The number of GPUs that the process sees.
pub fn device_count() -> i32 {
    // SAFETY: the place is valid.
    value(|count| unsafe { cuDeviceGetCount(count) }).unwrap_or(0)
}

pub fn device_attribute(device: CUdevice, which: i32) -> Option<i32> {
    // SAFETY: the place is valid.
    value(|value| unsafe { cuDeviceGetAttribute(value, which, device) }).ok()
}

/// Whether work on `from` can access memory of `to`. Returns `None` if the driver does not know one of
/// the GPUs.
pub fn can_access_peer(from: CUdevice, to: CUdevice) -> Option<bool> {
    // SAFETY: the place is valid.
    value(|can| unsafe { cuDeviceCanAccessPeer(can, from, to) }).ok().map(|can: i32| can != 0)
}

/// Returns the free bytes of the current context's GPU.
pub fn free_memory() -> Option<u64> {
    let mut total = 0;
    // SAFETY: the places are valid.
    value(|free| unsafe { cuMemGetInfo_v2(free, &mut total) }).ok().map(|free: Size| free as u64)
}

/// Whether work submitted to this stream is captured into a graph instead of running on the GPU. The
/// query is always allowed.
///
/// # Errors
/// Returns errors of `cuStreamIsCapturing`, for example for the legacy stream during a capture.
pub fn is_capturing(stream: CUstream) -> Result<bool, CUresult> {
    // SAFETY: the place is valid.
    let status = value(|status| unsafe { cuStreamIsCapturing(stream, status) })?;
    Ok(status != STREAM_CAPTURE_STATUS_NONE)
}
