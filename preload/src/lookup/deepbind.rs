//! Libraries that are opened with `RTLD_DEEPBIND`. They look for names in their own libraries before those that the program
//! started with, and so do not find the hooks.
//!
//! From the first such call on, what they would find instead leads to the hooks ([`redirect`]): the C library's `dlsym` at
//! once, so before anything of the library runs, and the functions of the driver and of NVML as soon as these are loaded.
//! That is so before the call if the program uses CUDA already; at its end, if the library brings the driver with it; then
//! whoever opened the library looks something up in it, and that look-up is where it is noticed.

use super::table;
use crate::{
    calls::interop,
    driver::{self, redirect},
    env::settings,
    gate, nvml,
    sys::{elf, errno},
};
use core::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, Ordering};
use rustix::{process::getpid, thread::gettid};

/// The process that has opened such a library and not loaded all libraries with hooks since; 0 if there is none. The hook of
/// `dlsym` reads it. A child goes on only once it opens one itself, since the loader's lock that a look takes stays locked in a
/// child if another thread had it.
pub static WATCHING: AtomicI32 = AtomicI32::new(0);

/// A library whose functions have hooks has been dealt with.
static C_LIBRARY: AtomicBool = AtomicBool::new(false);
static DRIVER: AtomicBool = AtomicBool::new(false);
static NVML: AtomicBool = AtomicBool::new(false);

/// A library is about to be opened with `RTLD_DEEPBIND`.
/// `dlsym` is the hook of that function.
pub fn opening(dlsym: usize) {
    errno::preserved(|| {
        if settings::is_disabled() || are_all_redirected() {
            return;
        }
        WATCHING.store(getpid().as_raw_pid(), Ordering::SeqCst);
        redirect_what_is_loaded(dlsym);
        if redirect::was_refused() && gate::is_active() {
            interop::tie(); // memory that is away must return before the library can use it
        }
    });
}

/// Redirects what has been loaded by now, if such a library was opened.
pub fn look(dlsym: usize) {
    if WATCHING.load(Ordering::SeqCst) == getpid().as_raw_pid() {
        errno::preserved(|| redirect_what_is_loaded(dlsym));
    }
}

fn redirect_what_is_loaded(dlsym: usize) {
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
    redirect_each(dlsym);
    SEEN.store(loaded.unwrap_or(0), Ordering::SeqCst);
    if is_noted {
        BUSY.store(0, Ordering::SeqCst);
    }
}

fn redirect_each(dlsym: usize) {
    once(&C_LIBRARY, || {
        redirect::redirect_in_c_library(c"dlsym", dlsym);
        true
    });
    once(&DRIVER, || {
        let (Some(driver), Some(table)) = (driver::loaded(), table::table()) else { return false };
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
