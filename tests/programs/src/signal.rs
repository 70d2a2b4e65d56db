//! SIGUSR1 tells a program to end its work early. The program still checks its results.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

static TOLD: AtomicBool = AtomicBool::new(false);

/// The interval at which a pause checks for the signal.
const LOOK: Duration = Duration::from_millis(10);

/// Installs the handler. Before that, the signal kills the program.
pub fn listen() {
    extern "C" fn told(_: i32) {
        TOLD.store(true, Ordering::SeqCst);
    }
    // SAFETY: the handler only sets a flag.
    unsafe { libc::signal(libc::SIGUSR1, told as extern "C" fn(i32) as usize) };
}

pub fn has_come() -> bool {
    TOLD.load(Ordering::SeqCst)
}

/// True if the signal has arrived since the last call. The program can then be told once more.
pub fn take() -> bool {
    TOLD.swap(false, Ordering::SeqCst)
}

/// Sleeps for `time`, or until the signal arrives.
pub fn pause(time: Duration) {
    let end = Instant::now() + time;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() || has_come() {
            return;
        }
        thread::sleep(left.min(LOOK));
    }
}
