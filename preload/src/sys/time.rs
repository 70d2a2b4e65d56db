//! The monotonic clock, and sleeping.

use core::{
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use rustix::{
    thread::{NanosleepRelativeResult, Timespec},
    time::{ClockId, clock_gettime},
};

/// A moment of `CLOCK_MONOTONIC`, after [`follow`] has taken the steps back out of it. By default, the start of the
/// clock.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

/// The sum of all steps back of the clock, in nanoseconds.
static BEHIND: AtomicU64 = AtomicU64::new(0);
/// The latest moment that [`follow`] has seen, in nanoseconds.
static LATEST: AtomicU64 = AtomicU64::new(0);

/// Notices that the process was restored on a host that was booted later, or after another boot: the clock has
/// stepped back. Otherwise, the library would wait for the difference, perhaps for weeks. Called by the client's
/// thread before each of its steps, and not by `now`, so that threads of the program share no counter that changes.
pub fn follow() {
    let latest = LATEST.load(Ordering::Relaxed);
    let now = nanoseconds(Instant::now().0);
    let step = latest.saturating_sub(now);
    if step > 0 {
        BEHIND.fetch_add(step, Ordering::Relaxed);
    }
    LATEST.store(now.max(latest), Ordering::Relaxed);
}

fn nanoseconds(duration: Duration) -> u64 {
    duration.as_nanos().try_into().unwrap_or(u64::MAX)
}

impl Instant {
    pub fn now() -> Self {
        // Bypasses the C library's function, because some tools interpose it to stop time. Like the C library,
        // this code makes no system call.
        let time = clock_gettime(ClockId::Monotonic);
        let clock = Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0));
        Self(clock.saturating_add(Duration::from_nanos(BEHIND.load(Ordering::Relaxed))))
    }

    pub fn elapsed(&self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }

    /// The moment that was `duration` ago.
    #[cfg(test)]
    pub fn ago(duration: Duration) -> Self {
        Self(Self::now().0.saturating_sub(duration))
    }

    /// Milliseconds since the start of the clock, never 0.
    pub fn milliseconds(&self) -> u64 {
        self.0.as_millis() as u64 + 1
    }

    /// The time since the start of the clock.
    pub fn since_start(&self) -> Duration {
        self.0
    }
}

impl core::ops::Add<Duration> for Instant {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}

impl core::ops::Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Sleeps for about `duration`. A signal may end the sleep early.
pub fn sleep(duration: Duration) {
    let _ = rustix::thread::nanosleep(&timespec(duration));
}

/// Sleeps for at least `duration`, even if signals arrive.
pub fn sleep_through(duration: Duration) {
    let mut left = timespec(duration);
    while let NanosleepRelativeResult::Interrupted(rest) = rustix::thread::nanosleep(&left) {
        left = rest;
    }
}

pub fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: duration.subsec_nanos().into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_continues_after_a_step_back_of_the_clock() {
        let begun = Instant::now();
        follow();
        // As if the clock had been an hour ahead until now.
        let hour = Duration::from_secs(3600);
        LATEST.fetch_add(nanoseconds(hour), Ordering::Relaxed);
        follow();
        assert!(begun.elapsed() >= hour, "{:?}", begun.elapsed());
        let deadline = begun + hour + Duration::from_millis(1);
        sleep_through(Duration::from_millis(2));
        follow();
        assert!(Instant::now() >= deadline, "a wait that began before the step ends");
    }
}
