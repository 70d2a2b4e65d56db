//! Functions of the C library that are looked up on first use, because their symbol version or library
//! has changed over time. Linking to them would tie this library to the C library of the build machine,
//! or load libpthread and libdl into every process.
//!
//! `dlvsym` finds the other functions. It is linked weakly, in a version that every glibc has. In a
//! program without libdl, the address of `dlvsym` is NULL, and `dlsym` is found in the loader's
//! tables instead.

use crate::sys::{elf, once::Address};
use alloc::vec::Vec;
use core::{
    ffi::{CStr, c_char, c_int, c_long, c_void},
    mem::transmute,
    sync::atomic::{AtomicPtr, Ordering},
};

#[cfg(target_arch = "x86_64")]
macro_rules! base_version {
    () => {
        "GLIBC_2.2.5"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! base_version {
    () => {
        "GLIBC_2.17"
    };
}

/// The oldest symbol version of the C library on this architecture.
pub const BASE_VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(base_version!(), "\0").as_bytes()) {
    Ok(version) => version,
    Err(_) => c"",
};

core::arch::global_asm!(
    ".weak nvshare_dlvsym",
    concat!(".symver nvshare_dlvsym, dlvsym@", base_version!()),
    ".pushsection .data.rel.ro.nvshare_dlvsym, \"aw\", @progbits",
    ".balign 8",
    ".globl nvshare_dlvsym_address",
    ".hidden nvshare_dlvsym_address",
    ".type nvshare_dlvsym_address, @object",
    ".size nvshare_dlvsym_address, 8",
    "nvshare_dlvsym_address:",
    ".quad nvshare_dlvsym",
    ".popsection",
);

unsafe extern "C" {
    static nvshare_dlvsym_address:
        Option<unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char) -> *mut c_void>;
    fn __register_atfork(
        prepare: Option<extern "C" fn()>,
        parent: Option<extern "C" fn()>,
        child: Option<extern "C" fn()>,
        library: *mut c_void,
    ) -> c_int;
}

/// Looks up a symbol with `dlvsym` and [`BASE_VERSION`]. Returns NULL if the program has no `dlvsym`.
pub fn dlvsym(handle: *mut c_void, name: &CStr) -> *mut c_void {
    // SAFETY: the loader has written the address, and never changes it.
    match unsafe { nvshare_dlvsym_address } {
        // SAFETY: the names are NUL-terminated, and the caller passes a handle of `dlopen` or a constant.
        Some(dlvsym) => unsafe { dlvsym(handle, name.as_ptr(), BASE_VERSION.as_ptr()) },
        None => core::ptr::null_mut(),
    }
}

/// Returns the address of a symbol that was found, or `None` for NULL.
fn address_of(found: *mut c_void) -> Option<usize> {
    (!found.is_null()).then_some(found as usize)
}

/// Returns the address of the next `dlsym` in the search order: the C library's, or one of another library that
/// interposes `dlsym`; 0 if there is none. `dlvsym` returns the next versioned `dlsym` and not this library's. No
/// known library interposes `dlvsym`. In a program that loaded libdl after its start, `dlvsym` and `dlsym` are
/// outside the search scope, so the loader's tables are searched.
pub fn next_dlsym() -> usize {
    static ADDRESS: Address = Address::new();
    let find = || address_of(dlvsym(libc::RTLD_NEXT, c"dlsym")).or_else(|| elf::of_c_library(c"dlsym"));
    ADDRESS.get(find).unwrap_or(0)
}

/// Returns the address of the `dlopen` that follows this library's in the search order; 0 if there is none. It
/// may belong to a tool that interposes `dlopen`.
pub fn next_dlopen() -> usize {
    static ADDRESS: Address = Address::new();
    let find = || address_of(real_dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr())).or_else(|| elf::of_c_library(c"dlopen"));
    ADDRESS.get(find).unwrap_or(0)
}

