//! loom's atomics, with `const` constructors like the standard library's.

use crate::barrier::{self, Fences};
pub use loom::sync::atomic::Ordering;
use std::{ops::Deref, sync::OnceLock};

/// The fences that the gate itself executes.
pub fn fence(order: Ordering) {
    if barrier::chosen() != Fences::NoPassing {
        loom::sync::atomic::fence(order);
    }
}

/// An atomic that is replaced by loom's atomic on first use. The thread that created the atomic
/// must use it before other threads know it.
#[derive(Debug)]
pub struct AtomicU32 {
    initial: u32,
    modelled: OnceLock<loom::sync::atomic::AtomicU32>,
}

impl AtomicU32 {
    pub const fn new(initial: u32) -> Self {
        Self { initial, modelled: OnceLock::new() }
    }
}

impl Deref for AtomicU32 {
    type Target = loom::sync::atomic::AtomicU32;

    fn deref(&self) -> &Self::Target {
        self.modelled.get_or_init(|| Self::Target::new(self.initial))
    }
}
