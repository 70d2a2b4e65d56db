//! The fences between a thread that passes the gate and the one that closes it, in the ways the library has them, and in
//! ways that must not work.
//!
//! `membarrier(2)` makes every running thread of the process execute a full barrier between two of its instructions, after
//! the call began and before it returns. Seen from such a thread, that point is either after its light fence (a compiler
//! fence: nothing moves across it), and then what the thread did before the fence is visible to the closer; or before it,
//! and then what the closer did is visible to what comes after the fence. Nothing else is promised: least of all, anything
//! between two light fences. Just that is what two read-modify-writes of a word of the thread's own give: one comes first,
//! and the other sees all that was before it. So a light fence is one of the own word, a heavy fence one of each thread's.
//!
//! (A sequentially consistent fence on both sides would promise more than there is, since it orders light fences too.)

use crate::threads;
use loom::sync::atomic::{Ordering, fence};
use std::cell::Cell;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fences {
    /// `membarrier(2)` and compiler fences.
    Membarrier,
    /// Where the kernel lacks it: ordinary fences.
    Ordinary,
    /// Wrong: as `Membarrier`, without the light fence.
    NoLight,
    /// Wrong: as `Ordinary`, without the heavy fence.
    NoHeavy,
}

thread_local! {
    // loom runs all threads of a scenario on the one that checks it.
    static FENCES: Cell<Fences> = const { Cell::new(Fences::Membarrier) };
}

/// What the scenarios that this thread checks have.
pub fn choose(fences: Fences) {
    FENCES.set(fences);
}

fn meet(slot: &threads::Slot) {
    slot.interrupted.fetch_add(1, Ordering::AcqRel);
}

pub fn light() {
    match FENCES.get() {
        Fences::Membarrier => threads::mine().into_iter().for_each(meet),
        Fences::Ordinary | Fences::NoHeavy => fence(Ordering::SeqCst),
        Fences::NoLight => {}
    }
}

pub fn heavy() {
    match FENCES.get() {
        Fences::Membarrier | Fences::NoLight => {
            fence(Ordering::SeqCst);
            threads::all().for_each(meet);
        }
        Fences::Ordinary => fence(Ordering::SeqCst),
        Fences::NoHeavy => {}
    }
}

pub fn init() {}
