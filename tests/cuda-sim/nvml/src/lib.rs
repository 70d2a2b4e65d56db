//! A simulated `libnvidia-ml.so.1`. The library shows the GPUs of `cuda-sim-gpus`, with the memory
//! and the processes of their accounts. The library has the calls that a monitor needs. Utilization
//! is always 0. Events are in `events`.

// C programs call the symbols, and valid pointers are the API's contract. Tests call the symbols
// from Rust too.
#![allow(clippy::not_unsafe_ptr_arg_deref)]

use cuda_sim_gpus::{
    Config,
    account::Figures,
    config::{Fabric, Listing, Support},
    trouble,
};
use std::{
    ffi::{CStr, c_char},
    fs::{self, File},
    sync::Mutex,
    thread,
    time::Duration,
};

/// A `nvmlReturn_t` that is not success.
#[derive(Clone, Copy, Debug)]
struct Error(u32);

const UNINITIALIZED: Error = Error(1);
const INVALID_ARGUMENT: Error = Error(2);
const NOT_SUPPORTED: Error = Error(3);
const NOT_FOUND: Error = Error(6);
const INSUFFICIENT_SIZE: Error = Error(7);
const DRIVER_NOT_LOADED: Error = Error(9);
const TIMEOUT: Error = Error(10);
const GPU_IS_LOST: Error = Error(15);
const VERSION_MISMATCH: Error = Error(25);
const UNKNOWN: Error = Error(999);

const ERRORS: &[(u32, &CStr)] = &[
    (0, c"The operation was successful"),
    (1, c"NVML was not first initialized with nvmlInit()"),
    (2, c"A supplied argument is invalid"),
    (3, c"The requested operation is not available on the target device"),
    (4, c"The current user may not do this"),
    (6, c"A query to find an object was unsuccessful"),
    (7, c"An input argument is not large enough"),
    (9, c"NVIDIA driver is not loaded"),
    (10, c"A timeout occurred"),
    (15, c"The GPU has fallen off the bus or has otherwise become inaccessible"),
    (19, c"The GPU is in use"),
    (25, c"The version of the structure is not one that is known"),
    (999, c"An internal driver error occurred"),
];

/// `nvmlMemory_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`. In this structure, the used memory excludes the reserved memory.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Memory2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlProcessInfo_v1_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Process1 {
    pid: u32,
    bytes: u64,
}

/// `nvmlProcessInfo_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Process {
    pid: u32,
    bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlUtilization_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Utilization {
    gpu: u32,
    memory: u32,
}

/// `nvmlFieldValue_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FieldValue {
    field: u32,
    scope: u32,
    timestamp: i64,
    latency: i64,
    kind: u32,
    done: u32,
    /// The union. Only its unsigned int is used.
    value: u64,
}

/// `nvmlGpuFabricInfo_v2_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct FabricInfo {
    version: u32,
    cluster: [u8; 16],
    status: u32,
    clique: u32,
    state: u8,
    health: u32,
}

/// The version of [`FabricInfo`].
const FABRIC_2: u32 = size_of::<FabricInfo>() as u32 | 2 << 24;
/// `NVML_GPU_FABRIC_STATE_COMPLETED`
const COMPLETED: u8 = 3;

/// `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`
const RECOVERY_ACTION: u32 = 230;
const UNSIGNED_INT: u32 = 1;

