//! Has what the program comes by as a library's functions be their hooks, in whichever way it comes by them.
//!
//! A library that was opened with `RTLD_DEEPBIND` looks for names in its own libraries first, and so finds the C library's
//! `dlsym` and the driver's functions rather than the hooks. All that it can find are addresses in the symbol tables of those
//! two libraries. So it is these tables that are changed: what is bound from then on, also by constructors and at the first
//! call of a function, is bound to the hooks, and what a library finds in itself or in a wrapper stays as it is.

use crate::sys::{c, elf};
use core::{
    ffi::CStr,
    sync::atomic::{AtomicBool, Ordering},
};

/// A function's address, and that of its hook.
pub type Pair = (usize, usize);

static REFUSED: AtomicBool = AtomicBool::new(false);

/// Whether some of it could not be done, so that the program may reach the driver past the hooks.
pub fn was_refused() -> bool {
    REFUSED.load(Ordering::SeqCst)
}

/// Redirects the functions of the library that contains the address `inside`. `pairs` is sorted. Once is enough; meanwhile
/// another thread may do the same.
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
        // A look-up waits until no other thread loads anything: what that was binding is bound then.
        c::real_dlsym(libc::RTLD_DEFAULT, c"dlsym".as_ptr());
        // Where another library has redirected a function before, it stays with that one.
        let own = |address: usize| if (bounds.0..bounds.1).contains(&address) { hook_of(address) } else { None };
        elf::each_object(|object| {
            // SAFETY: nothing can be bound to these functions any more, so what still is has been bound for good.
            done &= unsafe { object.redirect_bindings(page, own) };
            true
        });
    }
    if !done {
        REFUSED.store(true, Ordering::SeqCst);
    }
}

/// The same for one function of the C library.
pub fn redirect_in_c_library(name: &CStr, hook: usize) {
    if let (Some(inside), Some(real)) = (elf::of_c_library(c"dlvsym"), elf::of_c_library(name)) {
        redirect(inside, &[(real, hook)]);
    }
}
