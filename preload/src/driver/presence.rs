//! Whether the process is on its GPUs. While another process takes it off them, each call of the driver waits inside the driver,
//! where nobody sees it. So threads of the program wait here instead, before they enter, and the first of them says that the process
//! is wanted back.

use crate::sys::{errno, futex, time::Instant};
use core::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    time::Duration,
};

const PRESENT: u32 = 0;
const AWAY: u32 = 1;

/// What threads wait for.
static STATE: AtomicU32 = AtomicU32::new(PRESENT);
/// Whether a thread has come since the process is away.
static WANTED: AtomicBool = AtomicBool::new(false);
/// The function that is told of the first one, a `fn()`; 0 if there is none.
static TELL: AtomicUsize = AtomicUsize::new(0);

/// The longest wait without a look.
const LOOK: Duration = Duration::from_secs(1);

/// Threads that come to enter the driver wait from now on; `tell` is called by the first.
pub fn leave(tell: fn()) {
    TELL.store(tell as usize, Ordering::SeqCst);
    WANTED.store(false, Ordering::SeqCst);
    STATE.store(AWAY, Ordering::SeqCst);
}

/// The process is on its GPUs again, or has never left: threads go on.
pub fn come_back() {
    STATE.store(PRESENT, Ordering::SeqCst);
    futex::wake_all(&STATE);
}

/// The child of a fork has no GPU, and the driver tells it so.
pub fn in_child() {
    STATE.store(PRESENT, Ordering::SeqCst);
}

/// Whether a thread waits to enter the driver, or has.
pub fn is_wanted() -> bool {
    WANTED.load(Ordering::SeqCst)
}

pub fn is_away() -> bool {
    STATE.load(Ordering::SeqCst) == AWAY
}

/// Says that the process is wanted, without a wait.
pub fn want() {
    if is_away() && !WANTED.swap(true, Ordering::SeqCst) {
        let tell = TELL.load(Ordering::SeqCst);
        if tell != 0 {
            // SAFETY: set from such a function.
            errno::preserved(|| unsafe { core::mem::transmute::<usize, fn()>(tell) }());
        }
    }
}

/// Waits until the process is on its GPUs. Keeps `errno`.
#[cold]
pub fn wait() {
    wait_at_most(Duration::MAX);
}

/// The same, but no longer than that.
pub fn wait_at_most(most: Duration) {
    want();
    errno::preserved(|| {
        let since = Instant::now();
        while is_away() && since.elapsed() < most {
            futex::wait(&STATE, AWAY, LOOK);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{sync::atomic::AtomicU32, thread};

    static TOLD: AtomicU32 = AtomicU32::new(0);

    #[test]
    fn threads_wait_while_the_process_is_away_and_the_first_one_tells() {
        wait(); // nothing to wait for
        leave(|| {
            TOLD.fetch_add(1, Ordering::SeqCst);
        });
        assert!(!is_wanted());
        thread::scope(|scope| {
            let waiting: [_; 4] = core::array::from_fn(|_| scope.spawn(wait));
            while !is_wanted() {
                thread::yield_now();
            }
            thread::sleep(Duration::from_millis(20));
            assert!(waiting.iter().all(|thread| !thread.is_finished()));
            come_back();
        });
        assert_eq!(TOLD.load(Ordering::SeqCst), 1);
    }
}
