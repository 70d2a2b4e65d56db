//! The interposed functions: tables of hooks, and the parsing of their arguments. [`crate::calls`]
//! and [`crate::copies`] implement the hooks. No file in this directory uses another.
//!
//! - [`launch`]: launches and memsets, which wait at the gate. [`copies`]: copies, which wait there
//!   too.
//! - [`memory`]: allocations, frees and queries about addresses. [`memory_info`]: queries about the
//!   size of memory.
//! - [`pools`]: memory pools. [`arrays`]: arrays.
//! - [`vmm`]: memory that the program reserves, creates and maps itself.
//! - [`device`]: queries about a GPU. [`reservation`]: calls in which the driver allocates GPU
//!   memory for itself.
//! - [`context`]: initialisation, contexts, captures, lookups.
//! - [`checkpoints`]: calls that checkpoint other processes.
//! - [`ipc`]: memory shared with other processes. [`interop`]: other APIs. Their work passes no
//!   hook.
//!
//! Each hook is declared once (`hooks!`), with the name and the signature of the driver function. The
//! declaration serves direct linking (as an exported symbol), `dlsym` and `cuGetProcAddress`.
//!
//! A parameter of a type like `Option<&Copy3D>` is a pointer that is NULL or valid: the driver
//! dereferences it too, and rejects NULL.
//!
//! `coverage/entry-points.tsv` lists all entry points of the driver, with the reason why each is
//! hooked or not.

/// Declares hooks. Each declaration contains the parameters, the body, and the names of all driver
/// functions with the same signature and behaviour. In the body, `real()` makes the program's
/// original call, and `flavour` is the meaning of a NULL stream in that call.
///
/// The body runs only while this library is active, and preserves `errno`, which belongs to the program.
/// Otherwise the hook only makes the program's call. With `always`, the body itself decides both: calls
/// that submit or await work must not become slower, and some hooks work before CUDA is initialised.
macro_rules! hooks {
    (always $real:ident, $flavour:ident; $($hooks:tt)*) => {
        hooks! { @ always $real $flavour $($hooks)* }
    };
    (@ $when:ident $real:ident $flavour:ident $( [ $($name:ident)|+ ] $args:tt $body:block )*) => {
        $( $( hook! { $when $real $flavour $name $args $body } )+ )*

        core::arch::global_asm!(
            ".pushsection nvshare_hooks, \"aR\", @progbits",
            ".balign 4",
            $( $( concat!(".long {} - . // ", stringify!($name)), ".long {} - ." ),+ ),*,
            ".popsection",
            $( $( sym $name, sym $name::REAL ),+ ),*
        );
    };
    ($real:ident, $flavour:ident; $($hooks:tt)*) => {
        hooks! { @ active $real $flavour $($hooks)* }
    };
}

/// Runs the body of a hook.
macro_rules! body {
    (always $real:ident $body:block) => {
        $body
    };
    (active $real:ident $body:block) => {
        if $crate::submit::is_active() { $crate::sys::errno::preserve(move || $body) } else { $real() }
    };
}

macro_rules! hook {
    ($when:ident $real:ident $flavour:ident $name:ident ( $($arg:ident : $type:ty),* $(,)? ) $body:block) => {
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
            body!($when $real $body)
        }
        }
    };
}

mod arrays;
mod checkpoints;
mod context;
mod copies;
mod device;
mod interop;
mod ipc;
mod launch;
mod memory;
mod memory_info;
mod pools;
mod reservation;
mod vmm;
