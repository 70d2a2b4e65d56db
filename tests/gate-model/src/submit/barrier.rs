//! The fences between a thread that passes the gate and the thread that closes it: the library's
//! variants, and broken variants.
//!
//! `membarrier(2)` makes every running thread of the process execute a full barrier between two of
//! its instructions, after the call begins and before it returns. A thread's light fence is a
//! compiler fence, across which no access moves. If the barrier comes after the thread's light
//! fence, the closing thread sees all earlier accesses of the thread. If the barrier comes before
//! the light fence, the thread sees all earlier accesses of the closing thread after the fence.
//! `membarrier(2)` guarantees nothing else, in particular nothing between two light fences.
//!
//! Two read-modify-writes of a word that belongs to the thread give exactly this guarantee: one
//! comes first, and the other sees all accesses before it. So a light fence is a read-modify-write
//! of the thread's own word, and a heavy fence is a read-modify-write of each thread's word.
//!
//! (Sequentially consistent fences on both sides would guarantee too much, because they also order
//! light fences.)

use super::threads;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fences {
    /// `membarrier(2)` and compiler fences.
    Membarrier,
    /// Ordinary fences. The kernel lacks `membarrier(2)`, and each gate knows that.
    Ordinary,
    /// The kernel lacks `membarrier(2)`, and the gates don't know that yet. The closing thread
    /// waits until stores are visible.
    Refused,
    /// Broken: `Membarrier` without the light fence.
    NoLight,
    /// Broken: `Ordinary` without the closing thread's fence.
    NoHeavy,
    /// Broken: `Ordinary` without the passing thread's fence.
    NoPassing,
    /// Broken: `Refused` without the wait.
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

/// Whether the gates of the chosen variant already know that `membarrier(2)` is missing. A gate learns
/// it when it is first closed.
pub fn is_known_to_be_missing() -> bool {
    matches!(FENCES.get(), Fences::Ordinary | Fences::NoHeavy | Fences::NoPassing)
}

loom::lazy_static! {
    /// For each submitting thread, the word on which heavy fences synchronize with its light fences.
    static ref INTERRUPTED: [AtomicU32; threads::THREADS] = Default::default();
}

fn meet(thread: usize) {
    INTERRUPTED[thread].fetch_add(1, Ordering::AcqRel);
}

fn meet_all() {
    (0..threads::THREADS).for_each(meet);
}

/// The compiler fence of a thread that enters.
pub fn light(_: Ordering) {
    if FENCES.get() != Fences::NoLight {
        threads::index().into_iter().for_each(meet);
    }
}

pub fn heavy() -> bool {
    match FENCES.get() {
        Fences::Membarrier | Fences::NoLight => {
            fence(Ordering::SeqCst);
            meet_all();
            return true;
        }
        Fences::Ordinary | Fences::NoPassing | Fences::Refused | Fences::NoWait => fence(Ordering::SeqCst),
        Fences::NoHeavy => {}
    }
    false
}

/// Lets time pass until each thread either sees the earlier stores or has made its own stores
/// visible. This is exactly the guarantee of `membarrier(2)`, and it is modelled in the same way.
pub fn wait_for_stores() {
    if FENCES.get() != Fences::NoWait {
        meet_all();
    }
}