/// `nvmlPciInfo_t`
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Pci {
    legacy_id: [u8; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    id: [u8; 32],
}

fn out<T>(to: *mut T, value: T) -> Result<(), Error> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: the API's contract: the program passes null or a place for a `T`.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a text and its NUL to a buffer of `len` bytes.
fn text(to: *mut c_char, len: u32, text: &str) -> Result<(), Error> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= len as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the API's contract: the buffer has `len` bytes. The text with its NUL is not longer.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Returns the GPU of a handle. The handle is the GPU's number plus one.
fn gpu(handle: usize) -> Result<usize, Error> {
    let (dir, all) = (&Config::get().dir, Config::get().gpus);
    let gpu = handle.checked_sub(1).filter(|gpu| *gpu < all).ok_or(INVALID_ARGUMENT)?;
    match () {
        () if trouble::is_nvml_broken(dir) => Err(UNKNOWN),
        () if trouble::is_lost(dir, gpu) || trouble::is_out(dir, gpu) => Err(GPU_IS_LOST),
        () => Ok(gpu),
    }
}

/// The GPUs that are in the machine, in the order of NVML's numbers.
fn present() -> Result<Vec<usize>, Error> {
    let (dir, all) = (&Config::get().dir, Config::get().gpus);
    if trouble::is_nvml_broken(dir) {
        return Err(UNKNOWN);
    }
    Ok((0..all).filter(|gpu| !trouble::is_out(dir, *gpu)).collect())
}

fn by_index(index: u32) -> Result<usize, Error> {
    let gpu = *present()?.get(index as usize).ok_or(INVALID_ARGUMENT)?;
    self::gpu(gpu + 1)
}

/// NVML's number of a GPU.
fn index(handle: usize) -> Result<u32, Error> {
    let gpu = gpu(handle)?;
    let at = present()?.iter().position(|other| *other == gpu).ok_or(GPU_IS_LOST)?;
    Ok(at as u32)
}

/// Interval between checks whether initialization may continue.
const LOOK: Duration = Duration::from_millis(5);

/// A file that replaces the driver's device files. The file is open between the first `nvmlInit`
/// and the last `nvmlShutdown`.
static OPEN: Mutex<(usize, Option<File>)> = Mutex::new((0, None));

fn init() -> Result<(), Error> {
    let dir = &Config::get().dir;
    while trouble::is_init_held(dir) {
        thread::sleep(LOOK);
    }
    if trouble::is_unloaded(dir) {
        return Err(DRIVER_NOT_LOADED);
    }
    let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
    if open.1.is_none() {
        let _ = fs::create_dir_all(dir);
        open.1 = File::options().append(true).create(true).open(trouble::device_file(dir)).ok();
    }
    open.0 += 1;
    Ok(())
}

fn shutdown() -> Result<(), Error> {
    let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
    open.0 = open.0.checked_sub(1).ok_or(UNINITIALIZED)?;
    if open.0 == 0 {
        open.1 = None;
    }
    Ok(())
}

/// The number of slices that a GPU in MIG mode can have.
const SLICES: u32 = 7;

/// The base of slices' handles. A handle is the base, plus 256 times the GPU's number, plus the
/// slice's number.
const FIRST_SLICE: usize = 1 << 16;

/// Returns the GPU and the slice's number, if the handle is the handle of an existing slice.
fn slice(handle: usize) -> Option<(usize, u8)> {
    let number = handle.checked_sub(FIRST_SLICE)?;
    let (gpu, slice) = (gpu(number / 256 + 1).ok()?, (number % 256) as u8);
    trouble::slices(&Config::get().dir, gpu)?.contains(&slice).then_some((gpu, slice))
}

fn slices(handle: usize) -> Result<Vec<u8>, Error> {
    trouble::slices(&Config::get().dir, further(handle)?).ok_or(NOT_SUPPORTED)
}

fn code(done: Result<(), Error>) -> u32 {
    done.map_or_else(|e| e.0, |()| 0)
}

/// Returns a GPU's memory. NVML's figures include the driver's reserve, which CUDA does not count.
fn memory(handle: usize) -> Result<Memory2, Error> {
    if slice(handle).is_some() {
        let total = Config::get().memory / u64::from(SLICES);
        return Ok(Memory2 { version: MEMORY_2, total, reserved: 0, free: total, used: 0 });
    }
    let (gpu, config) = (gpu(handle)?, Config::get());
    let error = trouble::nvml_error(&config.dir, gpu);
    let used = figures(gpu).used(gpu).saturating_add_signed(error).min(config.memory);
    let (total, free) = (config.memory + config.reserved, config.memory.saturating_sub(used));
    Ok(Memory2 { version: MEMORY_2, total, reserved: config.reserved, free, used })
}

/// `nvmlMemory_v2`
const MEMORY_2: u32 = size_of::<Memory2>() as u32 | 2 << 24;

/// `NVML_VALUE_NOT_AVAILABLE`
const NOT_AVAILABLE: u64 = u64::MAX;

/// A list of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Programs {
    Compute,
    Graphics,
}

