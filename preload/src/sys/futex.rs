//! Futexes: waiting for a change of a word of memory.

use crate::sys::time::timespec;
use core::{sync::atomic::AtomicU32, time::Duration};
use rustix::thread::futex::{self, Flags};

/// Sleeps while the word is `expected`, for at most `timeout`. May return early, so callers must check
/// the word again.
pub fn wait(word: &AtomicU32, expected: u32, timeout: Duration) {
    let _ = futex::wait(word, Flags::PRIVATE, expected, Some(&timespec(timeout)));
}

pub fn wake_all(word: &AtomicU32) {
    let _ = futex::wake(word, Flags::PRIVATE, i32::MAX as u32);
}