/// Returns the C library's own `dlopen`, or `None` if the process has none. This function bypasses
/// all interposers, because an interposer may look up symbols, and would then call this library
/// again.
pub fn dlopen() -> Option<unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void> {
    static ADDRESS: Address = Address::new();
    let find = || address_of(dlvsym(libc::RTLD_NEXT, c"dlopen")).or_else(|| elf::of_c_library(c"dlopen"));
    // SAFETY: the address is `dlopen`'s; 0 is `None`.
    unsafe { transmute(ADDRESS.get(find).unwrap_or(0)) }
}

/// Looks up a symbol as if this library were not loaded. Returns NULL if `dlsym` cannot be found.
pub fn real_dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    type Dlsym = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
    // SAFETY: the address is `dlsym`'s; 0 is `None`.
    match unsafe { transmute::<usize, Option<Dlsym>>(next_dlsym()) } {
        // SAFETY: the arguments are the caller's.
        Some(dlsym) => unsafe { dlsym(handle, name) },
        None => core::ptr::null_mut(),
    }
}

/// Returns the page size. Must not be called inside [`elf::each_object`], because the first call looks
/// up `sysconf`, which takes another lock of the loader.
pub fn page_size() -> usize {
    const LEAST: usize = 4096;
    // SAFETY: `sysconf` accepts any name.
    let size = sysconf().map_or(0, |sysconf| unsafe { sysconf(libc::_SC_PAGESIZE) });
    usize::try_from(size).ok().filter(|size| size.is_power_of_two()).unwrap_or(LEAST)
}

/// Registers a function that runs first in the child of every fork.
pub fn at_fork_in_child(call: extern "C" fn()) {
    // SAFETY: this library is never unloaded, so it needs no handle to unregister the function.
    unsafe { __register_atfork(None, None, Some(call), core::ptr::null_mut()) };
}

/// Registers a function that runs when the program exits, before all functions registered earlier.
pub fn at_exit(call: extern "C" fn(*mut c_void)) {
    if let Some(register) = __cxa_atexit() {
        // SAFETY: this library is never unloaded, so it needs no handle to unregister the function.
        unsafe { register(call, core::ptr::null_mut(), core::ptr::null_mut()) };
    }
}

/// Declares functions that are looked up on first use. A lookup returns `None` if the process does
/// not have the function.
macro_rules! late {
    ($( $name:ident ( $($type:ty),* ) -> $result:ty; )*) => { $(
        pub fn $name() -> Option<unsafe extern "C" fn($($type),*) -> $result> {
            static ADDRESS: Address = Address::new();
            let address = ADDRESS.get(|| look_up(concat!(stringify!($name), "\0")));
            // SAFETY: the C library's function of this name has this signature; 0 is `None`.
            unsafe { transmute(address.unwrap_or(0)) }
        }
    )* };
}

fn look_up(name: &'static str) -> Option<usize> {
    address_of(real_dlsym(libc::RTLD_DEFAULT, name.as_ptr().cast()))
}

late! {
    sysconf(c_int) -> c_long;
    sigprocmask(c_int, *const libc::sigset_t, *mut libc::sigset_t) -> c_int;
    pthread_attr_init(*mut libc::pthread_attr_t) -> c_int;
    pthread_attr_setdetachstate(*mut libc::pthread_attr_t, c_int) -> c_int;
    pthread_attr_setinheritsched(*mut libc::pthread_attr_t, c_int) -> c_int;
    pthread_attr_setschedpolicy(*mut libc::pthread_attr_t, c_int) -> c_int;
    pthread_attr_setschedparam(*mut libc::pthread_attr_t, *const libc::sched_param) -> c_int;
    pthread_attr_setstacksize(*mut libc::pthread_attr_t, usize) -> c_int;
    __pthread_get_minstack(*const libc::pthread_attr_t) -> usize;
    pthread_attr_destroy(*mut libc::pthread_attr_t) -> c_int;
    pthread_create(
        *mut libc::pthread_t, *const libc::pthread_attr_t, extern "C" fn(*mut c_void) -> *mut c_void, *mut c_void
    ) -> c_int;
    pthread_key_create(*mut libc::pthread_key_t, Option<unsafe extern "C" fn(*mut c_void)>) -> c_int;
    __cxa_atexit(extern "C" fn(*mut c_void), *mut c_void, *mut c_void) -> c_int;
    pthread_setspecific(libc::pthread_key_t, *const c_void) -> c_int;
}

