//! Whether the process is on its GPUs. The invariant is: **while the process is off its GPUs, none
//! of its threads enters the driver**. A driver call would block inside the driver, where this
//! library cannot detect the call. So threads of the program wait in this module before they enter
//! the driver. The first waiting thread reports to the scheduler, once, that the process is wanted
//! back (`Wake`).
//!
//! Shut entries (`driver::function`) lead threads to this module.

use super::wakeup;
use crate::sys::{errno, futex, time::Instant};
use core::{
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    time::Duration,
};

const PRESENT: u32 = 0;
const AWAY: u32 = 1;

/// The word on which threads wait.
static STATE: AtomicU32 = AtomicU32::new(PRESENT);
/// Whether a thread has arrived since the process left its GPUs.
static WANTED: AtomicBool = AtomicBool::new(false);

/// The longest sleep of a waiting thread before it checks `STATE` again.
const LOOK: Duration = Duration::from_secs(1);

/// Makes threads wait before they enter the driver.
pub fn leave() {
    WANTED.store(false, Ordering::SeqCst);
    STATE.store(AWAY, Ordering::SeqCst);
}

/// Lets threads continue, because the process is on its GPUs again or has never left them.
pub fn come_back() {
    STATE.store(PRESENT, Ordering::SeqCst);
    futex::wake_all(&STATE);
}

/// Stops all waiting in the child of a fork. The driver tells the child that it has no GPU.
pub fn in_child() {
    STATE.store(PRESENT, Ordering::SeqCst);
}

/// Whether a thread has waited to enter the driver since the process left its GPUs.
pub fn is_wanted() -> bool {
    WANTED.load(Ordering::SeqCst)
}

pub fn is_away() -> bool {
    STATE.load(Ordering::SeqCst) == AWAY
}

/// Lets the client's thread know that the process is wanted back, without waiting.
pub fn want() {
    if is_away() && !WANTED.swap(true, Ordering::SeqCst) {
        errno::preserve(wakeup::wake);
    }
}

/// Waits until the process is on its GPUs. Preserves `errno`.
#[cold]
pub fn wait() {
    wait_at_most(Duration::MAX);
}

/// Waits until the process is on its GPUs, but no longer than `most`.
pub fn wait_at_most(most: Duration) {
    want();
    errno::preserve(|| {
        let since = Instant::now();
        while is_away() && since.elapsed() < most {
            futex::wait(&STATE, AWAY, LOOK);
        }
    });
}

/// The longest time that counts for a thread that was stopped while it waited.
const SLICE: Duration = Duration::from_millis(100);

/// A bound on a thread's wait for the scheduler. It counts time for which the thread waits while the
/// process is on its GPUs and runs. A paused process gets its answer after it is resumed, and a stopped
/// process reads its answer after it continues; neither may fail a call of the program.
#[derive(Debug)]
pub struct Patience {
    left: Duration,
    most: Duration,
}

impl Patience {
    pub const fn new(most: Duration) -> Self {
        Self { left: most, most }
    }

    pub fn is_over(&self) -> bool {
        self.left.is_zero()
    }

    /// The time that has counted.
    pub fn duration(&self) -> Duration {
        self.most.saturating_sub(self.left)
    }

    /// Waits until the word is no longer `expected`, until the patience is over, or until the process is back
    /// on its GPUs.
    pub fn wait(&mut self, word: &AtomicU32, expected: u32) {
        while word.load(Ordering::SeqCst) == expected && !self.is_over() {
            if is_away() {
                return wait();
            }
            self.wait_at_most(word, expected, SLICE);
        }
    }

    /// Waits as [`wait`](Self::wait) does, but no longer than `most` while the process is on its GPUs. May
    /// return early.
    pub fn wait_at_most(&mut self, word: &AtomicU32, expected: u32, most: Duration) {
        if is_away() {
            return wait();
        }
        let mut slice = most.min(SLICE);
        // A caller may wait on after its patience is over, and must not spin then.
        if !self.is_over() {
            slice = slice.min(self.left);
        }
        let begin = Instant::now();
        futex::wait(word, expected, slice);
        if !is_away() {
            self.left = self.left.saturating_sub(begin.elapsed().min(slice));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::fake::was_woken;
    use std::thread;

    /// Lets the waiting threads go on when an assertion fails, so that the test ends.
    struct ComeBack;

    impl Drop for ComeBack {
        fn drop(&mut self) {
            come_back();
        }
    }

    #[test]
    fn patience_does_not_count_time_off_the_gpus() {
        let word = AtomicU32::new(0);
        let mut patience = Patience::new(Duration::from_millis(300));
        leave();
        thread::scope(|scope| {
            let _come_back = ComeBack;
            let waiting = scope.spawn(|| {
                patience.wait(&word, 0);
                patience.duration()
            });
            while !is_wanted() {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(400));
            assert!(!waiting.is_finished());
            come_back();
            assert_eq!(waiting.join().expect("no panic"), Duration::ZERO);
        });
        let mut patience = Patience::new(Duration::from_millis(3));
        patience.wait(&word, 0);
        assert!(patience.is_over() && patience.duration() == Duration::from_millis(3));
        let mut patience = Patience::new(Duration::from_secs(1000));
        patience.wait(&word, 1);
        assert_eq!(patience.duration(), Duration::ZERO, "the word has changed already");
    }

    #[test]
    fn threads_wait_while_the_process_sleeps_and_only_one_reports_it() {
        wait(); // returns at once
        wakeup::init();
        leave();
        assert!(!is_wanted());
        thread::scope(|scope| {
            let _come_back = ComeBack;
            let waiting: [_; 4] = core::array::from_fn(|_| scope.spawn(wait));
            while !is_wanted() {
                thread::yield_now();
            }
            while !was_woken() {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(20));
            assert!(!was_woken(), "only the first thread wakes the client's thread");
            assert!(waiting.iter().all(|thread| !thread.is_finished()));
        });
    }
}
