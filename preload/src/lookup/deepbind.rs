//! Libraries opened with `RTLD_DEEPBIND`. They search their own dependencies before the libraries of
//! the program, and so do not find the hooks.
//!
//! From the first such `dlopen` on, the functions that such libraries would find are redirected to
//! the hooks ([`redirect`]). The C library's `dlsym` is redirected immediately, before any code of
//! the library runs. The functions of the driver are redirected as soon as a hook notices that the
//! driver is loaded. If the program already uses CUDA, the hook of `dlopen` notices this
//! ([`on_open`]). Otherwise, the hook of `dlsym` notices it ([`look`]):
//! - If the opened library depends on the driver, the `dlopen` loads the driver. The program then
//!   looks up functions of the opened library with `dlsym`.
//! - If the opened library loads the driver with `dlopen`, the opened library then looks up the
//!   driver's functions with `dlsym`.
//!
//! The same applies to NVML.

use super::table;
use crate::{
    calls::interop,
    driver::{self, redirect},
    env::settings,
    nvml, submit,
    sys::{elf, errno},
};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use rustix::{process::getpid, thread::gettid};

/// The id of this process while the hook of `dlsym` must check for newly loaded libraries; 0 otherwise.
/// The process has then opened a library with `RTLD_DEEPBIND`, and has not yet loaded all libraries
/// with hooks. A child of a fork ignores its parent's id, and checks only after it has opened such a
/// library itself. The check takes the loader's lock, which stays locked in the child if another thread
/// held it during the fork.
pub static WATCHING: AtomicI32 = AtomicI32::new(0);

/// Whether the functions of each library with hooks have been redirected.
static C_LIBRARY: AtomicBool = AtomicBool::new(false);
static DRIVER: AtomicBool = AtomicBool::new(false);
static NVML: AtomicBool = AtomicBool::new(false);

/// Called before a library is opened with `RTLD_DEEPBIND`. `dlsym` is the address of the hook of
/// `dlsym`.
pub fn on_open(dlsym: usize) {
    errno::preserve(|| {
        if settings::is_disabled() || are_all_redirected() {
            return;
        }
        WATCHING.store(getpid().as_raw_pid(), Ordering::SeqCst);
        redirect_what_is_loaded(dlsym);
        if redirect::was_refused() && submit::is_active() {
            interop::tie(); // restores evicted memory, because the library may use it without passing a hook
        }
    });
}

/// Redirects functions of the libraries loaded so far, if this process has opened a library with
/// `RTLD_DEEPBIND`.
pub fn look(dlsym: usize) {
    if WATCHING.load(Ordering::SeqCst) == getpid().as_raw_pid() {
        errno::preserve(|| redirect_what_is_loaded(dlsym));
    }
}

fn redirect_what_is_loaded(dlsym: usize) {
    /// The number of loaded objects at the last check.
    static SEEN: AtomicU64 = AtomicU64::new(0);
    /// The thread that is in this function. A `malloc` that looks up a symbol on each call would otherwise
    /// recurse into this function.
    static BUSY: AtomicI32 = AtomicI32::new(0);
    let loaded = elf::load_count();
    if loaded == Some(SEEN.load(Ordering::SeqCst)) {
        return;
    }
    let me = gettid().as_raw_pid();
    if BUSY.load(Ordering::SeqCst) == me {
        return;
    }
    let is_noted = BUSY.compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    redirect_each(dlsym);
    SEEN.store(loaded.unwrap_or(0), Ordering::SeqCst);
    if is_noted {
        BUSY.store(0, Ordering::SeqCst);
    }
}

fn redirect_each(dlsym: usize) {
    run_once(&C_LIBRARY, || {
        redirect::redirect_in_c_library(c"dlsym", dlsym);
        true
    });
    run_once(&DRIVER, || {
        let (Some(driver), Some(table)) = (driver::handle_if_loaded(), table::table()) else { return false };
        driver::resolve_all(); // after the redirection, a lookup would return the hooks
        redirect::redirect(driver::library::inside(driver), table);
        true
    });
    run_once(&NVML, || {
        let Some((nvml, table)) = nvml::table() else { return false };
        redirect::redirect(driver::library::inside(nvml), &table);
        true
    });
    if are_all_redirected() {
        WATCHING.store(0, Ordering::SeqCst);
    }
}

/// Runs the action, unless it has succeeded before. Concurrent threads may repeat the action, so
/// that no thread continues before the action is done.
fn run_once(done: &AtomicBool, action: impl FnOnce() -> bool) {
    if !done.load(Ordering::SeqCst) && action() {
        done.store(true, Ordering::SeqCst);
    }
}

fn are_all_redirected() -> bool {
    [&C_LIBRARY, &DRIVER, &NVML].iter().all(|done| done.load(Ordering::SeqCst))
}
