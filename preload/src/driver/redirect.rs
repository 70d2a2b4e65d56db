//! Patches symbol tables so that every lookup of a library's functions yields their hooks.
//!
//! A library that was opened with `RTLD_DEEPBIND` searches its own dependencies first. So it finds the
//! C library's `dlsym` and the driver's functions instead of the hooks. Every such lookup reads the
//! symbol tables of the C library and the driver. This module changes these tables, so that later
//! bindings use the hooks, even bindings in constructors and at the first call of a function.
//! Functions that a library finds in itself or in a wrapper are not redirected.

use crate::sys::{c, elf};
use core::{
    ffi::CStr,
    sync::atomic::{AtomicBool, Ordering},
};

/// The address of a function, and the address of its hook.
pub type Pair = (usize, usize);

static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether a redirection has failed. The program may then reach the driver without passing the hooks.
pub fn was_refused() -> bool {
    REFUSED.load(Ordering::SeqCst)
}

/// Redirects the functions of the library that contains the address `inside`. `pairs` is sorted by
/// the real address. Each library needs only one call. Another thread may make the same call
/// concurrently.
pub fn redirect(inside: usize, pairs: &[Pair]) {
    // The library keeps using the functions that it defines itself.
    if !try_redirect(inside, pairs, false) {
        REFUSED.store(true, Ordering::SeqCst);
    }
}

/// Does the same as [`redirect`], for a library that the program may use without passing hooks. `own`:
/// the library's own calls of the functions are redirected too, as far as it binds them like other
/// libraries do. Returns `false` if some lookups or bindings do not yield the hooks.
pub fn try_redirect(inside: usize, pairs: &[Pair], own: bool) -> bool {
    let hook_of = |address: usize| {
        let at = pairs.binary_search_by_key(&address, |(real, _)| *real).ok()?;
        pairs.get(at).map(|(_, hook)| *hook)
    };
    let page = c::page_size();
    let mut done = true;
    let mut bounds = (0, 0);
    elf::each_object(|object| {
        let is_it = object.contains(inside);
        if is_it {
            bounds = object.bounds();
            done &= object.redirect_symbols(page, hook_of);
        }
        !is_it
    });
    if done {
        // A lookup with `dlsym` waits for loads that are in progress, so their bindings are
        // complete afterwards.
        c::real_dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr());
        // If another library has already redirected a function, that redirection stays.
        let hook_of = |address: usize| if (bounds.0..bounds.1).contains(&address) { hook_of(address) } else { None };
        elf::each_object(|object| {
            // SAFETY: the symbols are redirected, and loads that began earlier are complete. So the
            // loader is not processing any object that is bound to one of these functions.
            done &= unsafe { object.redirect_bindings(page, own, hook_of) };
            true
        });
    }
    done
}

/// Redirects one function of the C library.
pub fn redirect_in_c_library(name: &CStr, hook: usize) {
    if let (Some(inside), Some(real)) = (elf::of_c_library(c"dlvsym"), elf::of_c_library(name)) {
        redirect(inside, &[(real, hook)]);
    }
}
