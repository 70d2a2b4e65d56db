//! NVML's questions how much memory a GPU has: the program's own are answered with the [`story`] that CUDA tells it. Who
//! uses no CUDA, as monitors do, or has no bound, is told the truth, and so is whoever asks of a slice of a GPU.
//!
//! NVML is the program's: it is never loaded from here, and no question is asked that the program could not ask. No lock
//! of ours is held meanwhile.

use crate::{
    errno, gpu,
    library::{self, Library},
    story::{self, Told},
};
use core::{
    ffi::{CStr, c_char, c_void},
    mem::{size_of, transmute},
    ptr::NonNull,
    sync::atomic::{AtomicUsize, Ordering},
};
use nvshare_wire::Uuid;

/// `nvmlReturn_t`
type Return = u32;
/// `nvmlDevice_t`
type Device = *mut c_void;

const SUCCESS: Return = 0;
const ERROR_LIBRARY_NOT_FOUND: Return = 12;
/// `NVML_DEVICE_UUID_V2_BUFFER_SIZE`
const UUID_LEN: usize = 96;

/// `nvmlMemory_t`
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`. Here `used` leaves out what is reserved.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
pub struct Memory2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const _: () = assert!(size_of::<Memory2>() == 40);

/// `nvmlMemory_v2`
const VERSION_2: u32 = size_of::<Memory2>() as u32 | 2 << 24;

static LIBRARY: Library = Library::new(c"libnvidia-ml.so.1");

/// A function of NVML, once NVML is there.
#[derive(Debug)]
struct Function {
    name: &'static CStr,
    address: AtomicUsize,
}

impl Function {
    const fn new(name: &'static CStr) -> Self {
        Self { name, address: AtomicUsize::new(0) }
    }

    fn address(&self) -> Option<usize> {
        let known = self.address.load(Ordering::Relaxed);
        if known != 0 {
            return Some(known);
        }
        let address = library::export(LIBRARY.loaded()?, self.name)?;
        self.address.store(address, Ordering::Relaxed);
        Some(address)
    }
}

static MEMORY: Function = Function::new(c"nvmlDeviceGetMemoryInfo");
static MEMORY_2: Function = Function::new(c"nvmlDeviceGetMemoryInfo_v2");
static UUID: Function = Function::new(c"nvmlDeviceGetUUID");

fn hooks() -> [(&'static Function, usize); 2] {
    [
        (&MEMORY, nvmlDeviceGetMemoryInfo as *const () as usize),
        (&MEMORY_2, nvmlDeviceGetMemoryInfo_v2 as *const () as usize),
    ]
}

/// Whether the program has NVML.
pub fn is_loaded() -> bool {
    LIBRARY.loaded().is_some()
}

/// Whether a name is that of a hook.
///
/// # Safety
/// NULL, or it ends with NUL.
pub unsafe extern "C" fn is_hooked(name: *const c_char) -> bool {
    // SAFETY: the caller's promise.
    !name.is_null() && hooks().iter().any(|(real, _)| real.name == unsafe { CStr::from_ptr(name) })
}

/// Whether this is the address of a hook.
pub fn is_hook(address: usize) -> bool {
    hooks().iter().any(|(_, hook)| *hook == address)
}

/// The hook of a real function, or the function itself.
pub fn hook_of(found: *mut c_void) -> *mut c_void {
    let hook = hooks().into_iter().find(|(real, _)| real.address() == Some(found as usize));
    hook.map_or(found, |(_, hook)| hook as *mut c_void)
}

/// What the program is told of a GPU of which NVML says this; `None`: just that.
fn told(device: Device, total: u64, free: u64) -> Option<Told> {
    if !story::is_bounded() {
        return None;
    }
    errno::preserved(|| {
        let gpu = gpu::managed_by_uuid(uuid(device)?)?;
        Some(story::of(gpu, total, || Some(free))).filter(|told| told.total < total)
    })
}

/// Asked each time: a handle is NVML's, and may mean something else once NVML was shut down.
fn uuid(device: Device) -> Option<Uuid> {
    type Ask = unsafe extern "C" fn(Device, *mut c_char, u32) -> Return;
    let mut text = [0; UUID_LEN];
    // SAFETY: NVML's export of this name has this signature, and has just answered another question with that handle.
    let result = unsafe { transmute::<usize, Ask>(UUID.address()?)(device, text.as_mut_ptr().cast(), UUID_LEN as u32) };
    let text = CStr::from_bytes_until_nul(&text).ok().filter(|_| result == SUCCESS)?;
    Uuid::parse(text.to_str().ok()?.strip_prefix("GPU-")?)
}

/// `nvmlDeviceGetMemoryInfo`
///
/// # Safety
/// As NVML wants it.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) -> Return {
    type Real = unsafe extern "C" fn(Device, *mut Memory) -> Return;
    let Some(real) = MEMORY.address() else { return ERROR_LIBRARY_NOT_FOUND };
    // SAFETY: NVML's export of this name has this signature, and the arguments are the program's own.
    let result = unsafe { transmute::<usize, Real>(real)(device, memory) };
    if let (SUCCESS, Some(place)) = (result, NonNull::new(memory)) {
        // SAFETY: NVML has just written there.
        let Memory { total, free, .. } = unsafe { place.read_unaligned() };
        if let Some(Told { total, free }) = told(device, total, free) {
            // SAFETY: as before.
            unsafe { place.write_unaligned(Memory { total, free, used: total - free }) };
        }
    }
    result
}

/// `nvmlDeviceGetMemoryInfo_v2`
///
/// # Safety
/// As NVML wants it.
#[allow(non_snake_case)]
#[cfg_attr(not(test), unsafe(no_mangle))]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut Memory2) -> Return {
    type Real = unsafe extern "C" fn(Device, *mut Memory2) -> Return;
    let Some(real) = MEMORY_2.address() else { return ERROR_LIBRARY_NOT_FOUND };
    // SAFETY: NVML's export of this name has this signature, and the arguments are the program's own.
    let result = unsafe { transmute::<usize, Real>(real)(device, memory) };
    // Another version may be laid out in another way.
    // SAFETY: NVML has just written there, and every version begins with its number.
    let place = NonNull::new(memory).filter(|place| unsafe { place.cast::<u32>().read_unaligned() } == VERSION_2);
    if let (SUCCESS, Some(place)) = (result, place) {
        // SAFETY: as before.
        let Memory2 { version, total, reserved, free, .. } = unsafe { place.read_unaligned() };
        if let Some(Told { total, free }) = told(device, total, free) {
            let reserved = reserved.min(total - free);
            // SAFETY: as before.
            unsafe { place.write_unaligned(Memory2 { version, total, reserved, free, used: total - free - reserved }) };
        }
    }
    result
}
