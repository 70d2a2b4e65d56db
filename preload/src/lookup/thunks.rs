//! Thunks for functions of the driver that `coverage/entry-points.tsv` does not list, because the
//! driver is newer than the table. Such functions may submit work that passes no gate. So a program
//! that looks one up gets a thunk. From the first call on, the thunk keeps the program's memory on the
//! GPU. Then it jumps to the function with the caller's registers and stack.

use crate::driver::detour::detour;
use crate::{calls::interop, connection::presence, sys::errno};
use core::{
    arch::naked_asm,
    ffi::c_void,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The number of thunks: more than the unknown functions that a program is likely to look up. If a
/// program looks up more functions, memory stays on the GPU from that lookup on.
const THUNKS: usize = 64;

/// The distance between two thunks, in bytes.
const STRIDE: usize = 16;

/// The function of each thunk, in the order of the lookups; 0 if the thunk is unused. A function keeps
/// its thunk.
static FUNCTIONS: [AtomicUsize; THUNKS] = [const { AtomicUsize::new(0) }; THUNKS];

/// Returns the address that the program gets for an unknown function of the driver.
pub fn guard(function: *mut c_void) -> *mut c_void {
    let address = function as usize;
    for (thunk, place) in FUNCTIONS.iter().enumerate() {
        match place.compare_exchange(0, address, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return thunk_at(thunk),
            Err(taken) if taken == address => return thunk_at(thunk),
            Err(_) => {}
        }
    }
    errno::preserve(interop::tie);
    function
}

fn thunk_at(thunk: usize) -> *mut c_void {
    (thunks as *const () as usize + thunk * STRIDE) as *mut c_void
}

/// Called by a thunk, with an address inside that thunk. Returns the address of the thunk's function.
extern "C" fn on_thunk(inside: usize) -> usize {
    errno::preserve(interop::tie);
    if presence::is_away() {
        presence::wait();
    }
    let thunk = inside.wrapping_sub(thunks as *const () as usize) / STRIDE;
    FUNCTIONS.get(thunk).map_or(0, |function| function.load(Ordering::SeqCst))
}

detour!(enter, on_thunk);

/// The thunks, one after another.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn thunks() {
    naked_asm!(
        ".rept {thunks}",
        ".balign {stride}",
        "lea r11, [rip]", // identifies the thunk by its own address; r11 is free at a call
        "jmp {enter}",
        ".endr",
        thunks = const THUNKS,
        stride = const STRIDE,
        enter = sym enter,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn thunks() {
    naked_asm!(
        ".rept {thunks}",
        ".balign {stride}",
        "adr x16, .", // identifies the thunk by its own address; x16 is free at a call
        "b {enter}",
        ".endr",
        thunks = const THUNKS,
        stride = const STRIDE,
        enter = sym enter,
    )
}