/// Writes the processes that have memory of a GPU into the program's list.
fn processes<T>(
    programs: Programs,
    handle: usize,
    count: *mut u32,
    to: *mut T,
    entry: impl Fn(u32, u64) -> T,
) -> Result<(), Error> {
    if slice(handle).is_some() {
        return out(count, 0);
    }
    let gpu = gpu(handle)?;
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    let listing = Config::get().nvml_processes;
    let Figures { processes, strangers, .. } = figures(gpu);
    // The driver's figure of a process does not contain its managed memory.
    let own = processes.iter().filter(|_| programs == Programs::Compute).map(|p| (p.pid_here(), p.gpus[gpu].plain));
    let strangers = strangers.iter().filter(|stranger| stranger.is_graphics == (programs == Programs::Graphics));
    let strangers = strangers.filter_map(|stranger| Some((stranger.pid?, stranger.bytes)));
    let listed = own.chain(strangers).filter(|(_, bytes)| *bytes > 0 && listing != Listing::None);
    let said = |bytes| if listing == Listing::All { bytes } else { NOT_AVAILABLE };
    let all: Vec<_> = listed.map(|(pid, bytes)| (pid, said(bytes))).collect();
    // SAFETY: the API's contract: the program passes null or a valid count. Null was rejected
    // above.
    let room = unsafe { count.read() } as usize;
    out(count, all.len() as u32)?;
    if room < all.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (i, (pid, bytes)) in all.into_iter().enumerate() {
        // SAFETY: the API's contract: the list has room for `room` entries, and `i` is less than
        // `room`.
        out(unsafe { to.add(i) }, entry(pid, bytes))?;
    }
    Ok(())
}

fn pci(handle: usize) -> Result<Pci, Error> {
    let gpu = gpu(handle)?;
    let bus = Config::pci_bus(gpu);
    let mut info =
        Pci { legacy_id: [0; 16], domain: 0, bus, device: 0, device_id: 0x0000_10de, subsystem_id: 0, id: [0; 32] };
    let (short, long) = (format!("0000:{bus:02X}:00.0"), format!("00000000:{bus:02X}:00.0"));
    info.legacy_id[..short.len()].copy_from_slice(short.as_bytes());
    info.id[..long.len()].copy_from_slice(long.as_bytes());
    Ok(info)
}

/// Checks that the GPU supports NVML's optional features.
fn further(handle: usize) -> Result<usize, Error> {
    let gpu = gpu(handle)?;
    if Config::get().nvml == Support::All { Ok(gpu) } else { Err(NOT_SUPPORTED) }
}

/// Returns a property of the link, if the link is configured.
fn link(handle: usize, value: impl Fn(u32) -> u32) -> Result<u32, Error> {
    further(handle)?;
    let lanes = Config::get().pcie_lanes;
    if lanes > 0 { Ok(value(lanes)) } else { Err(NOT_SUPPORTED) }
}

/// Fills in the only supported field.
fn field(gpu: usize, value: &mut FieldValue) {
    let advice = (value.field == RECOVERY_ACTION).then(|| trouble::advice(&Config::get().dir, gpu)).flatten();
    (value.kind, value.timestamp, value.latency) = (UNSIGNED_INT, 0, 0);
    (value.done, value.value) = advice.map_or((NOT_SUPPORTED.0, 0), |action| (0, action.into()));
}

fn driver_version() -> &'static str {
    // The first driver of the branch that supports this CUDA version.
    match Config::get().driver {
        ..12000 => "470.57.02",
        12000..13000 => "525.60.13",
        _ => "580.65.06",
    }
}

/// `NVML_DEVICE_ARCH_HOPPER` and `NVML_BRAND_NVIDIA`.
const HOPPER: u32 = 9;
const BRAND_NVIDIA: u32 = 14;

macro_rules! exports {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*) $body:block)*) => {
        $($(#[$doc])*
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)]
        pub extern "C" fn $name($($arg: $type),*) -> u32 {
            let call = || -> Result<(), Error> { $body };
            code(call())
        })*
    };
}

mod delay;
use delay::figures;

