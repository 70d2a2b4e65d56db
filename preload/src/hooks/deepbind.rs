//! Libraries that are opened with `RTLD_DEEPBIND`. They look for names in their own libraries before those that the program
//! started with, and so do not find the hooks.
//!
//! From the first such call on, what they would find instead leads to the hooks ([`redirect`]): the C library's `dlsym` at
//! once, so before anything of the library runs, and the functions of the driver and of NVML as soon as these are loaded.
//! That is so before the call if the program uses CUDA already; at its end, if the library brings the driver with it; then
//! whoever opened the library looks something up in it, and that look-up is where it is noticed.

use crate::{
    calls::interop,
    driver::{self, redirect},
    env::settings,
    gate,
    hooks::{lookup, nvml},
    sys::{c, elf, errno},
};
use core::{
    ffi::{c_char, c_int, c_void},
    sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering},
};
use rustix::{process::getpid, thread::gettid};

/// The process that has opened such a library and not loaded all libraries with hooks since; 0 if there is none. The hook of
/// `dlsym` reads it. A child goes on only once it opens one itself, since the loader's lock that a look takes stays locked in a
/// child if another thread had it.
pub static WATCHING: AtomicI32 = AtomicI32::new(0);

/// A library whose functions have hooks has been dealt with.
static C_LIBRARY: AtomicBool = AtomicBool::new(false);
static DRIVER: AtomicBool = AtomicBool::new(false);
static NVML: AtomicBool = AtomicBool::new(false);

/// `dlopen`, whose meaning depends on the caller's address: jumps to the real function with that on the stack.
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(_file: *const c_char, _flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "test esi, {deepbind}",
        "jnz 4f",
        "2:",
        "mov rax, qword ptr [rip + {real}]",
        "test rax, rax",
        "jz 3f",
        "jmp rax",
        "3:",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // keeps the stack aligned for the call
        "call {find}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jz 6f",
        "jmp rax",
        "6:",
        "ret", // there is none, so nothing is opened
        "4:",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // as above
        "call {opening}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp 2b",
        deepbind = const libc::RTLD_DEEPBIND,
        opening = sym opening,
        real = sym c::REAL_DLOPEN,
        find = sym c::find_real_dlopen,
    )
}

#[cfg(target_arch = "aarch64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlopen(_file: *const c_char, _flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "tst w1, #{deepbind}",
        "b.ne 4f",
        "2:",
        "adrp x9, {real}",
        "ldr x9, [x9, #:lo12:{real}]",
        "cbz x9, 3f",
        "br x9",
        "3:",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {find}",
        "mov x9, x0",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbz x9, 6f",
        "br x9",
        "6:",
        "mov x0, xzr", // there is none, so nothing is opened
        "ret",
        "4:",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {opening}",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "b 2b",
        deepbind = const libc::RTLD_DEEPBIND,
        opening = sym opening,
        real = sym c::REAL_DLOPEN,
        find = sym c::find_real_dlopen,
    )
}

/// A library is about to be opened with `RTLD_DEEPBIND`.
extern "C" fn opening() {
    errno::preserved(|| {
        if settings::is_disabled() || are_all_redirected() {
            return;
        }
        WATCHING.store(getpid().as_raw_pid(), Ordering::SeqCst);
        redirect_what_is_loaded();
        if redirect::was_refused() && gate::is_active() {
            interop::tie(); // memory that is away must return before the library can use it
        }
    });
}

/// Redirects what has been loaded by now, if such a library was opened.
pub extern "C" fn look() {
    if WATCHING.load(Ordering::SeqCst) == getpid().as_raw_pid() {
        errno::preserved(redirect_what_is_loaded);
    }
}

fn redirect_what_is_loaded() {
    /// What had been loaded at the last look.
    static SEEN: AtomicU64 = AtomicU64::new(0);
    /// A thread that is here. Where `malloc` is a library's that looks something up each time, it would come here again.
    static BUSY: AtomicI32 = AtomicI32::new(0);
    let loaded = elf::loaded_so_far();
    if loaded == Some(SEEN.load(Ordering::SeqCst)) {
        return;
    }
    let me = gettid().as_raw_pid();
    if BUSY.load(Ordering::SeqCst) == me {
        return;
    }
    let is_noted = BUSY.compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    redirect_each();
    SEEN.store(loaded.unwrap_or(0), Ordering::SeqCst);
    if is_noted {
        BUSY.store(0, Ordering::SeqCst);
    }
}

fn redirect_each() {
    once(&C_LIBRARY, || {
        redirect::redirect_in_c_library(c"dlsym", lookup::dlsym as *const () as usize);
        true
    });
    once(&DRIVER, || {
        let (Some(driver), Some(table)) = (driver::loaded(), lookup::table()) else { return false };
        driver::resolve_all(); // afterwards their names lead to hooks
        redirect::redirect(driver::library::inside(driver), table);
        true
    });
    once(&NVML, || {
        let Some((nvml, table)) = nvml::table() else { return false };
        redirect::redirect(driver::library::inside(nvml), &table);
        true
    });
    if are_all_redirected() {
        WATCHING.store(0, Ordering::SeqCst);
    }
}

/// Does it unless it has been done. While one thread does it another does the same, rather than go on before it is done.
fn once(done: &AtomicBool, action: impl FnOnce() -> bool) {
    if !done.load(Ordering::SeqCst) && action() {
        done.store(true, Ordering::SeqCst);
    }
}

fn are_all_redirected() -> bool {
    [&C_LIBRARY, &DRIVER, &NVML].iter().all(|done| done.load(Ordering::SeqCst))
}
