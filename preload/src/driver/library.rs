//! A shared library that the program may have loaded, and its handle.

use crate::sys::{c, elf, once::Address};
use core::ffi::{CStr, c_int, c_void};

#[derive(Debug)]
pub struct Library {
    name: &'static CStr,
    handle: Address,
}

impl Library {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, handle: Address::new() }
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
        let open = || {
            // SAFETY: the name is NUL-terminated, and the flags are valid.
            let handle = unsafe { c::dlopen()?(self.name.as_ptr(), libc::RTLD_LAZY | flag) };
            (!handle.is_null()).then_some(handle as usize)
        };
        self.handle.get(open).map(|handle| handle as *mut c_void)
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