mod events;
pub use events::*;

exports! {
    nvmlInit() { init() }
    nvmlInit_v2() { init() }
    nvmlInitWithFlags(_flags: u32) { init() }
    nvmlShutdown() { shutdown() }
    nvmlSystemGetDriverVersion(to: *mut c_char, len: u32) { text(to, len, driver_version()) }
    nvmlSystemGetNVMLVersion(to: *mut c_char, len: u32) { text(to, len, &format!("13.{}", driver_version())) }
    nvmlSystemGetCudaDriverVersion(version: *mut i32) { out(version, Config::get().driver) }
    nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) { out(version, Config::get().driver) }
    nvmlDeviceGetCount(count: *mut u32) { out(count, present()?.len() as u32) }
    nvmlDeviceGetCount_v2(count: *mut u32) { out(count, present()?.len() as u32) }
    nvmlDeviceGetHandleByIndex(index: u32, handle: *mut usize) {
        out(handle, by_index(index)? + 1)
    }
    nvmlDeviceGetHandleByIndex_v2(index: u32, handle: *mut usize) {
        out(handle, by_index(index)? + 1)
    }
    nvmlDeviceGetHandleByUUID(uuid: *const c_char, handle: *mut usize) {
        if uuid.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the program passes a C string.
        let uuid = unsafe { CStr::from_ptr(uuid) }.to_str().map_err(|_| INVALID_ARGUMENT)?;
        let config = Config::get();
        let found = (0..config.gpus).find(|gpu| config.uuid_text(*gpu) == uuid).ok_or(NOT_FOUND)?;
        out(handle, gpu(found + 1)? + 1)
    }
    nvmlDeviceGetHandleByPciBusId_v2(id: *const c_char, handle: *mut usize) {
        if id.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the program passes a C string.
        let id = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_ascii_uppercase();
        let gpu = (0..Config::get().gpus).find(|gpu| id.ends_with(&format!(":{:02X}:00.0", Config::pci_bus(*gpu)))).ok_or(NOT_FOUND)?;
        out(handle, gpu + 1)
    }
    nvmlDeviceGetUUID(handle: usize, to: *mut c_char, len: u32) {
        match slice(handle) {
            Some((gpu, slice)) => text(to, len, &Config::get().slice_uuid_text(gpu, slice)),
            None => text(to, len, &Config::get().uuid_text(gpu(handle)?)),
        }
    }
    nvmlDeviceGetName(handle: usize, to: *mut c_char, len: u32) {
        if slice(handle).is_none() {
            gpu(handle)?;
        }
        text(to, len, Config::NAME)
    }
    nvmlDeviceGetIndex(handle: usize, to: *mut u32) { out(to, index(handle)?) }
    nvmlDeviceGetMinorNumber(handle: usize, minor: *mut u32) { out(minor, gpu(handle)? as u32) }
    nvmlDeviceGetPciInfo_v3(handle: usize, info: *mut Pci) { out(info, pci(handle)?) }
    nvmlDeviceGetPciInfo_v2(handle: usize, info: *mut Pci) { out(info, pci(handle)?) }
    nvmlDeviceGetMemoryInfo(handle: usize, to: *mut Memory) {
        let Memory2 { total, free, .. } = memory(handle)?;
        out(to, Memory { total, free, used: total - free })
    }
    nvmlDeviceGetMemoryInfo_v2(handle: usize, to: *mut Memory2) {
        // SAFETY: the API's contract: null, or a complete structure with its version set.
        match unsafe { to.as_ref() }.ok_or(INVALID_ARGUMENT)?.version {
            MEMORY_2 => out(to, memory(handle)?),
            _ => Err(VERSION_MISMATCH),
        }
    }
    nvmlDeviceGetDisplayActive(handle: usize, active: *mut u32) {
        out(active, u32::from(trouble::has_display(&Config::get().dir, gpu(handle)?)))
    }
    nvmlDeviceGetUtilizationRates(handle: usize, rates: *mut Utilization) {
        further(handle)?;
        out(rates, Utilization { gpu: 0, memory: 0 })
    }
    nvmlDeviceGetComputeRunningProcesses(handle: usize, count: *mut u32, to: *mut Process1) {
        processes(Programs::Compute, handle, count, to, |pid, bytes| Process1 { pid, bytes })
    }
    nvmlDeviceGetComputeRunningProcesses_v2(handle: usize, count: *mut u32, to: *mut Process) {
        processes(Programs::Compute, handle, count, to, |pid, bytes| Process { pid, bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX })
    }
    nvmlDeviceGetComputeRunningProcesses_v3(handle: usize, count: *mut u32, to: *mut Process) {
        processes(Programs::Compute, handle, count, to, |pid, bytes| Process { pid, bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX })
    }
    nvmlDeviceGetGraphicsRunningProcesses_v2(handle: usize, count: *mut u32, to: *mut Process) {
        let entry = |pid, bytes| Process { pid, bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX };
        processes(Programs::Graphics, handle, count, to, entry)
    }
    nvmlDeviceGetGraphicsRunningProcesses_v3(handle: usize, count: *mut u32, to: *mut Process) {
        let entry = |pid, bytes| Process { pid, bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX };
        processes(Programs::Graphics, handle, count, to, entry)
    }
    nvmlDeviceGetMigMode(handle: usize, current: *mut u32, pending: *mut u32) {
        slices(handle)?;
        out(current, 1)?;
        out(pending, 1)
    }
    nvmlDeviceGetMaxMigDeviceCount(handle: usize, count: *mut u32) {
        out(count, slices(further(handle)? + 1).map_or(0, |_| SLICES))
    }
    nvmlDeviceGetMigDeviceHandleByIndex(handle: usize, index: u32, to: *mut usize) {
        let slice = *slices(handle)?.get(index as usize).ok_or(NOT_FOUND)?;
        out(to, FIRST_SLICE + gpu(handle)? * 256 + usize::from(slice))
    }
    nvmlDeviceGetCudaComputeCapability(handle: usize, major: *mut i32, minor: *mut i32) {
        further(handle)?;
        out(major, 9)?;
        out(minor, 0)
    }
    nvmlDeviceGetArchitecture(handle: usize, architecture: *mut u32) {
        further(handle)?;
        out(architecture, HOPPER)
    }
    nvmlDeviceGetBrand(handle: usize, brand: *mut u32) {
        further(handle)?;
        out(brand, BRAND_NVIDIA)
    }
    nvmlDeviceGetFieldValues(handle: usize, count: i32, values: *mut FieldValue) {
        let gpu = further(handle)?;
        let count = usize::try_from(count).ok().filter(|count| *count > 0 && !values.is_null()).ok_or(INVALID_ARGUMENT)?;
        for i in 0..count {
            // SAFETY: the API's contract: there are `count` entries, with their field ids set.
            unsafe { values.add(i).as_mut() }.into_iter().for_each(|value| field(gpu, value));
        }
        Ok(())
    }
    nvmlDeviceGetGpuFabricInfoV(handle: usize, to: *mut FabricInfo) {
        gpu(handle)?;
        let (state, cluster) = match Config::get().fabric {
            Fabric::None => (0, [0; 16]),
            Fabric::Handles => (COMPLETED, [0; 16]),
            Fabric::Cluster => (COMPLETED, [0xfa; 16]),
        };
        // SAFETY: the API's contract: null, or a complete structure with its version set.
        match unsafe { to.as_ref() }.ok_or(INVALID_ARGUMENT)?.version {
            FABRIC_2 => out(to, FabricInfo { version: FABRIC_2, cluster, status: 0, clique: 1, state, health: 0 }),
            _ => Err(VERSION_MISMATCH),
        }
    }
    nvmlDeviceGetMaxPcieLinkGeneration(handle: usize, generation: *mut u32) { out(generation, link(handle, |_| 1)?) }
    nvmlDeviceGetMaxPcieLinkWidth(handle: usize, lanes: *mut u32) { out(lanes, link(handle, |lanes| lanes)?) }
}

/// `nvmlErrorString`
#[unsafe(no_mangle)]
#[allow(non_snake_case)]
pub extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    ERRORS.iter().find(|e| e.0 == code).map_or(c"Unknown error", |e| e.1).as_ptr()
}
