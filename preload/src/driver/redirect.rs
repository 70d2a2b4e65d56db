//! Patches symbol tables so that every lookup of a library's functions yields their hooks.
//!
//! A library that was opened with `RTLD_DEEPBIND` searches its own libraries first, and so finds the C library's
//! `dlsym` and the driver's functions instead of the hooks. It can only find addresses from the symbol tables of those
//! two libraries, so these tables are changed: later bindings, even in constructors and at the first call of a
//! function, use the hooks. Functions that a library finds in itself or in a wrapper stay as they are.

use crate::sys::{c, elf};
use core::{
    ffi::CStr,
    sync::atomic::{AtomicBool, Ordering},
};

/// The addresses of a function and of its hook.
pub type Pair = (usize, usize);

static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether a redirection has failed, so that the program may reach the driver past the hooks.
pub fn was_refused() -> bool {
    REFUSED.load(Ordering::SeqCst)
}

/// Redirects the functions of the library that contains the address `inside`. `pairs` is sorted. One call is enough;
/// another thread may do the same concurrently.
pub fn redirect(inside: usize, pairs: &[Pair]) {
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
        // A lookup waits until no other thread is loading a library: all bindings of such a load are then complete.
        c::real_dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr());
        // A function that another library has already redirected stays with that library.
        let own = |address: usize| if (bounds.0..bounds.1).contains(&address) { hook_of(address) } else { None };
        elf::each_object(|object| {
            // SAFETY: nothing can be bound to these functions any more, so the remaining bindings are complete and
            // final.
            done &= unsafe { object.redirect_bindings(page, own) };
            true
        });
    }
    if !done {
        REFUSED.store(true, Ordering::SeqCst);
    }
}

/// Redirects one function of the C library.
pub fn redirect_in_c_library(name: &CStr, hook: usize) {
    if let (Some(inside), Some(real)) = (elf::of_c_library(c"dlvsym"), elf::of_c_library(name)) {
        redirect(inside, &[(real, hook)]);
    }
}
