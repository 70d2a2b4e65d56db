//! Sleeping on a word of memory.
//!
//! The kernel's promise: looking at the word and going to sleep are one step to those who wake, and both sides execute a
//! full barrier before it. A sleep never ends by its time-out here: a wake-up that is missing is a deadlock, which loom
//! reports. What else ends a sleep in vain (a signal, the time-out) is [`interrupt`].

use crate::atomic::{AtomicU32, Ordering};
use core::time::Duration;
use loom::sync::{Condvar, Mutex, atomic::fence};
use std::cell::Cell;

loom::lazy_static! {
    static ref SLEEPERS: Sleepers = Sleepers { queue: Mutex::new(()), woken: Condvar::new() };
}

struct Sleepers {
    queue: Mutex<()>,
    woken: Condvar,
}

thread_local! {
    static BLIND: Cell<bool> = const { Cell::new(false) };
}

/// Wrong: the sleeps in what this thread checks do not look at the word.
pub fn make_blind() {
    BLIND.set(true);
}

pub fn wait(word: &AtomicU32, expected: u32, _: Duration) {
    fence(Ordering::SeqCst);
    let queue = SLEEPERS.queue.lock().unwrap();
    if BLIND.get() || word.load(Ordering::SeqCst) == expected {
        drop(SLEEPERS.woken.wait(queue));
    }
}

pub fn wake_all(_: &AtomicU32) {
    fence(Ordering::SeqCst);
    interrupt();
}

/// Whoever sleeps just now wakes up.
pub fn interrupt() {
    let _queue = SLEEPERS.queue.lock().unwrap();
    SLEEPERS.woken.notify_all();
}
