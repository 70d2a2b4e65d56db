//! Libraries opened with `RTLD_DEEPBIND`. They search their own libraries before the libraries of the program, and so
//! do not find the hooks.
//!
//! From the first such call on, the functions that they would find are redirected to the hooks ([`redirect`]): the C
//! library's `dlsym` immediately, so before any code of the library runs, and the functions of the driver and of NVML
//! as soon as these are loaded. They are loaded before the call if the program already uses CUDA, and at its end if the
//! library brings the driver with it. A library opened with `dlopen` is always queried with `dlsym` first, so that is
//! where we notice the latter.

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

/// The process that has opened such a library and has not yet loaded all libraries with hooks; 0 if there is none. The
/// hook of `dlsym` reads it. A child process continues only once it opens one itself: the check takes the loader's
/// lock, which stays locked in a child if another thread held it.
pub static WATCHING: AtomicI32 = AtomicI32::new(0);

/// Whether the functions of each library with hooks have been redirected.
static C_LIBRARY: AtomicBool = AtomicBool::new(false);
static DRIVER: AtomicBool = AtomicBool::new(false);
static NVML: AtomicBool = AtomicBool::new(false);

/// Called before a library is opened with `RTLD_DEEPBIND`. `dlsym` is the hook of that function.
pub fn opening(dlsym: usize) {
    errno::preserved(|| {
        if settings::is_disabled() || are_all_redirected() {
            return;
        }
        WATCHING.store(getpid().as_raw_pid(), Ordering::SeqCst);
        redirect_what_is_loaded(dlsym);
        if redirect::was_refused() && gate::is_active() {
            interop::tie(); // evicted memory must be restored before the library can use it
        }
    });
}

/// Redirects the libraries loaded by now, if such a library was opened.
pub fn look(dlsym: usize) {
    if WATCHING.load(Ordering::SeqCst) == getpid().as_raw_pid() {
        errno::preserved(|| redirect_what_is_loaded(dlsym));
    }
}

fn redirect_what_is_loaded(dlsym: usize) {
    /// The number of loaded objects at the last check.
    static SEEN: AtomicU64 = AtomicU64::new(0);
    /// The thread that is in this function. A library's `malloc` that looks up a symbol on each call would recurse into
    /// it.
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

/// Runs the action unless it is done. Concurrent threads repeat it, rather than continue before it is done.
fn once(done: &AtomicBool, action: impl FnOnce() -> bool) {
    if !done.load(Ordering::SeqCst) && action() {
        done.store(true, Ordering::SeqCst);
    }
}

fn are_all_redirected() -> bool {
    [&C_LIBRARY, &DRIVER, &NVML].iter().all(|done| done.load(Ordering::SeqCst))
}
