//! loom's atomics, with `const` constructors like the standard library's.

use super::barrier::{self, Fences};
pub use loom::sync::atomic::Ordering;
use std::{any::Any, cell::RefCell, collections::HashMap, ops::Deref};

/// The fences that the gate itself executes.
pub fn fence(order: Ordering) {
    if barrier::chosen() != Fences::NoPassing {
        loom::sync::atomic::fence(order);
    }
}

pub use barrier::light as compiler_fence;

thread_local! {
    /// loom's atomics of the present execution of a scenario, by the addresses of the atomics that they
    /// replace. loom runs all threads of a scenario on the thread that checks it.
    static MODELLED: RefCell<HashMap<usize, Box<dyn Any>>> = RefCell::default();
}

/// Called when the execution of a scenario begins. Statics have their initial values again.
pub fn begin() {
    MODELLED.with_borrow_mut(HashMap::clear);
}

/// Declares atomics that are replaced by loom's atomics on first use. The thread that created an atomic
/// must use it before other threads know it.
macro_rules! atomics {
    ($( $name:ident $type:ty )*) => { $(
        #[derive(Debug)]
        pub struct $name($type);

        impl $name {
            pub const fn new(initial: $type) -> Self {
                Self(initial)
            }
        }

        impl Deref for $name {
            type Target = loom::sync::atomic::$name;

            fn deref(&self) -> &Self::Target {
                let address = std::ptr::from_ref(self) as usize;
                let modelled = MODELLED.with_borrow_mut(|modelled| {
                    let modelled = modelled.entry(address).or_insert_with(|| Box::new(Self::Target::new(self.0)));
                    let modelled: &Self::Target = modelled.downcast_ref().expect("an atomic of this type");
                    std::ptr::from_ref(modelled)
                });
                // SAFETY: the box lives until the next execution begins, when this one's references are gone.
                unsafe { &*modelled }
            }
        }
    )* };
}

atomics! { AtomicBool bool AtomicU32 u32 AtomicU64 u64 AtomicUsize usize }

/// A plain access to an atomic.
#[derive(Debug)]
pub struct Place<'a>(&'a AtomicUsize);

impl AtomicUsize {
    pub fn as_ptr(&self) -> Place<'_> {
        Place(self)
    }
}

impl Place<'_> {
    /// # Safety
    /// No other thread writes at the same time, which loom checks.
    pub unsafe fn read(&self) -> usize {
        // SAFETY: the caller's contract.
        unsafe { self.0.unsync_load() }
    }
}
