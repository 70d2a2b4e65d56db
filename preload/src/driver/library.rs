//! A shared library that the program may have loaded, and its handle.

use crate::sys::{c, elf};
use core::{
    ffi::{CStr, c_int, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};

#[derive(Debug)]
pub struct Library {
    name: &'static CStr,
    /// 0 if unknown.
    handle: AtomicUsize,
}

impl Library {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, handle: AtomicUsize::new(0) }
    }

    /// Returns the handle if the program has loaded the library. The handle stays open, so the library is
    /// never unloaded after that.
    pub fn handle_if_loaded(&self) -> Option<*mut c_void> {
        self.open(libc::RTLD_NOLOAD)
    }

    /// Returns the handle. Loads the library if necessary.
    pub fn load(&self) -> Option<*mut c_void> {
        self.open(0)
    }

    fn open(&self, flag: c_int) -> Option<*mut c_void> {
        let known = self.handle.load(Ordering::Acquire);
        if known != 0 {
            return Some(known as *mut c_void);
        }
        // SAFETY: the name is NUL-terminated, and the flags are valid.
        let handle = unsafe { c::dlopen()?(self.name.as_ptr(), libc::RTLD_LAZY | flag) };
        if handle.is_null() {
            return None;
        }
        self.handle.store(handle as usize, Ordering::Release);
        Some(handle)
    }
}

/// Returns the address of an exported symbol.
pub fn export(library: *mut c_void, name: &CStr) -> Option<usize> {
    // SAFETY: the handle is from `dlopen` and never closed, so the library stays loaded.
    unsafe { elf::symbol(library, name) }
}

/// Returns an address inside the library.
pub fn inside(library: *mut c_void) -> usize {
    // SAFETY: the handle is from `dlopen` and never closed, so the library stays loaded.
    unsafe { elf::inside(library) }
}
