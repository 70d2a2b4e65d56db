//! The fences between a thread that passes the gate and the thread that closes it, in the library's variants and in broken
//! variants.
//!
//! `membarrier(2)` makes every running thread of the process execute a full barrier between two of its instructions, after
//! the call began and before it returns. In such a thread that point is either after its light fence (a compiler fence,
//! which nothing moves across), and then everything the thread did before the fence is visible to the closing thread; or
//! before the light fence, and then everything the closing thread did is visible after it. Nothing else is promised, in
//! particular nothing between two light fences. Two read-modify-writes of a word that belongs to the thread give exactly
//! that: one comes first, and the other sees everything before it. So a light fence is a read-modify-write of the thread's
//! own word, and a heavy fence is one of each thread's word.
//!
//! (A sequentially consistent fence on both sides would promise too much, since it also orders light fences.)

use crate::threads;
use loom::sync::atomic::{Ordering, fence};
use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fences {
    /// `membarrier(2)` and compiler fences.
    Membarrier,
    /// Without `membarrier(2)` in the kernel, which each gate knows: ordinary fences.
    Ordinary,
    /// The same before the gates know it: the closing thread waits until stores are visible.
    Refused,
    /// Wrong: as `Membarrier`, without the light fence.
    NoLight,
    /// Wrong: as `Ordinary`, without the fence of the closing side.
    NoHeavy,
    /// Wrong: as `Ordinary`, without the fence of the passing side.
    NoPassing,
    /// Wrong: as `Refused`, without the wait.
    NoWait,
}

thread_local! {
    // loom runs all threads of a scenario on the thread that checks it.
    static FENCES: Cell<Fences> = const { Cell::new(Fences::Membarrier) };
}

/// Sets the fences of the scenarios that this thread checks.
pub fn choose(fences: Fences) {
    FENCES.set(fences);
}

pub fn chosen() -> Fences {
    FENCES.get()
}

/// Whether each gate has been closed before, and has learned that `membarrier(2)` is missing.
pub fn is_known_to_be_missing() -> bool {
    matches!(FENCES.get(), Fences::Ordinary | Fences::NoHeavy | Fences::NoPassing)
}

fn meet(slot: &threads::Slot) {
    slot.interrupted.fetch_add(1, Ordering::AcqRel);
}

pub fn light() {
    if FENCES.get() != Fences::NoLight {
        threads::mine().into_iter().for_each(meet);
    }
}

pub fn heavy() -> bool {
    match FENCES.get() {
        Fences::Membarrier | Fences::NoLight => {
            fence(Ordering::SeqCst);
            threads::all().for_each(meet);
            return true;
        }
        Fences::Ordinary | Fences::NoPassing | Fences::Refused | Fences::NoWait => fence(Ordering::SeqCst),
        Fences::NoHeavy => {}
    }
    false
}

/// Lets time pass until each thread either sees the earlier stores or has made its own stores visible. This gives exactly the
/// guarantee of `membarrier(2)`, in the same way.
pub fn settle() {
    if FENCES.get() != Fences::NoWait {
        threads::all().for_each(meet);
    }
}

pub fn init() {}
