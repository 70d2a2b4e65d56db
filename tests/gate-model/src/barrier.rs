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
    /// Where the kernel lacks it, as each gate knows: ordinary fences.
    Ordinary,
    /// The same before the gates know it: whoever closes one waits until stores are visible.
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
    // loom runs all threads of a scenario on the one that checks it.
    static FENCES: Cell<Fences> = const { Cell::new(Fences::Membarrier) };
}

/// What the scenarios that this thread checks have.
pub fn choose(fences: Fences) {
    FENCES.set(fences);
}

pub fn chosen() -> Fences {
    FENCES.get()
}

/// Whether each gate has been closed before, and learned that there is no `membarrier(2)`.
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

/// Time passes, until each thread either sees what was stored before or has made visible what it stored itself: no more than what
/// `membarrier(2)` gives, and given in the same way.
pub fn settle() {
    if FENCES.get() != Fences::NoWait {
        threads::all().for_each(meet);
    }
}

pub fn init() {}
