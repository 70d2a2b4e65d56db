//! Sleeping on a word of memory.
//!
//! The kernel promises that checking the word and going to sleep are one step for threads that wake sleepers, and that
//! both sides execute a full barrier before it. A sleep never ends by its timeout here, so a missing wake-up is a
//! deadlock, which loom reports. Spurious ends of a sleep (by a signal or the timeout) are [`interrupt`].

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

/// Broken variant: in the scenarios of this thread, sleeps don't check the word.
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

/// Wakes all threads that sleep at this moment.
pub fn interrupt() {
    let _queue = SLEEPERS.queue.lock().unwrap();
    SLEEPERS.woken.notify_all();
}
