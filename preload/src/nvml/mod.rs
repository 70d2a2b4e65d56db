//! Hooks of NVML queries whose answers nvshare changes to agree with CUDA: sizes of [`memory`], and the
//! list of [`devices`].
//!
//! This library never loads NVML, and makes only queries that the program could make too. It holds no
//! lock of its own during a query.

mod devices;
mod memory;

use crate::{
    driver::{
        hook::c_name,
        library::{self, Library},
    },
    sys::{c, once::Address, pad::pad_and_jump},
};
use alloc::vec::Vec;
use core::{
    ffi::{CStr, c_char, c_void},
    mem::transmute,
};
use memory::{Memory, Memory2};
use nvshare_wire::Uuid;

/// `nvmlReturn_t`
type Return = u32;
/// `nvmlDevice_t`
type Device = *mut c_void;

const SUCCESS: Return = 0;
const ERROR_LIBRARY_NOT_FOUND: Return = 12;
/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_LEN: usize = 96;

static LIBRARY: Library = Library::new(c"libnvidia-ml.so.1");

/// A function of NVML, which can be called once the program has loaded NVML.
#[derive(Debug)]
struct Function {
    name: &'static CStr,
    address: Address,
}

impl Function {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: Address::new() }
    }

    /// Returns the address to call. Without NVML, another library may define the name, for example a
    /// wrapper of the program.
    fn address(&self) -> Option<usize> {
        self.of_nvml().or_else(|| {
            let next = c::real_dlsym(libc::RTLD_NEXT, self.name.as_ptr()) as usize;
            (next != 0).then_some(next)
        })
    }

    fn of_nvml(&self) -> Option<usize> {
        self.address.get(|| library::export(LIBRARY.handle_if_loaded()?, self.name))
    }
}

static UUID: Function = Function::new(c"nvmlDeviceGetUUID");

/// Declares the hooks. In the body, `real` is NVML's function.
macro_rules! hooks {
    ($real:ident; $( $name:ident ( $($arg:ident : $type:ty),* ) $body:block )*) => {
        fn hooks() -> [(&'static Function, usize); [$( stringify!($name) ),*].len()] {
            [$( (&$name::REAL, $name as *const () as usize) ),*]
        }

        $(
            #[allow(non_snake_case, clippy::missing_safety_doc)]
            #[cfg_attr(not(test), unsafe(no_mangle))]
            #[unsafe(naked)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> Return {
                pad_and_jump!($name::hook);
            }

            #[allow(non_snake_case)]
            mod $name {
                use super::*;

                pub static REAL: Function = Function::new(c_name(concat!(stringify!($name), "\0").as_bytes()));

                pub unsafe extern "C" fn hook($($arg: $type),*) -> Return {
                    type Real = unsafe extern "C" fn($($type),*) -> Return;
                    let $real = |$($arg: $type),*| match REAL.address() {
                        // SAFETY: NVML's export of this name has this signature, and the arguments are the
                        // program's own.
                        Some(real) => unsafe { transmute::<usize, Real>(real)($($arg),*) },
                        None => ERROR_LIBRARY_NOT_FOUND,
                    };
                    $body
                }
            }
        )*
    };
}

hooks! { real;
    nvmlDeviceGetMemoryInfo(device: Device, info: *mut Memory) { memory::change(real(device, info), device, info) }
    nvmlDeviceGetMemoryInfo_v2(device: Device, info: *mut Memory2) { memory::change_2(real(device, info), device, info) }
    nvmlDeviceGetCount(count: *mut u32) { devices::count(real(count), count) }
    nvmlDeviceGetCount_v2(count: *mut u32) { devices::count(real(count), count) }
    nvmlDeviceGetHandleByIndex(index: u32, device: *mut Device) { devices::by_index(real, index, device) }
    nvmlDeviceGetHandleByIndex_v2(index: u32, device: *mut Device) { devices::by_index(real, index, device) }
    nvmlDeviceGetIndex(device: Device, index: *mut u32) { devices::index(real(device, index), device, index) }
}

/// Whether the program has loaded NVML.
pub fn is_loaded() -> bool {
    LIBRARY.handle_if_loaded().is_some()
}

/// Returns NVML's handle, and sorted pairs of a real address and its hook. Returns `None` if the
/// program has not loaded NVML.
pub fn table() -> Option<(*mut c_void, Vec<(usize, usize)>)> {
    let library = LIBRARY.handle_if_loaded()?;
    let mut table: Vec<_> = hooks().into_iter().filter_map(|(real, hook)| Some((real.of_nvml()?, hook))).collect();
    table.sort_unstable();
    Some((library, table))
}

/// Whether an NVML hook has this name.
///
/// # Safety
/// `name` is NULL or ends with NUL.
pub unsafe fn is_hooked(name: *const c_char) -> bool {
    // SAFETY: the caller's contract.
    !name.is_null() && hooks().iter().any(|(real, _)| real.name == unsafe { CStr::from_ptr(name) })
}

/// Whether this is the address of a hook.
pub fn is_hook(address: usize) -> bool {
    hooks().iter().any(|(_, hook)| *hook == address)
}

/// Returns the hook of a real function, or the function itself if it has none.
pub fn hook_of(found: *mut c_void) -> *mut c_void {
    let hook = hooks().into_iter().find(|(real, _)| real.of_nvml() == Some(found as usize));
    hook.map_or(found, |(_, hook)| hook as *mut c_void)
}

/// Returns the UUID of a device. Queries it each time, because after a shutdown of NVML a handle may
/// denote another device.
fn uuid(device: Device) -> Option<Uuid> {
    type Ask = unsafe extern "C" fn(Device, *mut c_char, u32) -> Return;
    let mut text = [0; UUID_LEN];
    // SAFETY: NVML's export of this name has this signature. The handle is valid, because NVML has
    // just answered another query with it.
    let result = unsafe { transmute::<usize, Ask>(UUID.address()?)(device, text.as_mut_ptr().cast(), UUID_LEN as u32) };
    let text = CStr::from_bytes_until_nul(&text).ok().filter(|_| result == SUCCESS)?;
    Uuid::parse(text.to_str().ok()?.strip_prefix("GPU-")?)
}
