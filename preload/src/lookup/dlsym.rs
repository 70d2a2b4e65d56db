//! Lookups of functions by `dlsym` and `cuGetProcAddress`, answered with hooks where they exist.
//!
//! Hooks are found by the *address* of the real function and not by its name, because the driver
//! maps name, version and stream flavour to one of its exports. With drivers 470 to 555 this was
//! checked for every name that `coverage/compare-headers.py` can query, and with driver 580 for all
//! 459 lookups of a PyTorch program. So for any variant, a program gets the hook or the entry
//! ([`entries`](crate::driver::entries)) of exactly that variant. Unknown functions get a thunk (`thunks.rs`).

use super::{
    deepbind, nccl,
    table::{self, answer},
};
use crate::{
    driver::{
        self, entries,
        hook::{self, Hook},
    },
    nvml,
    sys::c,
};
use core::{
    ffi::{CStr, c_char, c_int, c_void},
    ptr,
    sync::atomic::Ordering,
};

/// Declares a hook whose result depends on the caller's address. The hook passes its two arguments to
/// `$target: extern "C" fn(…) -> usize`, and continues at the returned address with the caller's
/// arguments and return address. If the address is 0, the hook returns NULL.
macro_rules! relay {
    ($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*), $target:path) => {
        $(#[$doc])*
        #[cfg_attr(not(test), unsafe(no_mangle))]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> *mut c_void {
            #[cfg(target_arch = "x86_64")]
            core::arch::naked_asm!(
                ".byte 0x66, 0x0f, 0x1f, 0x84, 0, 0, 0, 0, 0", // see `sys::pad`
                ".byte 0x0f, 0x1f, 0x44, 0, 0",
                "push rdi",
                "push rsi",
                "sub rsp, 8", // keeps the stack aligned for the call
                "call {target}",
                "add rsp, 8",
                "pop rsi",
                "pop rdi",
                "test rax, rax",
                "jz 2f",
                "jmp rax",
                "2:",
                "ret",
                target = sym $target,
            );
            #[cfg(target_arch = "aarch64")]
            core::arch::naked_asm!(
                "nop",
                "nop",
                "nop",
                "nop",
                "stp x0, x1, [sp, #-32]!",
                "str x30, [sp, #16]",
                "bl {target}",
                "mov x9, x0",
                "ldr x30, [sp, #16]",
                "ldp x0, x1, [sp], #32",
                "cbz x9, 2f",
                "br x9",
                "2:",
                "mov x0, xzr",
                "ret",
                target = sym $target,
            );
        }
    };
}

relay! {
    /// The hook of `dlsym`. It handles names that begin with `cu`, and the NVML names that have a hook.
    /// It passes `RTLD_NEXT` lookups through, because their result depends on the caller's address. The
    /// result of an `RTLD_DEFAULT` lookup depends on the caller too, because its scope includes the
    /// libraries loaded with the caller. So the hook handles an `RTLD_DEFAULT` lookup of a driver's
    /// name only if this library exports the name: every scope contains the exports of this library.
    /// All other calls jump to the real function with the caller's return address on the stack.
    ///
    /// A library opened with `dlopen` is always queried with `dlsym` first. So this hook is where we notice
    /// that a library opened with `RTLD_DEEPBIND` has loaded the driver ([`deepbind`]).
    dlsym(_handle: *mut c_void, _name: *const c_char), target_of_dlsym
}

relay! {
    /// The hook of `dlopen`.
    dlopen(_file: *const c_char, _flags: c_int), target_of_dlopen
}

/// Returns the function that makes this call of `dlsym`, or 0 if there is none. For most names, this
/// function calls no other: a program may look up functions while the loader still relocates libraries.
extern "C" fn target_of_dlsym(handle: *mut c_void, name: *const c_char) -> usize {
    if deepbind::WATCHING.load(Ordering::Relaxed) != 0 {
        deepbind::look(dlsym as *const () as usize);
    }
    // SAFETY: the caller passes NULL or a string, which ends with NUL.
    if unsafe { nccl::is_due(name) } {
        nccl::look();
    }
    // SAFETY: the caller passes NULL or a string, which ends with NUL. Later bytes are not read.
    let byte = |index| unsafe { name.add(index).read() } as u8;
    if !name.is_null() && handle != libc::RTLD_NEXT {
        // A capital follows, as in cuInit: excludes cups… and curl…
        let is_drivers = byte(0) == b'c' && byte(1) == b'u' && byte(2).is_ascii_uppercase();
        // SAFETY: `name` is the argument of `dlsym`, and not NULL.
        if is_drivers && (handle != libc::RTLD_DEFAULT || unsafe { is_hooked(name) }) {
            return dlsym_of_driver as *const () as usize;
        }
        // SAFETY: `name` is the argument of `dlsym`, and not NULL.
        if byte(0) == b'n' && byte(1) == b'v' && unsafe { nvml::is_hooked(name) } {
            return dlsym_of_nvml as *const () as usize;
        }
    }
    c::next_dlsym()
}

/// Returns the function that makes this call of `dlopen`, or 0 if there is none.
extern "C" fn target_of_dlopen(_file: *const c_char, flags: c_int) -> usize {
    nccl::on_open();
    if flags & libc::RTLD_DEEPBIND != 0 {
        deepbind::on_open(dlsym as *const () as usize);
    }
    c::next_dlopen()
}

/// Checks whether a library opened with `RTLD_DEEPBIND` has loaded the driver, and looks for NCCL.
pub fn look() {
    deepbind::look(dlsym as *const () as usize);
    nccl::look();
}

/// Whether this library exports this name of the driver.
unsafe fn is_hooked(name: *const c_char) -> bool {
    // SAFETY: `name` is the argument of `dlsym`: `target_of_dlsym` has found that it begins with `cu`.
    let name = unsafe { CStr::from_ptr(name) };
    hook::all().any(|hook| hook.real.name() == name) || entries::has(name)
}

/// Handles `dlsym` for a name that may be the driver's. Returns the hook if the real function has one.
unsafe extern "C" fn dlsym_of_driver(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // This check precedes the lookup, because a later check would overwrite the lookup's error,
    // which the program may query with `dlerror`.
    let is_loaded = driver::handle_if_loaded().is_some();
    let found = c::real_dlsym(handle, name);
    if found.is_null() {
        return found;
    }
    let is_nowhere = |hook: Hook| ptr::eq(hook.hook, found.cast()) && !(is_loaded && hook.is_there());
    let entry_of_nothing =
        || entries::entry_exported_at(found as usize).is_some_and(|entry| !(is_loaded && entries::is_there(entry)));
    if hook::all().any(is_nowhere) || entry_of_nothing() {
        // The lookup has found the name only because this library exports it. Without this library, the name
        // would not exist, unless another library defines it. So the lookup is repeated behind this library.
        return c::real_dlsym(libc::RTLD_NEXT, name);
    }
    // SAFETY: `name` is the argument of `dlsym`.
    let name = unsafe { CStr::from_ptr(name) };
    match driver::handle_if_loaded().filter(|driver| driver::library::export(*driver, name) == Some(found as usize)) {
        Some(_) => answer(found),
        None => table::hook_of(found), // not a function of the driver, or already a hook
    }
}

/// Handles `dlsym` for an NVML name that has a hook.
unsafe extern "C" fn dlsym_of_nvml(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    let is_there = nvml::is_loaded();
    let found = c::real_dlsym(handle, name);
    if found.is_null() {
        return found;
    }
    if !is_there && nvml::is_hook(found as usize) {
        return c::real_dlsym(libc::RTLD_NEXT, name);
    }
    nvml::hook_of(found)
}
