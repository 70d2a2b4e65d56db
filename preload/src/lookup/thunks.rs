//! Thunks for functions of the driver that `coverage/entry-points.tsv` does not list, because the
//! driver is newer than the table. Such functions may submit work that passes no gate. So a program
//! that looks one up gets a thunk. From the first call on, the thunk keeps the program's memory on the
//! GPU. Then it jumps to the function with the caller's registers and stack.

use crate::{
    calls::interop,
    connection::presence,
    driver::detour::{Arguments, thunks},
    sys::errno,
};
use core::{
    ffi::c_void,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The number of thunks: more than the unknown functions that a program is likely to look up. If a
/// program looks up more functions, memory stays on the GPU from that lookup on.
const THUNKS: usize = 64;

/// The function of each thunk, in the order of the lookups; 0 if the thunk is unused. A function keeps
/// its thunk.
static FUNCTIONS: [AtomicUsize; THUNKS] = [const { AtomicUsize::new(0) }; THUNKS];

/// Returns the address that the program gets for an unknown function of the driver.
pub fn guard(function: *mut c_void) -> *mut c_void {
    let address = function as usize;
    for (thunk, place) in FUNCTIONS.iter().enumerate() {
        match place.compare_exchange(0, address, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return thunk_at(thunk) as *mut c_void,
            Err(taken) if taken == address => return thunk_at(thunk) as *mut c_void,
            Err(_) => {}
        }
    }
    errno::preserve(interop::tie);
    function
}

/// Called by a thunk, with an address inside that thunk. Returns the address of the thunk's function.
extern "C" fn on_thunk(inside: usize, _: *const Arguments) -> usize {
    errno::preserve(interop::tie);
    if presence::is_away() {
        presence::wait();
    }
    FUNCTIONS.get(thunk_of(inside)).map_or(0, |function| function.load(Ordering::SeqCst))
}

thunks!(THUNKS, on_thunk);
