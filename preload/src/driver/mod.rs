//! The real driver, `libcuda.so.1`. This library opens the driver when the program first needs it, and
//! not earlier.
//!
//! A [`Function`] is looked up on first use. If the driver lacks the function, the call returns
//! `CUDA_ERROR_NOT_FOUND`, like a lookup by the driver.
//!
//! [`function`]: functions of the driver. [`entries`]: entries for functions that this library need not
//! intercept. [`detour`]: code that runs before an entry or a thunk continues. All entries are shut
//! while [`presence`](crate::connection::presence) says that the process is off its GPUs.
//!
//! [`query`]: queries without side effects.
//!
//! [`hook`]: the list of interposed functions.
//!
//! [`redirect`]: patches symbol tables so that lookups of driver functions yield hooks.
//!
//! [`waits`]: which calls may wait for running work, and where such calls are forbidden.

pub mod context;
pub mod detour;
pub mod entries;
#[cfg(test)]
pub mod fake;
pub mod function;
pub mod hook;
pub mod library;
pub mod query;
pub mod redirect;
pub mod types;
pub mod waits;

pub use function::Function;

use crate::{
    driver::{library::Library, types::*},
    sys::c,
};
use core::ffi::{CStr, c_char, c_void};

static LIBRARY: Library = Library::new(c"libcuda.so.1");

/// Returns the driver's handle, if the program has loaded it. Never loads it.
pub fn handle_if_loaded() -> Option<*mut c_void> {
    LIBRARY.handle_if_loaded()
}

/// Libraries that submit work through tables of private functions. They request these tables when they
/// start. The libraries are OptiX, the video encoder and decoder, optical flow, and frame capture.
const UNTRACKED: [&CStr; 5] = [
    c"libnvoptix.so.1",
    c"libnvidia-encode.so.1",
    c"libnvcuvid.so.1",
    c"libnvidia-opticalflow.so.1",
    c"libnvidia-fbc.so.1",
];

/// Whether the process has loaded a library whose work passes no hook.
pub fn has_untracked_library() -> bool {
    let Some(dlopen) = c::dlopen() else { return false };
    // SAFETY: the names are NUL-terminated, and the call loads nothing. The additional reference only
    // keeps a loaded library from being unloaded.
    UNTRACKED.iter().any(|name| !unsafe { dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) }.is_null())
}

/// Converts a result code of the driver.
///
/// # Errors
/// Returns any result except `CUDA_SUCCESS`.
pub fn check(result: CUresult) -> Result<(), CUresult> {
    if result == SUCCESS { Ok(()) } else { Err(result) }
}

/// Runs `then` if a call has succeeded. Returns the call's result.
pub fn after(result: CUresult, then: impl FnOnce()) -> CUresult {
    if result == SUCCESS {
        then();
    }
    result
}

/// Writes through a pointer of the program. Does nothing if the pointer is NULL, which the driver
/// permits.
///
/// # Safety
/// `place` is NULL or valid for a `T`.
pub unsafe fn put<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: the caller's contract. The pointer need not be aligned for `T`, because the driver accepts
        // that too.
        unsafe { place.write_unaligned(value) };
    }
}

/// Answers a call of the program: writes the value to the place that the program has passed, or returns the
/// error.
///
/// # Safety
/// As for [`put`].
pub unsafe fn put_result<T>(place: *mut T, result: Result<T, CUresult>) -> CUresult {
    match result {
        Ok(value) => {
            // SAFETY: the caller's contract.
            unsafe { put(place, value) };
            SUCCESS
        }
        Err(error) => error,
    }
}

/// Looks up the driver's export with this name, for an [`Entry`]. Loads the driver. Returns `None` if the
/// driver cannot be loaded, and `Some(None)` if it lacks the export.
#[cfg(not(test))]
pub fn look_up(name: &CStr) -> Option<Option<usize>> {
    LIBRARY.load().map(|library| library::export(library, name))
}

/// Unit tests have a fake driver, even on a machine with a GPU.
#[cfg(test)]
pub fn look_up(name: &CStr) -> Option<Option<usize>> {
    Some(fake::find(name))
}

