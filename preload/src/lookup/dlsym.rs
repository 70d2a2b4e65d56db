//! Lookups of functions by `dlsym` and `cuGetProcAddress`, answered with hooks where they exist.
//!
//! Hooks are found by the *address* of the real function and not by its name, because the driver
//! maps name, version and stream flavour to one of its exports. With drivers 470 to 555 this was
//! checked for every name that `coverage/compare-headers.py` can query, and with driver 580 for all
//! 459 lookups of a PyTorch program. So for any variant, a program gets the hook or the entry
//! ([`entries`](crate::driver::entries)) of exactly that variant. Unknown functions get a thunk (`thunks.rs`).

use super::{
    deepbind,
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
};

/// The hook of `dlsym`. It handles names that begin with `cu`, and the NVML names that have a hook.
/// It passes `RTLD_NEXT` lookups through, because their result depends on the caller's address. The
/// result of an `RTLD_DEFAULT` lookup depends on the caller too, because its scope includes the
/// libraries loaded with the caller. So the hook handles an `RTLD_DEFAULT` lookup of a driver's
/// name only if this library exports the name: every scope contains the exports of this library.
/// All other calls jump to the real function with the caller's return address on the stack.
///
/// A library opened with `dlopen` is always queried with `dlsym` first. So this hook is where we notice
/// that a library opened with `RTLD_DEEPBIND` has loaded the driver ([`deepbind`]).
#[cfg(target_arch = "x86_64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "cmp dword ptr [rip + {watching}], 0",
        "jne 7f",
        "8:",
        "test rsi, rsi",
        "jz 2f",
        "cmp byte ptr [rsi], {c}",
        "jne 4f",
        "cmp byte ptr [rsi + 1], {u}",
        "jne 2f",
        "cmp byte ptr [rsi + 2], {a}", // a capital follows, as in cuInit: excludes cups… and curl…
        "jb 2f",
        "cmp byte ptr [rsi + 2], {z}",
        "ja 2f",
        "cmp rdi, -1", // RTLD_NEXT
        "je 2f",
        "test rdi, rdi", // RTLD_DEFAULT
        "jz 5f",
        "jmp {hooked}",
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
        "ret", // no real dlsym: returns NULL
        "4:",
        "cmp byte ptr [rsi], {n}",
        "jne 2b",
        "cmp byte ptr [rsi + 1], {v}",
        "jne 2b",
        "cmp rdi, -1", // RTLD_NEXT
        "je 2b",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // keeps the stack aligned for the call
        "mov rdi, rsi",
        "call {is_nvml}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jz 2b",
        "jmp {hooked_nvml}",
        "5:",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // keeps the stack aligned for the call
        "mov rdi, rsi",
        "call {is_driver}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test al, al",
        "jz 2b",
        "jmp {hooked}",
        "7:",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // keeps the stack aligned for the call
        "call {look}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp 8b",
        watching = sym deepbind::WATCHING,
        look = sym look,
        c = const b'c',
        u = const b'u',
        a = const b'A',
        z = const b'Z',
        n = const b'n',
        v = const b'v',
        is_nvml = sym nvml::is_hooked,
        is_driver = sym is_hooked,
        hooked_nvml = sym dlsym_of_nvml,
        hooked = sym dlsym_of_driver,
        real = sym c::REAL_DLSYM,
        find = sym c::find_real_dlsym,
    )
}

#[cfg(target_arch = "aarch64")]
#[cfg_attr(not(test), unsafe(no_mangle))]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(_handle: *mut c_void, _name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "adrp x9, {watching}",
        "ldr w9, [x9, #:lo12:{watching}]",
        "cbnz w9, 7f",
        "8:",
        "cbz x1, 2f",
        "ldrb w9, [x1]",
        "cmp w9, #{c}",
        "b.ne 4f",
        "ldrb w9, [x1, #1]",
        "cmp w9, #{u}",
        "b.ne 2f",
        "ldrb w9, [x1, #2]",
        "cmp w9, #{a}", // a capital follows, as in cuInit: excludes cups… and curl…
        "b.lo 2f",
        "cmp w9, #{z}",
        "b.hi 2f",
        "cmn x0, #1", // RTLD_NEXT
        "b.eq 2f",
        "cbz x0, 5f", // RTLD_DEFAULT
        "b {hooked}",
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
        "mov x0, xzr", // no real dlsym: returns NULL
        "ret",
        "4:",
        "cmp w9, #{n}",
        "b.ne 2b",
        "ldrb w9, [x1, #1]",
        "cmp w9, #{v}",
        "b.ne 2b",
        "cmn x0, #1", // RTLD_NEXT
        "b.eq 2b",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "mov x0, x1",
        "bl {is_nvml}",
        "and w9, w0, #1",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbz w9, 2b",
        "b {hooked_nvml}",
        "5:",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "mov x0, x1",
        "bl {is_driver}",
        "and w9, w0, #1",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "cbz w9, 2b",
        "b {hooked}",
        "7:",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {look}",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "b 8b",
        watching = sym deepbind::WATCHING,
        look = sym look,
        c = const b'c',
        u = const b'u',
        a = const b'A',
        z = const b'Z',
        n = const b'n',
        v = const b'v',
        is_nvml = sym nvml::is_hooked,
        is_driver = sym is_hooked,
        hooked_nvml = sym dlsym_of_nvml,
        hooked = sym dlsym_of_driver,
        real = sym c::REAL_DLSYM,
        find = sym c::find_real_dlsym,
    )
}

/// The hook of `dlopen`. The result depends on the caller's address, so the hook jumps to the real
/// function with the caller's return address on the stack.
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
        "ret", // no real dlopen: returns NULL
        "4:",
        "push rdi",
        "push rsi",
        "sub rsp, 8", // keeps the stack aligned for the call
        "call {opening}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "jmp 2b",
        deepbind = const libc::RTLD_DEEPBIND,
        opening = sym on_open,
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
        "mov x0, xzr", // no real dlopen: returns NULL
        "ret",
        "4:",
        "stp x0, x1, [sp, #-32]!",
        "str x30, [sp, #16]",
        "bl {opening}",
        "ldr x30, [sp, #16]",
        "ldp x0, x1, [sp], #32",
        "b 2b",
        deepbind = const libc::RTLD_DEEPBIND,
        opening = sym on_open,
        real = sym c::REAL_DLOPEN,
        find = sym c::find_real_dlopen,
    )
}

/// Called before a library is opened with `RTLD_DEEPBIND`.
extern "C" fn on_open() {
    deepbind::on_open(dlsym as *const () as usize);
}

/// Checks whether a library opened with `RTLD_DEEPBIND` has loaded the driver.
pub extern "C" fn look() {
    deepbind::look(dlsym as *const () as usize);
}

/// Whether this library exports this name of the driver.
unsafe extern "C" fn is_hooked(name: *const c_char) -> bool {
    // SAFETY: `name` is the argument of `dlsym`. `dlsym` has found that it begins with `cu`.
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
