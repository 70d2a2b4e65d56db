//! Values that are initialised once, and actions that run once.
//!
//! Neither is a lock. If another thread held a lock during a fork, the child could never take that
//! lock.

/// A value created on first use. Threads may race to create it: the first result is kept, and the
/// others are dropped. So no thread waits.
pub use once_cell::race::OnceBox;

use crate::sys::time::{self, Instant};
use core::{
    sync::atomic::{AtomicU8, AtomicUsize, Ordering},
    time::Duration,
};

/// An address that is looked up on first use, and on later uses until it is found.
#[derive(Debug)]
pub struct Address(AtomicUsize);

impl Address {
    pub const fn new() -> Self {
        Self(AtomicUsize::new(0))
    }

    /// Returns the address, or `None` if `find` does not find it.
    #[inline]
    pub fn get(&self, find: impl FnOnce() -> Option<usize>) -> Option<usize> {
        match self.0.load(Ordering::Acquire) {
            0 => find().inspect(|found| self.0.store(*found, Ordering::Release)),
            known => Some(known),
        }
    }
}

/// How long other threads wait for the thread that runs the action, and the interval between their
/// polls. The wait is limited because that thread does not exist in the child of a fork.
const LONGEST: Duration = Duration::from_secs(4);
const POLL_INTERVAL: Duration = Duration::from_millis(1);

const NOT_DONE: u8 = 0;
const DOING: u8 = 1;
const DONE: u8 = 2;

/// An action that one thread performs for all threads.
#[derive(Debug)]
pub struct Once(AtomicU8);

impl Once {
    pub const fn new() -> Self {
        Self(AtomicU8::new(NOT_DONE))
    }

    /// Runs the action if no thread has completed it. Waits while another thread runs it, for at
    /// most [`LONGEST`]. Returns `false` if the action failed; the next caller then tries again.
    pub fn run(&self, action: impl FnOnce() -> bool) -> bool {
        match self.0.compare_exchange(NOT_DONE, DOING, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => {
                let done = action();
                self.0.store(if done { DONE } else { NOT_DONE }, Ordering::SeqCst);
                done
            }
            Err(DOING) => {
                let begin = Instant::now();
                while self.0.load(Ordering::SeqCst) == DOING && begin.elapsed() < LONGEST {
                    time::sleep(POLL_INTERVAL);
                }
                self.0.load(Ordering::SeqCst) != NOT_DONE
            }
            Err(_) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn no_caller_returns_before_initialization_completes() {
        static ONCE: Once = Once::new();
        static RUNS: AtomicU8 = AtomicU8::new(0);
        static IS_DONE: AtomicU8 = AtomicU8::new(0);
        let barrier = Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    barrier.wait();
                    let done = ONCE.run(|| {
                        RUNS.fetch_add(1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(50));
                        IS_DONE.store(1, Ordering::SeqCst);
                        true
                    });
                    assert!(done && IS_DONE.load(Ordering::SeqCst) == 1);
                });
            }
        });
        assert_eq!(RUNS.load(Ordering::SeqCst), 1);
        assert!(ONCE.run(|| false), "it has been done");
    }

    /// In the child of a fork, a thread that was creating the value does not exist.
    #[test]
    fn no_thread_waits_for_another_thread_that_creates_a_value() {
        static VALUE: OnceBox<u32> = OnceBox::new();
        let (begun, end) = (AtomicU8::new(0), AtomicU8::new(0));
        let deadline = Instant::now() + Duration::from_secs(10);
        let until = |flag: &AtomicU8| {
            while flag.load(Ordering::SeqCst) == 0 && Instant::now() < deadline {
                std::thread::yield_now();
            }
        };
        std::thread::scope(|scope| {
            let slow = scope.spawn(|| {
                *VALUE.get_or_init(|| {
                    begun.store(1, Ordering::SeqCst);
                    until(&end);
                    assert_eq!(end.load(Ordering::SeqCst), 1, "the other thread waits");
                    alloc::boxed::Box::new(1)
                })
            });
            until(&begun);
            assert_eq!(*VALUE.get_or_init(|| alloc::boxed::Box::new(2)), 2);
            end.store(1, Ordering::SeqCst);
            assert_eq!(slow.join().expect("its value"), 2, "all threads have the same value");
        });
    }

    #[test]
    fn a_failed_initialization_is_retried() {
        let once = Once::new();
        assert!(!once.run(|| false));
        assert!(once.run(|| true));
        assert!(once.run(|| false));
    }
}
