//! Devices: the GPUs that this process sees, and their properties.

use crate::{
    checkpoint,
    error::{Done, Error},
    out,
};
use cuda_sim_gpus::{Config, config::Fabric, device_file, place};
use std::{
    env,
    ffi::{CStr, c_char},
    sync::{Once, OnceLock},
};

static VISIBLE: OnceLock<Vec<usize>> = OnceLock::new();

/// `cuInit`
pub fn init(flags: u32) -> Done {
    if flags != 0 {
        return Err(Error::INVALID_VALUE);
    }
    if cuda_sim_gpus::after_fork() {
        return Err(Error::NOT_INITIALIZED);
    }
    let visible = VISIBLE.get_or_init(|| {
        let all: Vec<usize> = (0..Config::get().gpus).collect();
        match env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => visible(&list),
            Err(_) => all,
        }
    });
    if visible.is_empty() {
        return Err(Error::NO_DEVICE);
    }
    checkpoint::serve();
    open_files_once();
    Ok(())
}

fn open_files_once() {
    static OPENED: Once = Once::new();
    OPENED.call_once(open_files);
}

/// Opens the device files of the visible GPUs.
pub fn open_files() {
    device_file::open(VISIBLE.get().into_iter().flatten().copied());
}

/// Whether [`init`] has succeeded.
pub fn initialised() -> bool {
    VISIBLE.get().is_some_and(|v| !v.is_empty())
}

/// Returns the GPUs that `CUDA_VISIBLE_DEVICES` names, by index or by the start of a UUID. An unknown
/// name ends the list.
fn visible(list: &str) -> Vec<usize> {
    let config = Config::get();
    let find = |name: &str| match name.parse::<usize>() {
        Ok(index) => Some(index).filter(|index| *index < config.gpus),
        Err(_) if name.starts_with("GPU-") => (0..config.gpus).find(|gpu| config.uuid_text(*gpu).starts_with(name)),
        Err(_) => None,
    };
    let mut gpus = Vec::new();
    for gpu in list.split(',').map_while(|name| find(name.trim())) {
        if gpus.contains(&gpu) {
            return Vec::new();
        }
        gpus.push(gpu);
    }
    gpus
}

/// Returns the GPU behind a `CUdevice`.
pub fn gpu(device: i32) -> Result<usize, Error> {
    let visible = VISIBLE.get().ok_or(Error::NOT_INITIALIZED)?;
    usize::try_from(device).ok().and_then(|at| visible.get(at)).copied().ok_or(Error::INVALID_DEVICE)
}

/// Returns the `CUdevice` of a GPU.
pub fn ordinal(gpu: usize) -> i32 {
    VISIBLE.get().and_then(|v| v.iter().position(|g| *g == gpu)).map_or(-1, |at| at as i32)
}

/// `cuDriverGetVersion`
pub fn driver_version(version: *mut i32) -> Done {
    out(version, Config::get().driver)
}

/// `cuDeviceGet`
pub fn get(device: *mut i32, at: i32) -> Done {
    gpu(at)?;
    out(device, at)
}

/// `cuDeviceGetCount`
pub fn count(count: *mut i32) -> Done {
    out(count, VISIBLE.get().map_or(0, Vec::len) as i32)
}

/// `cuDeviceGetName`
pub fn name(name: *mut c_char, len: i32, device: i32) -> Done {
    gpu(device)?;
    text(name, len, Config::NAME)
}

fn text(to: *mut c_char, len: i32, text: &str) -> Done {
    let len = usize::try_from(len).ok().filter(|len| *len > 0 && !to.is_null()).ok_or(Error::INVALID_VALUE)?;
    let n = text.len().min(len - 1);
    // SAFETY: by the API's contract, the buffer has `len` bytes, and n + 1 ≤ len.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), n);
        to.add(n).write(0);
    }
    Ok(())
}

/// `cuDeviceGetUuid`
pub fn uuid(uuid: *mut [u8; 16], device: i32) -> Done {
    out(uuid, Config::get().uuid(place(gpu(device)?)))
}

/// `cuDeviceTotalMem`
pub fn total_memory(bytes: *mut usize, device: i32) -> Done {
    gpu(device)?;
    out(bytes, Config::get().memory as usize)
}

