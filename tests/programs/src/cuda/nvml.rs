//! The part of NVML that reports memory.

use std::{
    ffi::{CStr, CString, c_char, c_void},
    mem,
};

/// `nvmlMemory_t`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

/// `nvmlMemory_v2_t`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Memory2 {
    pub version: u32,
    pub total: u64,
    pub reserved: u64,
    pub free: u64,
    pub used: u64,
}

/// The way to look up NVML's functions.
#[derive(Clone, Copy, Debug)]
pub enum Lookup {
    /// In the library itself.
    Library,
    /// In the loader's global order, as in a program that is linked to NVML.
    Linked,
}

/// An NVML device.
#[derive(Clone, Copy, Debug)]
pub struct Nvml {
    library: *mut c_void,
    handle: usize,
}

impl Nvml {
    /// Opens the GPU with this index.
    pub fn open(index: u32) -> Result<Nvml, String> {
        // SAFETY: the name is a C string, and the library is never unloaded.
        let library = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
        if library.is_null() {
            return Err("cannot load libnvidia-ml.so.1".into());
        }
        let mut nvml = Nvml { library, handle: 0 };
        // SAFETY: the types are the declarations of NVML's header, and the result pointers are to
        // live values.
        unsafe {
            let init: unsafe extern "C" fn() -> u32 = mem::transmute(nvml.find(Lookup::Library, "nvmlInit_v2")?);
            let get: unsafe extern "C" fn(u32, *mut usize) -> u32 =
                mem::transmute(nvml.find(Lookup::Library, "nvmlDeviceGetHandleByIndex_v2")?);
            succeeded("nvmlInit_v2", init())?;
            succeeded("nvmlDeviceGetHandleByIndex_v2", get(index, &mut nvml.handle))?;
        }
        Ok(nvml)
    }

    /// The number of GPUs, and the UUID and index of this one.
    pub fn devices(&self, lookup: Lookup) -> Result<(u32, String, u32), String> {
        let (mut count, mut index, mut uuid) = (0, 0, [0u8; 96]);
        // SAFETY: the types are the declarations of NVML's header, and all pointers are to live
        // values.
        unsafe {
            let call: unsafe extern "C" fn(*mut u32) -> u32 =
                mem::transmute(self.find(lookup, "nvmlDeviceGetCount_v2")?);
            succeeded("nvmlDeviceGetCount_v2", call(&mut count))?;
            let call: unsafe extern "C" fn(usize, *mut u8, u32) -> u32 =
                mem::transmute(self.find(lookup, "nvmlDeviceGetUUID")?);
            succeeded("nvmlDeviceGetUUID", call(self.handle, uuid.as_mut_ptr(), uuid.len() as u32))?;
            let call: unsafe extern "C" fn(usize, *mut u32) -> u32 =
                mem::transmute(self.find(lookup, "nvmlDeviceGetIndex")?);
            succeeded("nvmlDeviceGetIndex", call(self.handle, &mut index))?;
        }
        let uuid = CStr::from_bytes_until_nul(&uuid).map_err(|e| e.to_string())?;
        Ok((count, uuid.to_string_lossy().into_owned(), index))
    }

    fn find(&self, lookup: Lookup, name: &str) -> Result<*mut c_void, String> {
        let text = CString::new(name).map_err(|_| "a NUL in a name")?;
        let from = match lookup {
            Lookup::Library => self.library,
            Lookup::Linked => libc::RTLD_DEFAULT,
        };
        // SAFETY: `from` is a handle of the loader, and `text` a C string.
        let found = unsafe { libc::dlsym(from, text.as_ptr().cast::<c_char>()) };
        if found.is_null() { Err(format!("NVML has no {name}")) } else { Ok(found) }
    }

    pub fn memory(&self, lookup: Lookup) -> Result<Memory, String> {
        let (name, mut memory) = ("nvmlDeviceGetMemoryInfo", Memory::default());
        // SAFETY: NVML's header declares this signature, and `memory` is a live value.
        let code = unsafe {
            let call: unsafe extern "C" fn(usize, *mut Memory) -> u32 = mem::transmute(self.find(lookup, name)?);
            call(self.handle, &mut memory)
        };
        succeeded(name, code).map(|()| memory)
    }

    pub fn memory_2(&self, lookup: Lookup) -> Result<Memory2, String> {
        let name = "nvmlDeviceGetMemoryInfo_v2";
        let version = size_of::<Memory2>() as u32 | 2 << 24;
        let mut memory = Memory2 { version, total: 0, reserved: 0, free: 0, used: 0 };
        // SAFETY: NVML's header declares this signature, and `memory` is a live value.
        let code = unsafe {
            let call: unsafe extern "C" fn(usize, *mut Memory2) -> u32 = mem::transmute(self.find(lookup, name)?);
            call(self.handle, &mut memory)
        };
        succeeded(name, code).map(|()| memory)
    }
}

fn succeeded(name: &str, code: u32) -> Result<(), String> {
    if code == 0 { Ok(()) } else { Err(format!("{name}: NVML error {code}")) }
}
