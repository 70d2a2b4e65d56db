//! Hooks of calls that share this library's memory with other processes by IPC handles
//! ([`crate::registry::shared`]). The calls never wait for the GPU lock, but some wait for memory.
//!
//! IPC handles of the driver's own memory, and IPC events, are left to the driver.

use crate::{
    calls::{access::with_memory_on, allocate},
    driver::{context::is_current_broken, put_result, types::*},
    gpu,
    registry::{
        self,
        shared::{self, IpcHandle},
    },
};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only valid flags.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// `CUipcMemHandle`, passed by value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MemHandle(IpcHandle);

fn export(place: *mut MemHandle, address: CUdeviceptr, real: impl Fn() -> CUresult) -> CUresult {
    let own = registry::find_own(address).filter(|_| !place.is_null() && !is_current_broken());
    let Some((gpu, _)) = own else { return real() };
    // Only memory on the GPU can be exported.
    with_memory_on(gpu, || match shared::export(gpu, address) {
        Some(handle) => {
            // SAFETY: `place` is the program's own pointer and not NULL.
            unsafe { place.write_unaligned(MemHandle(handle)) };
            SUCCESS
        }
        None => real(),
    })
}

fn open(place: *mut CUdeviceptr, handle: &MemHandle, flags: u32, real: impl FnOnce() -> CUresult) -> CUresult {
    let Some(gpu) = gpu::current().filter(|_| shared::is_ours(&handle.0)) else { return real() };
    if place.is_null() || flags != LAZY_ENABLE_PEER_ACCESS {
        return ERROR_INVALID_VALUE;
    }
    let Some(context) = allocate::usable_context() else { return real() };
    // SAFETY: `place` is the program's own pointer and not NULL.
    unsafe { put_result(place, shared::open(&handle.0, gpu, context)) }
}

hooks! { real, flavour;
    [cuIpcGetMemHandle] (handle: *mut MemHandle, address: CUdeviceptr) { export(handle, address, real) }
    [cuIpcOpenMemHandle | cuIpcOpenMemHandle_v2] (place: *mut CUdeviceptr, handle: MemHandle, flags: u32) {
        open(place, &handle, flags, real)
    }
    [cuIpcCloseMemHandle] (address: CUdeviceptr) {
        if shared::close(address).is_some() { SUCCESS } else { real() }
    }
}
