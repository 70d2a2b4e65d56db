//! The slots of the program's threads. Each submitting thread of a scenario owns one slot
//! permanently.

use crate::atomic::Ordering;
use core::time::Duration;
use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};
use std::cell::Cell;

/// The number of threads that may submit, and the number of GPUs to which they may submit.
pub const THREADS: usize = 2;
pub const GPUS: usize = 2;

/// The value of [`Slot::inside`] for a thread outside all gates.
pub const OUTSIDE: usize = 0;

/// The value of [`Slot::waits_at`] for a thread that waits at no gate.
const NOWHERE: u32 = u32::MAX;

/// The reason why a thread waits at a gate.
#[derive(Debug, Clone, Copy)]
pub enum Waits {
    WithWork,
}

#[derive(Debug)]
pub struct Slot {
    pub inside: AtomicUsize,
    waits_at: AtomicU32,
    pub at: AtomicU32,
    pub submitted: [AtomicU64; GPUS],
    /// The word on which heavy fences synchronize with this thread's light fences (see
    /// [`crate::barrier`]).
    pub interrupted: AtomicU32,
}

impl Slot {
    fn new() -> Self {
        Self {
            inside: AtomicUsize::new(OUTSIDE),
            waits_at: AtomicU32::new(NOWHERE),
            at: AtomicU32::new(u32::MAX),
            submitted: [AtomicU64::new(0), AtomicU64::new(0)],
            interrupted: AtomicU32::new(0),
        }
    }

    /// As in the library.
    pub fn turn_to(&self, gpu: u32) -> bool {
        let turns = self.at.load(Ordering::Relaxed) != gpu;
        if turns {
            self.at.store(gpu, Ordering::Release);
        }
        turns
    }

    /// Marks the thread as waiting. Unlike the library, the model does not handle threads that are
    /// killed while they wait, because no thread of a scenario is killed.
    pub fn begin_waiting(&self, gpu: u32, _: Waits, _: Duration) {
        self.waits_at.store(gpu, Ordering::SeqCst);
    }

    pub fn end_waiting(&self) {
        self.waits_at.store(NOWHERE, Ordering::SeqCst);
    }
}

loom::lazy_static! {
    static ref SLOTS: [Slot; THREADS] = [Slot::new(), Slot::new()];
}

loom::thread_local! {
    static MINE: Cell<Option<usize>> = Cell::new(None);
}

/// Makes the calling thread a submitter with this slot.
pub fn take(index: usize) -> &'static Slot {
    MINE.with(|mine| mine.set(Some(index)));
    &SLOTS[index]
}

/// The calling thread's slot, if it submits.
pub fn mine() -> Option<&'static Slot> {
    MINE.with(Cell::get).map(|index| &SLOTS[index])
}

pub fn all() -> impl Iterator<Item = &'static Slot> {
    SLOTS.iter()
}

/// The number of submissions that all threads have made to the GPU so far.
pub fn submitted(gpu: u32) -> u64 {
    all().map(|slot| slot.submitted[gpu as usize].load(Ordering::Acquire)).sum()
}

/// The number of threads that wait at the GPU's gate.
pub fn waiting(gpu: u32) -> usize {
    all().filter(|slot| slot.waits_at.load(Ordering::SeqCst) == gpu).count()
}
