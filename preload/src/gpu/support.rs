//! GPUs that this library does not manage: another mechanism shares them, sharing is impossible, or no
//! engine can move their memory. Checked once per GPU, before the program's first context there.

use crate::{
    driver::{query, types::*},
    sys::c,
};
use core::ffi::CStr;
use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with},
};

const DEVICE_ATTRIBUTE_INTEGRATED: i32 = 18;
const DEVICE_ATTRIBUTE_COMPUTE_MODE: i32 = 20;
const DEVICE_ATTRIBUTE_MPS_ENABLED: i32 = 133;
const COMPUTE_MODE_PROHIBITED: i32 = 2;
const COMPUTE_MODE_EXCLUSIVE_PROCESS: i32 = 3;

/// The device file of CUDA under the Windows Subsystem for Linux.
const WSL: &CStr = c"/dev/dxg";

/// Returns the reason why this GPU is not supported, or `None` if it is supported.
pub fn reason(gpu: CUdevice) -> Option<&'static str> {
    let attribute = |which| query::device_attribute(gpu, which);
    let mps = attribute(DEVICE_ATTRIBUTE_MPS_ENABLED).map_or_else(has_mps_daemon, |enabled| enabled != 0);
    let integrated = attribute(DEVICE_ATTRIBUTE_INTEGRATED).is_some_and(|integrated| integrated != 0);
    match attribute(DEVICE_ATTRIBUTE_COMPUTE_MODE).unwrap_or(0) {
        _ if integrated => Some("it is integrated and uses host memory"),
        _ if mps => Some("it is shared by MPS"),
        COMPUTE_MODE_EXCLUSIVE_PROCESS => Some("its compute mode is exclusive-process"),
        COMPUTE_MODE_PROHIBITED => Some("its compute mode is prohibited"),
        _ if exists(WSL) => Some("this is WSL"),
        _ => None,
    }
}

/// Whether the MPS control daemon is listening, for drivers before 545, which lack the attribute. If
/// so, the driver becomes a client of the daemon during its initialization.
fn has_mps_daemon() -> bool {
    let folder = c::variable(c"CUDA_MPS_PIPE_DIRECTORY").filter(|folder| !folder.is_empty());
    let path = [folder.unwrap_or(b"/tmp/nvidia-mps"), b"/control"].concat();
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    // The daemon's socket has another type, so the connection attempt does not disturb the daemon. Without
    // a daemon, the connection is refused.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    matches!(connect(&socket, &address), Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN))
}

fn exists(path: &CStr) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXISTS).is_ok()
}
