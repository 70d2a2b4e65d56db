//! The list of hooks, and the meaning of a NULL stream in each. [`crate::hooks`] declares the hooks.

use crate::driver::{
    Function,
    types::{CUstream, STREAM_PER_THREAD},
};
use core::ffi::CStr;

/// One interposed function.
#[derive(Debug)]
pub struct Hook {
    pub hook: *const (),
    pub real: &'static Function,
}

/// A hook and the driver's [`Function`], each as its distance from the field that stores the
/// distance. The loader would have to relocate pointers in every program, even in one that does not
/// use CUDA.
#[repr(C)]
struct Distances {
    hook: i32,
    real: i32,
}

unsafe extern "C" {
    // The linker's symbols for the section that contains the entries of all uses of `hooks!`.
    #[link_name = "__start_nvshare_hooks"]
    static FIRST: Distances;
    #[link_name = "__stop_nvshare_hooks"]
    static END: Distances;
}

// Without this directive, the library would export the two symbols.
core::arch::global_asm!(".hidden __start_nvshare_hooks", ".hidden __stop_nvshare_hooks");

/// Returns every hook. The linker builds the list, so that modules that use it need not be in a layer
/// above all hooks.
pub fn all() -> impl Iterator<Item = Hook> {
    let (first, end) = (&raw const FIRST, &raw const END);
    let len = (end as usize - first as usize) / size_of::<Distances>();
    (0..len).map(move |index| {
        let entry = first.wrapping_add(index);
        // SAFETY: `entry` is between the beginning and the end of the section, which contains only entries.
        let distances = unsafe { &*entry };
        let target = |distance: &i32| (&raw const *distance).wrapping_byte_offset(*distance as isize);
        // SAFETY: `hooks!` has written the distance of a static `Function` here.
        Hook { hook: target(&distances.hook).cast(), real: unsafe { &*target(&distances.real).cast() } }
    })
}

impl Hook {
    /// Whether the driver has this function. Loads the driver.
    pub fn is_there(&self) -> bool {
        self.real.find().is_some()
    }
}

/// The meaning of a NULL stream: the legacy stream or, in functions with a per-thread suffix, the
/// calling thread's stream.
#[derive(Debug, Clone, Copy)]
pub struct Flavour {
    pub per_thread: bool,
}

impl Flavour {
    pub const fn of(name: &str) -> Self {
        let name = name.as_bytes();
        let per_thread = matches!(name, [.., b'_', b'p', b't', b's' | b'd', b'z' | b's']);
        Self { per_thread }
    }

    /// Returns a handle that denotes the same stream in every function.
    #[inline]
    pub fn stream(self, stream: CUstream) -> CUstream {
        if self.per_thread && stream.is_null() { STREAM_PER_THREAD } else { stream }
    }
}

/// Returns the name of a driver function as a C string.
pub const fn c_name(bytes: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes) {
        Ok(name) => name,
        Err(_) => c"",
    }
}
