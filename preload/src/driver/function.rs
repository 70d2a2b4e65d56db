//! Functions of the driver, each with an entry: a word with the address of the function. While the
//! process is off its GPUs, the entries are shut: callers find no address, and call [`Entry::enter`],
//! which waits.
//!
//! To shut an entry, the library sets a bit in the word. Every caller has to read the word anyway,
//! to find out whether the function has been looked up. A caller of a shut entry takes the path for
//! a function that has not been looked up. So hooks need no check of their own, a new hook cannot
//! omit the check, and a launch executes no additional instruction. Two designs were rejected: a
//! flag that each hook reads slows every launch, and a count of the calls in progress slows every
//! call.

use super::look_up;
#[cfg(debug_assertions)]
use super::waits;
use crate::connection::presence;
use core::{
    ffi::CStr,
    sync::atomic::{AtomicUsize, Ordering},
};

/// The word of a function that was looked up and not found. No function has this address or a lower
/// one. A word of 0 means that the function has not been looked up yet.
pub const MISSING: usize = 1;

/// The bit that is set while the entry is shut. No address in a process has this bit.
const SHUT: usize = 1 << (usize::BITS - 1);

#[derive(Debug)]
#[repr(transparent)]
pub struct Entry(AtomicUsize);

impl Entry {
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Returns the address of the function, if it has been looked up and the entry is not shut.
    #[inline(always)]
    pub fn open(&self) -> Option<usize> {
        let address = self.0.load(Ordering::Relaxed);
        (address as isize > MISSING as isize).then_some(address) // a shut entry is negative
    }

    /// Returns the address of the function, or `None` if there is none. Waits while the entry is shut. After
    /// the return, the caller may call the function. `look_up`: see [`find`](Self::find).
    #[cold]
    pub fn enter(&self, look_up: impl FnOnce() -> Option<Option<usize>>) -> Option<usize> {
        let address = self.find(look_up)?;
        if self.0.load(Ordering::SeqCst) & SHUT != 0 {
            presence::wait();
        }
        Some(address)
    }

    /// Returns the address of the function, whether the entry is shut or not. `look_up` returns
    /// `Some(None)` if the driver lacks the function. It returns `None` if the driver cannot be loaded, and
    /// is then called again the next time.
    pub fn find(&self, look_up: impl FnOnce() -> Option<Option<usize>>) -> Option<usize> {
        match self.0.load(Ordering::SeqCst) & !SHUT {
            0 => {
                let found = look_up()?;
                // If the entry was shut at the same moment, the exchange fails, and the next caller
                // looks the function up again.
                let _ = self.0.compare_exchange(0, found.unwrap_or(MISSING), Ordering::SeqCst, Ordering::SeqCst);
                found
            }
            MISSING => None,
            address => Some(address),
        }
    }

    pub fn set_shut(&self, shut: bool) {
        if shut {
            self.0.fetch_or(SHUT, Ordering::SeqCst)
        } else {
            self.0.fetch_and(!SHUT, Ordering::SeqCst)
        };
    }
}

/// The length of a name, with room for the driver's longest name, which has 49 bytes.
const MAX_NAME: usize = 64;

/// A function of the real driver, by its exported name. The name is stored inline, because the loader
/// would have to relocate a pointer in every program.
#[derive(Debug)]
pub struct Function {
    entry: Entry,
    name: [u8; MAX_NAME],
    #[cfg(debug_assertions)]
    pub(super) waiting: waits::KnownClass,
}

impl Function {
    /// Creates a function, to be stored in a static. A name that is too long does not compile.
    pub const fn new(name: &CStr) -> Self {
        let mut own = [0; MAX_NAME];
        let (head, _) = own.split_at_mut(name.to_bytes_with_nul().len());
        head.copy_from_slice(name.to_bytes_with_nul());
        Self {
            entry: Entry::new(),
            name: own,
            #[cfg(debug_assertions)]
            waiting: waits::KnownClass::new(),
        }
    }

    pub fn name(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.name).unwrap_or(c"")
    }

    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// Returns the address of the real function, to be called, or `None` if the driver lacks it. Waits
    /// while the process is off its GPUs.
    #[inline]
    pub fn address(&self) -> Option<usize> {
        self.open_address().or_else(|| self.enter())
    }

    /// Returns the address, if it has been looked up and the entry is not shut.
    #[inline(always)]
    pub fn open_address(&self) -> Option<usize> {
        self.entry.open()
    }

    #[cold]
    fn enter(&self) -> Option<usize> {
        self.entry.enter(|| look_up(self.name()))
    }

    /// Returns the address of the real function, to be compared. Never waits.
    pub fn find(&self) -> Option<usize> {
        self.entry.find(|| look_up(self.name()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shut_entry_keeps_its_address_but_is_not_open() {
        let entry = Entry::new();
        assert_eq!((entry.open(), entry.find(|| Some(Some(4096))), entry.open()), (None, Some(4096), Some(4096)));
        entry.set_shut(true);
        assert_eq!((entry.open(), entry.find(|| Some(None))), (None, Some(4096)));
        entry.set_shut(false);
        assert_eq!(entry.open(), Some(4096));
    }

    #[test]
    fn a_lookup_does_not_open_a_shut_entry() {
        let entry = Entry::new();
        entry.set_shut(true);
        assert_eq!((entry.find(|| Some(Some(4096))), entry.open()), (Some(4096), None));
        entry.set_shut(false);
        assert_eq!(
            (entry.open(), entry.find(|| Some(None)), entry.find(|| Some(Some(1)))),
            (None, None, None),
            "missing for good"
        );
    }

    #[test]
    fn a_function_is_looked_up_again_if_the_driver_could_not_be_loaded() {
        let entry = Entry::new();
        assert_eq!((entry.find(|| None), entry.find(|| Some(Some(4096)))), (None, Some(4096)));
    }
}