/// Returns the address of the driver's export with this name. Loads the driver.
pub fn export(name: &CStr) -> Option<usize> {
    look_up(name).flatten()
}

/// Makes a driver call that blocks while another process has locked this process. Makes the call
/// even while the entries are shut. Most queries do not block in a locked process, but the query of
/// a limit does [H100, driver 580].
///
/// # Safety
/// The context exists, or is NULL.
pub unsafe fn wait_while_locked(context: CUcontext) {
    const STACK_SIZE: u32 = 0;
    let mut value: Size = 0;
    let (push, ask) = (address::cuCtxPushCurrent_v2.find(), export(c"cuCtxGetLimit"));
    // SAFETY: the driver's exports of these names have these signatures, and `value` outlives the call.
    unsafe {
        if let Some(push) = push {
            core::mem::transmute::<usize, unsafe extern "C" fn(CUcontext) -> CUresult>(push)(context);
        }
        if let Some(ask) = ask {
            core::mem::transmute::<usize, unsafe extern "C" fn(*mut Size, u32) -> CUresult>(ask)(
                &mut value, STACK_SIZE,
            );
        }
    }
}

/// Returns the current UUID of a GPU, even while the entries are shut. The driver answers this query in
/// a locked process too [H100, driver 580]. Returns `None` if the query fails.
pub fn uuid(device: CUdevice) -> Option<[u8; 16]> {
    let mut uuid = [0; 16];
    let mut ask = |name: &CStr| {
        let Some(function) = export(name) else { return false };
        // SAFETY: the driver's exports of these names have this signature, and `uuid` outlives the call.
        let result = unsafe {
            core::mem::transmute::<usize, unsafe extern "C" fn(*mut [u8; 16], CUdevice) -> CUresult>(function)(
                &mut uuid, device,
            )
        };
        result == SUCCESS
    };
    // For a MIG slice, the newer function returns the UUID of the slice.
    (ask(c"cuDeviceGetUuid_v2") || ask(c"cuDeviceGetUuid")).then_some(uuid)
}

/// Declares functions of the driver that this library calls. `cuEventQuery(event: CUevent);` declares a
/// function `cuEventQuery` in this module, which calls the driver's function.
macro_rules! functions {
    ($( $name:ident ( $($arg:ident : $type:ty),* $(,)? ); )*) => {
        /// Looks up all declared functions, so that no later call has to.
        pub fn resolve_all() {
            each_function(|function| {
                function.find();
            });
        }

        /// Calls `f` for each declared function.
        pub fn each_function(f: impl Fn(&Function)) {
            $( f(&address::$name); )*
        }

        /// The addresses of the real functions.
        #[allow(non_upper_case_globals)]
        pub mod address {
            use super::{Function, hook::c_name};
            $( pub static $name: Function = Function::new(c_name(concat!(stringify!($name), "\0").as_bytes())); )*
        }
        $(
            /// Calls the driver's function of this name. Passes pointers on unchanged, so the caller must satisfy
            /// the driver's requirements.
            #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
            #[cfg_attr(debug_assertions, track_caller)]
            #[inline]
            pub unsafe fn $name($($arg: $type),*) -> CUresult {
                waits::check(&address::$name);
                match address::$name.address() {
                    // SAFETY: the driver's export of this name has this signature.
                    Some(address) => unsafe {
                        core::mem::transmute::<usize, unsafe extern "C" fn($($type),*) -> CUresult>(address)($($arg),*)
                    },
                    None => ERROR_NOT_FOUND,
                }
            }
        )*
    };
}

