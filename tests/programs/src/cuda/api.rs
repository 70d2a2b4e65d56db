//! The driver calls that the programs make, and the three ways to look them up.

use std::{
    env,
    ffi::{CString, c_char, c_void},
    mem, ptr,
    sync::OnceLock,
};

/// A function of the program, called in stream order.
pub type HostFn = unsafe extern "C" fn(*mut c_void);

/// `cuLaunchKernel`
pub type Launch =
    unsafe extern "C" fn(usize, u32, u32, u32, u32, u32, u32, u32, usize, *mut *mut c_void, *mut *mut c_void) -> u32;

/// `CUmemAllocationProp`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Properties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: Location,
    pub windows: usize,
    pub flags: [u8; 8],
}

/// `CUmemLocation`
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CUmemAccessDesc`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Access {
    pub location: Location,
    pub flags: u32,
}

macro_rules! api {
    ($($name:literal $version:literal $symbol:ident($($arg:ident: $type:ty),*);)*) => {
        mod linked {
            use super::*;

            unsafe extern "C" {
                $(pub fn $symbol($($arg: $type),*) -> u32;)*
            }
        }

        /// The driver's functions, under their symbols' names.
        #[allow(non_snake_case)]
        #[derive(Clone, Copy, Debug)]
        pub struct Api {
            $(pub $symbol: unsafe extern "C" fn($($type),*) -> u32,)*
        }

        impl Api {
            /// The functions that the dynamic linker resolved.
            fn linked() -> Api {
                Api { $($symbol: linked::$symbol,)* }
            }

            /// The functions that `find(name, version, symbol)` returns.
            fn found(find: impl Fn(&str, i32, &str) -> *mut c_void) -> Api {
                // SAFETY: the types are the declarations of the CUDA headers, and `find` never
                // returns null.
                unsafe { Api { $($symbol: mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(find($name, $version, stringify!($symbol))),)* } }
            }
        }
    };
}

// The name and the version are the arguments of `cuGetProcAddress`. build.rs reads the symbols from
// these lines.
api! {
    "cuInit" 2000 cuInit(flags: u32);
    "cuDriverGetVersion" 2020 cuDriverGetVersion(version: *mut i32);
    "cuGetErrorName" 6000 cuGetErrorName(code: u32, name: *mut *const c_char);
    "cuDeviceGet" 2000 cuDeviceGet(device: *mut i32, ordinal: i32);
    "cuDeviceGetCount" 2000 cuDeviceGetCount(count: *mut i32);
    "cuDeviceGetName" 2000 cuDeviceGetName(name: *mut c_char, len: i32, device: i32);
    "cuDeviceGetUuid" 11040 cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    "cuDeviceTotalMem" 3020 cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    "cuDevicePrimaryCtxRetain" 7000 cuDevicePrimaryCtxRetain(context: *mut usize, device: i32);
    "cuDevicePrimaryCtxRelease" 11000 cuDevicePrimaryCtxRelease_v2(device: i32);
    "cuCtxCreate" 3020 cuCtxCreate_v2(context: *mut usize, flags: u32, device: i32);
    "cuCtxDestroy" 4000 cuCtxDestroy_v2(context: usize);
    "cuCtxSetCurrent" 4000 cuCtxSetCurrent(context: usize);
    "cuCtxSynchronize" 2000 cuCtxSynchronize();
    "cuMemGetInfo" 3020 cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    "cuMemAlloc" 3020 cuMemAlloc_v2(at: *mut u64, len: usize);
    "cuMemFree" 3020 cuMemFree_v2(at: u64);
    "cuMemAllocManaged" 6000 cuMemAllocManaged(at: *mut u64, len: usize, flags: u32);
    "cuMemAllocAsync" 11020 cuMemAllocAsync(at: *mut u64, len: usize, stream: usize);
    "cuMemFreeAsync" 11020 cuMemFreeAsync(at: u64, stream: usize);
    "cuMemHostAlloc" 2020 cuMemHostAlloc(at: *mut *mut u8, len: usize, flags: u32);
    "cuMemFreeHost" 2000 cuMemFreeHost(at: *mut u8);
    "cuMemHostGetDevicePointer" 3020 cuMemHostGetDevicePointer_v2(device: *mut u64, host: *mut u8, flags: u32);
    "cuMemCreate" 10020 cuMemCreate(handle: *mut u64, size: usize, properties: *const Properties, flags: u64);
    "cuMemRelease" 10020 cuMemRelease(handle: u64);
    "cuMemAddressReserve" 10020 cuMemAddressReserve(at: *mut u64, size: usize, align: usize, hint: u64, flags: u64);
    "cuMemAddressFree" 10020 cuMemAddressFree(at: u64, size: usize);
    "cuMemMap" 10020 cuMemMap(at: u64, size: usize, offset: usize, handle: u64, flags: u64);
    "cuMemUnmap" 10020 cuMemUnmap(at: u64, size: usize);
    "cuMemSetAccess" 10020 cuMemSetAccess(at: u64, size: usize, access: *const Access, count: usize);
    "cuMemcpyDtoH" 3020 cuMemcpyDtoH_v2(to: *mut u8, from: u64, len: usize);
    "cuMemcpyDtoD" 3020 cuMemcpyDtoD_v2(to: u64, from: u64, len: usize);
    "cuMemcpyHtoDAsync" 3020 cuMemcpyHtoDAsync_v2(to: u64, from: *const u8, len: usize, stream: usize);
    "cuMemcpyDtoHAsync" 3020 cuMemcpyDtoHAsync_v2(to: *mut u8, from: u64, len: usize, stream: usize);
    "cuMemsetD8" 3020 cuMemsetD8_v2(at: u64, value: u8, count: usize);
    "cuModuleLoadData" 2000 cuModuleLoadData(module: *mut usize, image: *const c_char);
    "cuModuleGetFunction" 2000 cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    "cuLaunchKernel" 4000 cuLaunchKernel(f: usize, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: usize, params: *mut *mut c_void, extra: *mut *mut c_void);
    "cuLaunchHostFunc" 10000 cuLaunchHostFunc(stream: usize, call: HostFn, data: *mut c_void);
    "cuStreamCreate" 2000 cuStreamCreate(stream: *mut usize, flags: u32);
    "cuStreamDestroy" 4000 cuStreamDestroy_v2(stream: usize);
    "cuStreamSynchronize" 2000 cuStreamSynchronize(stream: usize);
    "cuStreamQuery" 2000 cuStreamQuery(stream: usize);
    "cuStreamWaitEvent" 3020 cuStreamWaitEvent(stream: usize, event: usize, flags: u32);
    "cuStreamBeginCapture" 10010 cuStreamBeginCapture_v2(stream: usize, mode: u32);
    "cuStreamEndCapture" 10000 cuStreamEndCapture(stream: usize, graph: *mut usize);
    "cuEventCreate" 2000 cuEventCreate(event: *mut usize, flags: u32);
    "cuEventDestroy" 4000 cuEventDestroy_v2(event: usize);
    "cuEventRecord" 2000 cuEventRecord(event: usize, stream: usize);
    "cuEventSynchronize" 2000 cuEventSynchronize(event: usize);
    "cuEventElapsedTime" 2000 cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
    "cuGraphInstantiateWithFlags" 11040 cuGraphInstantiateWithFlags(exec: *mut usize, graph: usize, flags: u64);
    "cuGraphLaunch" 10000 cuGraphLaunch(exec: usize, stream: usize);
    "cuGraphExecDestroy" 10000 cuGraphExecDestroy(exec: usize);
    "cuGraphDestroy" 10000 cuGraphDestroy(graph: usize);
}

impl Api {
    /// Returns the driver's functions. `CUDA_LOOKUP` selects the lookup: `link` (as in a program
    /// that is linked to the driver), `dlsym`, or `getproc` (as in the CUDA runtime).
    pub fn get() -> &'static Api {
        static API: OnceLock<Api> = OnceLock::new();
        API.get_or_init(|| match env::var("CUDA_LOOKUP").as_deref() {
            Err(_) | Ok("link") => Api::linked(),
            Ok("dlsym") => Api::found(|_, _, symbol| dlsym(symbol)),
            Ok("getproc") => Api::by_version(),
            Ok(other) => panic!("CUDA_LOOKUP={other}: want link, dlsym or getproc"),
        })
    }

    fn by_version() -> Api {
        type GetProcAddress = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut u32) -> u32;
        // SAFETY: the type is the declaration of the CUDA headers.
        let first = unsafe { mem::transmute::<*mut c_void, GetProcAddress>(dlsym("cuGetProcAddress_v2")) };
        let ask = |call: GetProcAddress, name: &str, version: i32| {
            let text = CString::new(name).expect("no NUL in a name");
            let (mut found, mut status) = (ptr::null_mut(), 0);
            // SAFETY: `text` is a C string, and both result pointers are to live values.
            let code = unsafe { call(text.as_ptr(), &mut found, version, 0, &mut status) };
            assert!(
                code == 0 && !found.is_null(),
                "cuGetProcAddress({name}, {version}): error {code}, status {status}"
            );
            found
        };
        // Like the runtime, looks up the lookup function through itself. SAFETY: version 12000 has
        // this signature.
        let again = unsafe { mem::transmute::<*mut c_void, GetProcAddress>(ask(first, "cuGetProcAddress", 12000)) };
        Api::found(|name, version, _| ask(again, name, version))
    }
}

/// An exported symbol of the driver.
pub fn dlsym(symbol: &str) -> *mut c_void {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let text = CString::new(symbol).expect("no NUL in a symbol");
    // SAFETY: both strings end with NUL, and the library is never unloaded.
    let found = unsafe {
        let library = *LIBRARY.get_or_init(|| libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) as usize);
        assert!(library != 0, "cannot load libcuda.so.1");
        libc::dlsym(library as *mut c_void, text.as_ptr())
    };
    assert!(!found.is_null(), "libcuda.so.1 has no {symbol}");
    found
}
