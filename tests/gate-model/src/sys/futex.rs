//! Sleeping on a word of memory.
//!
//! For threads that wake sleepers, the kernel promises that checking the word and going to sleep
//! are one step. The kernel also promises that both sides execute a full barrier first. In this
//! model a sleep never ends by its timeout, so a missing wake-up is a deadlock, which loom reports.
//! [`interrupt`] ends sleeps spuriously, as a signal or the timeout does.

use crate::submit::atomic::{AtomicU32, Ordering};
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

/// Selects a broken variant, in which sleeps don't check the word, for the scenarios of this
/// thread.
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
