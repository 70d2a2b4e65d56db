//! Hooks of calls that share this library's memory with other processes by IPC handles
//! ([`crate::registry::shared`]). The calls never wait for the GPU lock, but some wait for memory.
//!
//! IPC handles of the driver's own memory, and IPC events, are left to the driver.

use crate::{
    calls::allocate,
    driver::{context::is_current_broken, put_result, types::*},
    gpu,
    memory::space::NotExported,
    registry::{
        self,
        shared::{self, IpcHandle},
    },
    submit::{self, closed},
    sys::time::{self, Instant},
};
use core::time::Duration;

/// The longest wait until exported memory is restored to the GPU: a few turns of other clients. A
/// launch would wait equally long.
const RETURN_TIMEOUT: Duration = Duration::from_secs(120);
/// The interval between checks whether the memory is on the GPU.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only valid flags.
const LAZY_ENABLE_PEER_ACCESS: u32 = 1;

/// `CUipcMemHandle`, passed by value.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct MemHandle(IpcHandle);

fn export(place: *mut MemHandle, address: CUdeviceptr, real: impl Fn() -> CUresult) -> CUresult {
    let own = registry::find_own(address).filter(|_| !place.is_null() && !is_current_broken());
    let Some((gpu, _)) = own else { return real() };
    let begin = Instant::now();
    loop {
        match shared::export(gpu, address) {
            Ok(handle) => {
                // SAFETY: `place` is the program's own pointer and not NULL.
                unsafe { place.write_unaligned(MemHandle(handle)) };
                return SUCCESS;
            }
            Err(NotExported::Impossible) => return real(),
            Err(NotExported::Away) if begin.elapsed() >= RETURN_TIMEOUT || !submit::is_active() => {
                return ERROR_OUT_OF_MEMORY;
            }
            // The scheduler makes room for clients that request the lock, so this thread
            // requests the lock. But the thread waits only for the memory, and not for the
            // lock.
            Err(NotExported::Away) => gpu.wait(closed::MEMORY),
        }
        time::sleep(POLL_INTERVAL);
    }
}

fn open(place: *mut CUdeviceptr, handle: &MemHandle, flags: u32, real: impl FnOnce() -> CUresult) -> CUresult {
    let Some(gpu) = gpu::current().filter(|_| shared::is_ours(&handle.0)) else { return real() };
    if place.is_null() || flags != LAZY_ENABLE_PEER_ACCESS {
        return ERROR_INVALID_VALUE;
    }
    let context = match allocate::usable_context() {
        Ok(Some(context)) => context,
        Ok(None) => return real(),
        Err(error) => return error,
    };
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
