//! What declares a hook. Each is declared once, with the driver's name and signature, and serves direct linking (as an exported
//! symbol), `dlsym` and `cuGetProcAddress`.

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

/// The hooks of one file: lists of functions and of the driver's, which are written as their distances from where they are written.
/// As pointers, the loader would have to relocate all of them in every program, whether it uses CUDA or not.
#[derive(Debug, Clone, Copy)]
pub struct Hooks {
    hooks: *const i32,
    reals: *const i32,
    len: usize,
}

impl Hooks {
    /// # Safety
    /// Both lists are that long and made by [`hooks!`], the first of functions and the second of [`Function`]s.
    pub const unsafe fn new(hooks: unsafe extern "C" fn(), reals: unsafe extern "C" fn(), len: usize) -> Self {
        Self { hooks: hooks as *const i32, reals: reals as *const i32, len }
    }

    pub fn iter(self) -> impl Iterator<Item = Hook> {
        let at = |list: *const i32, index: usize| {
            let entry = list.wrapping_add(index);
            // SAFETY: within the list, as `new` was promised.
            entry.wrapping_byte_offset(unsafe { entry.read() } as isize)
        };
        // SAFETY: a static, as `new` was promised.
        let real = move |index| unsafe { &*at(self.reals, index).cast::<Function>() };
        (0..self.len).map(move |index| Hook { hook: at(self.hooks, index).cast(), real: real(index) })
    }
}

impl Hook {
    /// Whether the driver has this function. Loads the driver.
    pub fn is_there(&self) -> bool {
        self.real.find().is_some()
    }
}

/// The meaning of a NULL stream: the legacy stream, or the calling thread's own in functions with a suffix that says so.
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

    /// A handle that means the same stream in every function.
    #[inline]
    pub fn stream(self, stream: CUstream) -> CUstream {
        if self.per_thread && stream.is_null() { STREAM_PER_THREAD } else { stream }
    }
}

/// The name of a driver function as the loader wants it.
pub const fn c_name(bytes: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes) {
        Ok(name) => name,
        Err(_) => c"",
    }
}

/// Declares hooks: the driver's names that share a signature and a behaviour, the parameters, and the body. In it, `real()`
/// makes the call as the program wrote it, and `flavour` says which default stream the name means.
macro_rules! hooks {
    ($real:ident, $flavour:ident; $( [ $($name:ident)|+ ] $args:tt $body:block )*) => {
        $( $( $crate::driver::hook::hook! { $real $flavour $name $args $body } )+ )*

        pub fn hooks() -> $crate::driver::hook::Hooks {
            /// Not a function, but the list of hooks.
            #[unsafe(naked)]
            unsafe extern "C" fn hooks() {
                core::arch::naked_asm!(
                    $( $( concat!(".long {", stringify!($name), "} - .") ),+ ),*,
                    $( $( $name = sym $name ),+ ),*
                )
            }
            /// The same of the driver's functions.
            #[unsafe(naked)]
            unsafe extern "C" fn reals() {
                core::arch::naked_asm!(
                    $( $( concat!(".long {", stringify!($name), "} - .") ),+ ),*,
                    $( $( $name = sym $name::REAL ),+ ),*
                )
            }
            const LEN: usize = [$( $( stringify!($name) ),+ ),*].len();
            // SAFETY: these are the lists.
            unsafe { $crate::driver::hook::Hooks::new(hooks, reals, LEN) }
        }
    };
}

macro_rules! hook {
    ($real:ident $flavour:ident $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $body:block) => {
        #[allow(non_snake_case)]
        pub mod $name {
            pub static REAL: $crate::driver::Function =
                $crate::driver::Function::new($crate::driver::hook::c_name(concat!(stringify!($name), "\0").as_bytes()));
        }

        // The parameters are the driver's, and so are their requirements.
        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        #[cfg_attr(not(test), unsafe(no_mangle))]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> $crate::driver::types::CUresult {
            #[allow(unused_variables)]
            let $flavour = const { $crate::driver::hook::Flavour::of(stringify!($name)) };
            type Real = unsafe extern "C" fn($($type),*) -> $crate::driver::types::CUresult;
            // SAFETY: the driver's export of this name has this signature.
            let function = |address| unsafe { core::mem::transmute::<usize, Real>(address) };
            #[cold]
            #[inline(never)]
            unsafe extern "C" fn look_up($($arg: $type),*) -> $crate::driver::types::CUresult {
                // SAFETY: as above.
                let function = $name::REAL.address().map(|address| unsafe { core::mem::transmute::<usize, Real>(address) });
                // SAFETY: the arguments are the program's own.
                function.map_or($crate::driver::types::ERROR_NOT_FOUND, |function| unsafe { function($($arg),*) })
            }
            #[allow(unused_variables)]
            let $real = move || {
                $crate::driver::waiting::check(&$name::REAL);
                // Two calls, each of which takes the arguments, so that none has to outlast another.
                // SAFETY: the arguments are the program's own.
                match $name::REAL.known().map(function) {
                    Some(function) => unsafe { function($($arg),*) },
                    None => unsafe { look_up($($arg),*) },
                }
            };
            $body
        }
    };
}

pub(crate) use {hook, hooks};
