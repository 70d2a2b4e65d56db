//! Functions of the driver that `coverage/entry-points.tsv` does not know, because the driver is newer. They may submit work that
//! passes no gate. So a program that looks one up is given a thunk, which keeps the program's memory on the GPU from the first
//! call on and then jumps to the function, with the caller's registers and stack.

use crate::{
    driver::{self, library},
    hooks::interop,
    sys::{
        errno,
        sync::{OnceLock, Rank},
    },
};
use alloc::vec::Vec;
use core::{
    arch::naked_asm,
    ffi::{CStr, c_void},
    sync::atomic::{AtomicUsize, Ordering},
};

/// As many as a program is likely to look up. Behind them memory stays from the look-up on.
const THUNKS: usize = 64;

/// The distance between two thunks, in bytes.
const STRIDE: usize = 16;

/// The function of each thunk, in the order in which they were looked up; 0 if it has none yet. A function keeps its thunk.
static FUNCTIONS: [AtomicUsize; THUNKS] = [const { AtomicUsize::new(0) }; THUNKS];

/// Names of functions that pass, each with a NUL behind it. No pointers, so that loading them costs nothing.
static PASSED: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/passed-names"));

/// What the program is given for a function of the driver that has no hook.
pub fn guarded(function: *mut c_void) -> *mut c_void {
    let address = function as usize;
    if passed().is_none_or(|passed| passed.binary_search(&address).is_ok()) {
        return function;
    }
    for (thunk, place) in FUNCTIONS.iter().enumerate() {
        match place.compare_exchange(0, address, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => return thunk_at(thunk),
            Err(taken) if taken == address => return thunk_at(thunk),
            Err(_) => {}
        }
    }
    errno::preserved(interop::tie);
    function
}

fn thunk_at(thunk: usize) -> *mut c_void {
    (thunks as *const () as usize + thunk * STRIDE) as *mut c_void
}

/// The addresses of the functions that pass, sorted. Found when the driver is loaded; `None` before.
fn passed() -> Option<&'static [usize]> {
    static ADDRESSES: OnceLock<Vec<usize>> = OnceLock::new(Rank::PassedFunctions);
    if ADDRESSES.get().is_none() {
        let driver = driver::loaded()?;
        let names = PASSED.split_inclusive(|byte| *byte == 0).filter_map(|name| CStr::from_bytes_with_nul(name).ok());
        let mut addresses: Vec<_> = names.filter_map(|name| library::export(driver, name)).collect();
        addresses.sort_unstable();
        let _ = ADDRESSES.set(addresses);
    }
    ADDRESSES.get().map(Vec::as_slice)
}

/// Called by a thunk, with an address inside of it. Returns the address of its function.
extern "C" fn called(inside: usize) -> usize {
    errno::preserved(interop::tie);
    let thunk = inside.wrapping_sub(thunks as *const () as usize) / STRIDE;
    FUNCTIONS.get(thunk).map_or(0, |function| function.load(Ordering::SeqCst))
}

/// The thunks, one behind the other.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn thunks() {
    naked_asm!(
        ".rept {thunks}",
        ".balign {stride}",
        "lea r11, [rip]", // the thunk by its own address; the register is free at a call
        "jmp {enter}",
        ".endr",
        thunks = const THUNKS,
        stride = const STRIDE,
        enter = sym enter,
    )
}

/// Saves all registers that may hold arguments, whatever these are.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    naked_asm!(
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "push rax",
        "sub rsp, 128", // keeps the stack aligned for the call
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov rdi, r11",
        "call {called}",
        "mov r11, rax",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop rax",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "jmp r11",
        called = sym called,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn thunks() {
    naked_asm!(
        ".rept {thunks}",
        ".balign {stride}",
        "adr x16, .", // as above
        "b {enter}",
        ".endr",
        thunks = const THUNKS,
        stride = const STRIDE,
        enter = sym enter,
    )
}

#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn enter() {
    naked_asm!(
        "stp x29, x30, [sp, #-224]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "str x8, [sp, #80]",
        "stp q0, q1, [sp, #96]",
        "stp q2, q3, [sp, #128]",
        "stp q4, q5, [sp, #160]",
        "stp q6, q7, [sp, #192]",
        "mov x0, x16",
        "bl {called}",
        "mov x16, x0",
        "ldp q6, q7, [sp, #192]",
        "ldp q4, q5, [sp, #160]",
        "ldp q2, q3, [sp, #128]",
        "ldp q0, q1, [sp, #96]",
        "ldr x8, [sp, #80]",
        "ldp x6, x7, [sp, #64]",
        "ldp x4, x5, [sp, #48]",
        "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #224",
        "br x16",
        called = sym called,
    )
}