/// `cuDeviceComputeCapability`
pub fn compute_capability(major: *mut i32, minor: *mut i32, device: i32) -> Done {
    gpu(device)?;
    out(major, 9)?;
    out(minor, 0)
}

/// `cuDeviceGetPCIBusId`: after a restore on another GPU, still returns the bus id of the original
/// GPU. Only the UUID changes [two H100, driver 580.159].
pub fn pci_bus_id(id: *mut c_char, len: i32, device: i32) -> Done {
    let bus = Config::pci_bus(gpu(device)?);
    text(id, len, &format!("0000:{bus:02X}:00.0"))
}

/// `cuDeviceGetByPCIBusId`
pub fn by_pci_bus_id(device: *mut i32, id: *const c_char) -> Done {
    if id.is_null() {
        return Err(Error::INVALID_VALUE);
    }
    // SAFETY: the program passes a C string.
    let id = unsafe { CStr::from_ptr(id) }.to_string_lossy().to_ascii_uppercase();
    let bus = |gpu: usize| format!("{:02X}:00.0", Config::pci_bus(gpu));
    let found = VISIBLE.get().into_iter().flatten().find(|gpu| id.ends_with(&bus(**gpu)));
    out(device, ordinal(*found.ok_or(Error::INVALID_DEVICE)?))
}

/// `cuDeviceGetAttribute`
pub fn attribute(value: *mut i32, attribute: u32, device: i32) -> Done {
    let gpu = gpu(device)?;
    let vmm = i32::from(Config::get().vmm);
    let fabric = i32::from(Config::get().fabric != Fabric::None);
    let mode = if Config::get().exclusive.contains(&place(gpu)) { 3 } else { 0 };
    let answer: i32 = match attribute {
        1 | 2 => 1024,                            // threads per block; block dimension x
        3 => 1024,                                // block dimension y
        4 => 64,                                  // block dimension z
        5 => i32::MAX,                            // grid dimension x
        6 | 7 => 65_535,                          // grid dimensions y, z
        8 => 48 << 10,                            // shared memory per block
        9 => 64 << 10,                            // constant memory
        10 => 32,                                 // warp size
        11 => i32::MAX,                           // pitch
        12 => 65_536,                             // registers per block
        13 => 1_980_000,                          // clock, kHz
        14 => 512,                                // texture alignment
        15 | 19 | 31 | 41 | 78 | 79 | 80 => 1, // overlap, host mapping, concurrent kernels, unified addresses, priorities, caches
        16 => 132,                             // multiprocessors
        17 => 0,                               // kernel timeout
        20 => mode,                            // compute mode: default, exclusive-process
        33 => Config::pci_bus(place(gpu)) as i32, // PCI bus
        34 => 0,                               // PCI device
        35 => 0,                               // TCC driver
        36 => 2_619_000,                       // memory clock, kHz
        37 => 6144,                            // memory bus width
        38 => 50 << 20,                        // L2
        39 => 2048,                            // threads per multiprocessor
        40 => 3,                               // copy engines
        50 => 0,                               // PCI domain
        75 => 9,                               // compute capability
        76 => 0,
        81 => 228 << 10,                               // shared memory per multiprocessor
        82 => 65_536,                                  // registers per multiprocessor
        83 => 1,                                       // managed memory
        86 | 88 => 0,                                  // native host atomics, pageable access
        89..=96 => 1,    // concurrent managed access, preemption, stream memory operations, cooperative
        97 => 227 << 10, // shared memory per block, opted in
        98 | 99 => 1,    // flush, host registration
        102 => vmm,      // virtual memory management
        103 => vmm,      // sharing by file descriptor
        106 => 32,       // blocks per multiprocessor
        110 => vmm,      // access by other devices
        115 => 1,        // memory pools
        119 => 1 | (8 * fabric), // pool handle types: file descriptors, FABRIC handles
        128 => fabric & vmm, // FABRIC handles
        136 => i32::from(Config::get().decompression), // algorithms for decompression by hardware
        120 | 122 | 123 => 1, // clusters, 64-bit stream memory operations
        0 | 148.. => return Err(Error::INVALID_VALUE),
        _ => 0,
    };
    out(value, answer)
}