/// Returns an environment variable. Always `None` in a setuid program, because its user must not
/// control the library.
pub fn environment(name: &CStr) -> Option<&'static [u8]> {
    unsafe extern "C" {
        fn secure_getenv(name: *const c_char) -> *const c_char;
    }
    // SAFETY: `name` is NUL-terminated; the caller uses the value immediately.
    unsafe {
        let value = secure_getenv(name.as_ptr());
        (!value.is_null()).then(|| CStr::from_ptr(value).to_bytes())
    }
}

/// Returns the C library's pointer to the environment. Programs may change the pointer too, so it is
/// read and written atomically. It is looked up at run time, because linking to it would slow the start
/// of every program that preloads this library.
fn environ() -> Option<&'static AtomicPtr<*mut c_char>> {
    static ADDRESS: Address = Address::new();
    let address = ADDRESS.get(|| look_up("environ\0"))?;
    // SAFETY: the C library's `environ` is such a pointer, and lives until the process ends.
    unsafe { (address as *const AtomicPtr<*mut c_char>).as_ref() }
}

/// Iterates over the variables of an environment.
fn variables(environment: *mut *mut c_char) -> impl Iterator<Item = (*mut c_char, &'static CStr)> {
    // SAFETY: `environment` is NULL, or a NULL-terminated array of NUL-terminated strings.
    let entry = move |at| unsafe {
        let entry = if environment.is_null() { environment.cast() } else { *environment.add(at) };
        (!entry.is_null()).then(|| (entry, CStr::from_ptr(entry)))
    };
    (0..).map_while(entry)
}

fn value_of<'a>(entry: &'a CStr, name: &CStr) -> Option<&'a [u8]> {
    entry.to_bytes().strip_prefix(name.to_bytes())?.strip_prefix(b"=")
}

/// Returns an environment variable as the driver sees it, even in a setuid program.
pub fn variable(name: &CStr) -> Option<&'static [u8]> {
    variables(environ()?.load(Ordering::Acquire)).find_map(|(_, entry)| value_of(entry, name))
}

/// Sets a variable in a copy of the environment, and makes the copy current. The old environment is
/// never freed or changed, so a concurrent reader sees either the old or the new environment.
pub fn set_environment(name: &CStr, value: &[u8]) {
    let Some(environ) = environ() else { return };
    let mut entry = Vec::with_capacity(name.to_bytes().len() + value.len() + 2);
    entry.extend_from_slice(name.to_bytes());
    entry.push(b'=');
    entry.extend_from_slice(value);
    entry.push(0);
    let others = variables(environ.load(Ordering::Acquire)).filter(|(_, other)| value_of(other, name).is_none());
    let mut all: Vec<*mut c_char> = others.map(|(pointer, _)| pointer).collect();
    all.push(entry.leak().as_mut_ptr().cast());
    all.push(core::ptr::null_mut());
    environ.store(all.leak().as_mut_ptr(), Ordering::Release);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_a_variable_replaces_it_and_keeps_other_variables() {
        let name = c"NVSHARE_TEST_VARIABLE";
        for value in [b"one".as_slice(), b"", b"GPU-1,GPU-2"] {
            let others = std::env::vars_os().filter(|(other, _)| *other != *"NVSHARE_TEST_VARIABLE").count();
            set_environment(name, value);
            assert_eq!((environment(name), variable(name)), (Some(value), Some(value)));
            let all = std::env::vars_os().count();
            assert_eq!(all, others + 1);
        }
        assert!(std::env::var_os("PATH").is_some());
    }
}
