//! The program's threads. Each submitting thread of a scenario owns one value permanently.

use super::{
    atomic::Ordering,
    fast::{NOWHERE, Thread},
};
use core::time::Duration;
use std::cell::Cell;

/// The number of threads that may submit.
pub const THREADS: usize = 2;

/// The reason why a thread waits at a gate.
#[derive(Debug, Clone, Copy)]
pub enum Waits {
    WithWork,
}

impl Thread {
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
    static ref ALL: [Thread; THREADS] = [(); THREADS].map(|()| {
        let thread = Thread::new();
        thread.unmarked_left.set(i32::MAX);
        thread
    });
}

loom::thread_local! {
    static MINE: Cell<Option<usize>> = Cell::new(None);
}

/// Makes the calling thread a submitter with this value.
pub fn take(index: usize) -> &'static Thread {
    MINE.with(|mine| mine.set(Some(index)));
    &ALL[index]
}

/// The number of the calling thread, if it submits.
pub fn index() -> Option<usize> {
    MINE.with(Cell::get)
}

/// The calling thread's value, if it submits.
pub fn mine() -> Option<&'static Thread> {
    index().map(|index| &ALL[index])
}

pub fn all() -> impl Iterator<Item = &'static Thread> {
    ALL.iter()
}

/// The number of submissions that all threads have made to the GPU so far.
pub fn submitted(gpu: u32) -> u64 {
    all().map(|thread| thread.submitted[gpu as usize].load(Ordering::Acquire)).sum()
}

/// The number of threads that wait at the GPU's gate.
pub fn waiting(gpu: u32) -> usize {
    all().filter(|thread| thread.waits_at.load(Ordering::SeqCst) == gpu).count()
}
