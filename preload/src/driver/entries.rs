//! Entries for functions of the driver that this library need not intercept. While the process is
//! off its GPUs, callers of these functions must wait outside the driver
//! ([`crate::connection::presence`]). So a program gets an *entry* for each function, from `dlsym`,
//! from `cuGetProcAddress`, and as an exported symbol. While the entry is open, it jumps to the
//! function. That costs one load and one comparison, and preserves the stack and all registers that
//! may contain arguments.
//!
//! A few functions never block in the driver, and have no entry. `build.rs` lists them.
//!
//! Two ways into the driver stay open while the process is off its GPUs: the private functions that
//! the CUDA runtime obtains from `cuGetExportTable`, and functions that a program finds by
//! searching the driver's file.

use super::{
    detour::{Arguments, detour},
    each_function,
    function::{Entry, MISSING},
    handle_if_loaded, hook, library, look_up,
    types::*,
};
use crate::sys::{errno, once::OnceBox};
use alloc::{boxed::Box, vec::Vec};
use core::ffi::CStr;

/// Names of functions that are not intercepted, each followed by a NUL. The names with entries are
/// first, in the order of the entries. The table has no pointers, so the loader has nothing to
/// relocate.
static NAMES: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/passed-names"));

/// The distance between two entries, in bytes.
const STRIDE: usize = 32;

fn names() -> impl Iterator<Item = &'static CStr> {
    NAMES.split_inclusive(|byte| *byte == 0).filter_map(|name| CStr::from_bytes_with_nul(name).ok())
}

/// Declares the entries, and exports each entry under the name of its function.
macro_rules! entries {
    ($( $name:ident $index:literal )*) => {
        const ENTRIES: usize = [$( $index ),*].len();

        /// The state of each entry, which includes the address of its function.
        static WAYS: [Entry; ENTRIES] = [const { Entry::new() }; ENTRIES];

        /// Not a function. Contains the entries, one after another.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(naked)]
        unsafe extern "C" fn entries() {
            core::arch::naked_asm!(
                $(
                    ".balign {stride}",
                    concat!("mov r11, qword ptr [rip + {ways} + 8 * ", $index, "]"), // r11 is free at a call
                    "cmp r11, {missing}",
                    "jle 2f",
                    "jmp r11",
                    "2:",
                    concat!("mov r11d, ", $index),
                    "jmp {enter}",
                )*
                stride = const STRIDE,
                missing = const MISSING,
                ways = sym WAYS,
                enter = sym enter,
            )
        }

        #[cfg(target_arch = "aarch64")]
        #[unsafe(naked)]
        unsafe extern "C" fn entries() {
            core::arch::naked_asm!(
                $(
                    ".balign {stride}",
                    concat!("adrp x16, {ways} + 8 * ", $index), // x16 is free at a call
                    concat!("ldr x16, [x16, #:lo12:{ways} + 8 * ", $index, "]"),
                    "cmp x16, #{missing}",
                    "b.le 2f",
                    "br x16",
                    "2:",
                    concat!("mov w16, #", $index),
                    "b {enter}",
                )*
                stride = const STRIDE,
                missing = const MISSING,
                ways = sym WAYS,
                enter = sym enter,
            )
        }

        /// Not a function. Contains the distance of each exported name from its place in this list, as in
        /// [`hook`].
        #[unsafe(naked)]
        unsafe extern "C" fn exports() {
            core::arch::naked_asm!($( concat!(".long {", stringify!($name), "} - .") ),*, $( $name = sym exported::$name ),*)
        }

        mod exported {
            use super::{STRIDE, entries};
            use crate::sys::pad::pad_and_jump;
            $(
                #[allow(non_snake_case)]
                #[cfg_attr(not(test), unsafe(no_mangle))]
                #[unsafe(naked)]
                pub unsafe extern "C" fn $name() {
                    pad_and_jump!(entries, $index * STRIDE);
                }
            )*
        }
    };
}

include!(concat!(env!("OUT_DIR"), "/passed-entries.rs"));

detour!(enter, enter_driver);

/// Called by an entry that is not open. Returns the address at which the caller continues.
extern "C" fn enter_driver(entry: usize, _: *const Arguments) -> usize {
    let way = WAYS.get(entry).zip(names().nth(entry));
    let function = way.and_then(|(way, name)| way.enter(|| errno::preserve(|| look_up(name))));
    function.unwrap_or(not_found as *const () as usize)
}

/// The replacement for a function that the driver lacks.
extern "C" fn not_found() -> CUresult {
    ERROR_NOT_FOUND
}

/// Shuts all entries into the driver ([`function`](super::function)), the program's and this
/// library's, or opens them again.
pub fn shut_driver(shut: bool) {
    each_function(|function| function.entry().set_shut(shut));
    hook::all().for_each(|hook| hook.real.entry().set_shut(shut));
    WAYS.iter().for_each(|way| way.set_shut(shut));
}

/// Returns pairs of the address of a driver function and the address of its entry. Looks up all
/// functions.
pub fn pairs() -> impl Iterator<Item = (usize, usize)> {
    let known = WAYS.iter().zip(names()).enumerate();
    known.filter_map(|(index, (way, name))| Some((way.find(|| look_up(name))?, entry_at(index))))
}

fn entry_at(index: usize) -> usize {
    entries as *const () as usize + index * STRIDE
}

/// Whether this library exports an entry with this name.
pub fn has(name: &CStr) -> bool {
    names().take(ENTRIES).any(|known| known == name)
}

/// Returns the number of the entry that this library exports at this address.
pub fn entry_exported_at(address: usize) -> Option<usize> {
    let list = exports as *const i32;
    (0..ENTRIES).find(|index| {
        let place = list.wrapping_add(*index);
        // SAFETY: `index` is within the list.
        (place as usize).wrapping_add_signed(unsafe { place.read() } as isize) == address
    })
}

/// Whether the driver has the function of this entry. Loads the driver.
pub fn is_there(entry: usize) -> bool {
    let way = WAYS.get(entry).zip(names().nth(entry));
    way.is_some_and(|(way, name)| way.find(|| look_up(name)).is_some())
}

/// Whether this driver function needs no entry. Returns true if the driver is not loaded.
pub fn is_nonblocking(function: usize) -> bool {
    static ADDRESSES: OnceBox<Vec<usize>> = OnceBox::new();
    let Some(driver) = handle_if_loaded() else { return true };
    let find = || Box::new(names().skip(ENTRIES).filter_map(|name| library::export(driver, name)).collect());
    ADDRESSES.get_or_init(find).contains(&function)
}
