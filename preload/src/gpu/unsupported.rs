//! GPUs that this library leaves alone: they are shared in another way, or not at all, or the engines cannot move their
//! memory. Checked once per GPU, before the program's first context there.

use crate::{
    driver::{self, types::*},
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

/// The reason why this GPU is not supported; `None` if it is.
pub fn reason(gpu: CUdevice) -> Option<&'static str> {
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: `value` outlives the call.
        (unsafe { driver::cuDeviceGetAttribute(&mut value, which, gpu) } == SUCCESS).then_some(value)
    };
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

/// For drivers before 545, which lack the attribute: whether the MPS control daemon is listening. If it is, the driver
/// becomes its client when it is initialised.
fn has_mps_daemon() -> bool {
    let folder = c::variable(c"CUDA_MPS_PIPE_DIRECTORY").filter(|folder| !folder.is_empty());
    let path = [folder.unwrap_or(b"/tmp/nvidia-mps"), b"/control"].concat();
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    // The daemon's socket is of another type, so it is not disturbed. Without a daemon the connection is refused.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    matches!(connect(&socket, &address), Ok(()) | Err(Errno::PROTOTYPE | Errno::AGAIN))
}

fn exists(path: &CStr) -> bool {
    rustix::fs::access(path, rustix::fs::Access::EXISTS).is_ok()
}