functions! {
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: CUdevice);
    cuDeviceGetName(name: *mut c_char, len: i32, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut Size, device: CUdevice);
    cuDeviceCanAccessPeer(can: *mut i32, device: CUdevice, peer: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuDevicePrimaryCtxGetState(device: CUdevice, flags: *mut u32, active: *mut i32);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuCtxRecordEvent(context: CUcontext, event: CUevent);
    cuCtxSynchronize();
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuEventCreate(event: *mut CUevent, flags: u32);
    cuEventDestroy_v2(event: CUevent);
    cuEventQuery(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuStreamCreate(stream: *mut CUstream, flags: u32);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamGetFlags(stream: CUstream, flags: *mut u32);
    cuStreamGetId(stream: CUstream, id: *mut u64);
    cuDeviceGetMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    cuDeviceGetDefaultMemPool(pool: *mut CUmemoryPool, device: CUdevice);
    cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: i32, value: *mut c_void);
    cuMemPoolGetAccess(flags: *mut i32, pool: CUmemoryPool, location: *const Location);
    cuCtxFromGreenCtx(context: *mut CUcontext, green: *mut c_void);
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: u32);
    cuStreamQuery(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamGetCaptureInfo(stream: CUstream, status: *mut i32, id: *mut u64);
    cuStreamIsCapturing(stream: CUstream, status: *mut i32);
    cuThreadExchangeStreamCaptureMode(mode: *mut i32);
    cuMemGetInfo_v2(free: *mut Size, total: *mut Size);
    cuMemAddressReserve(address: *mut CUdeviceptr, size: Size, alignment: Size, at: CUdeviceptr, flags: u64);
    cuMemAddressFree(address: CUdeviceptr, size: Size);
    cuMemCreate(handle: *mut Handle, size: Size, prop: *const AllocationProp, flags: u64);
    cuMemRelease(handle: Handle);
    cuMemMap(address: CUdeviceptr, size: Size, offset: Size, handle: Handle, flags: u64);
    cuMemUnmap(address: CUdeviceptr, size: Size);
    cuMemSetAccess(address: CUdeviceptr, size: Size, desc: *const AccessDesc, count: Size);
    cuMemGetAllocationPropertiesFromHandle(prop: *mut AllocationProp, handle: Handle);
    cuMemExportToShareableHandle(shareable: *mut c_void, handle: Handle, kind: i32, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut Handle, shareable: *mut c_void, kind: i32);
    cuMulticastBindMem(object: Handle, offset: Size, memory: Handle, memory_offset: Size, size: Size, flags: u64);
    cuMulticastBindMem_v2(object: Handle, device: CUdevice, offset: Size, memory: Handle, memory_offset: Size, size: Size, flags: u64);
    cuLogicalEndpointBindMem(endpoint: u32, device: CUdevice, offset: u64, memory: Handle, memory_offset: u64, size: u64, flags: u64);
    cuMemAllocManaged(address: *mut CUdeviceptr, size: Size, flags: u32);
    cuMemFree_v2(address: CUdeviceptr);
    cuPointerGetAttribute(data: *mut c_void, attribute: i32, address: CUdeviceptr);
    cuPointerSetAttribute(value: *const c_void, attribute: i32, address: CUdeviceptr);
    cuMemPrefetchAsync(address: CUdeviceptr, size: Size, to: CUdevice, stream: CUstream);
    cuMemHostRegister_v2(host: *mut c_void, size: Size, flags: u32);
    cuMemHostUnregister(host: *mut c_void);
    cuMemcpyAsync(to: CUdeviceptr, from: CUdeviceptr, size: Size, stream: CUstream);
    cuMemcpy2DAsync_v2(copy: *const c_void, stream: CUstream);
    cuMemcpy3DAsync_v2(copy: *const c_void, stream: CUstream);
    cuMemcpyPeerAsync(to: CUdeviceptr, to_context: CUcontext, from: CUdeviceptr, from_context: CUcontext, size: Size, stream: CUstream);
    cuMemcpy3DPeerAsync(copy: *const c_void, stream: CUstream);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, size: Size, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, size: Size, stream: CUstream);
    cuMemsetD32Async(to: CUdeviceptr, value: u32, count: Size, stream: CUstream);
    cuMemHostGetDevicePointer_v2(on_gpu: *mut CUdeviceptr, host: *mut c_void, flags: u32);
    cuModuleLoadData(module: *mut CUmodule, image: *const c_void);
    cuModuleUnload(module: CUmodule);
    cuModuleGetFunction(function: *mut CUfunction, module: CUmodule, name: *const c_char);
    cuFuncLoad(function: CUfunction);
    cuLaunchKernel(
        function: CUfunction,
        grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32, block_y: u32, block_z: u32,
        shared: u32, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void,
    );
}
