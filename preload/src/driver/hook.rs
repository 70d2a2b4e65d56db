//! The declaration of hooks. Each hook is declared once, with the name and the signature of the
//! driver function. The declaration serves direct linking (as an exported symbol), `dlsym` and
//! `cuGetProcAddress`.

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

/// Declares hooks. Each declaration contains the parameters, the body, and the names of all driver
/// functions with the same signature and behaviour. In the body, `real()` makes the program's
/// original call, and `flavour` is the meaning of a NULL stream in that call.
macro_rules! hooks {
    ($real:ident, $flavour:ident; $( [ $($name:ident)|+ ] $args:tt $body:block )*) => {
        $( $( $crate::driver::hook::hook! { $real $flavour $name $args $body } )+ )*

        core::arch::global_asm!(
            ".pushsection nvshare_hooks, \"aR\", @progbits",
            ".balign 4",
            $( $( concat!(".long {} - . // ", stringify!($name)), ".long {} - ." ),+ ),*,
            ".popsection",
            $( $( sym $name, sym $name::REAL ),+ ),*
        );
    };
}

macro_rules! hook {
    ($real:ident $flavour:ident $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $body:block) => {
        #[allow(non_snake_case)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        #[allow(clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::driver::types::CUresult {
            $crate::sys::pad::pad_and_jump!($name::hook);
        }

        #[allow(non_snake_case)]
        pub mod $name {
            #[allow(unused_imports)]
            use super::*;

            pub static REAL: $crate::driver::Function =
                $crate::driver::Function::new($crate::driver::hook::c_name(concat!(stringify!($name), "\0").as_bytes()));

        // The driver defines the parameters and the requirements on them.
        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        pub unsafe extern "C" fn hook($($arg: $type),*) -> $crate::driver::types::CUresult {
            #[allow(unused_variables)]
            let $flavour = const { $crate::driver::hook::Flavour::of(stringify!($name)) };
            type Real = unsafe extern "C" fn($($type),*) -> $crate::driver::types::CUresult;
            // SAFETY: the driver's export of this name has this signature.
            let function = |address| unsafe { core::mem::transmute::<usize, Real>(address) };
            #[cold]
            #[inline(never)]
            unsafe extern "C" fn look_up($($arg: $type),*) -> $crate::driver::types::CUresult {
                // SAFETY: the driver's export of this name has this signature.
                let function = $name::REAL.address().map(|address| unsafe { core::mem::transmute::<usize, Real>(address) });
                // SAFETY: the arguments are the program's own.
                function.map_or($crate::driver::types::ERROR_NOT_FOUND, |function| unsafe { function($($arg),*) })
            }
            #[allow(unused_variables)]
            let $real = move || {
                $crate::driver::waits::check(&$name::REAL); // does nothing in release builds
                // Each of the two calls consumes the arguments, so no argument has to be kept across a call.
                match $name::REAL.open_address().map(function) {
                    // SAFETY: the arguments are the program's own.
                    Some(function) => unsafe { function($($arg),*) },
                    // SAFETY: the arguments are the program's own.
                    None => unsafe { look_up($($arg),*) },
                }
            };
            $body
        }
        }
    };
}

pub(crate) use {hook, hooks};
