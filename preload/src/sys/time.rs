//! The monotonic clock, and sleeping.

use core::time::Duration;
use rustix::{
    thread::{NanosleepRelativeResult, Timespec},
    time::{ClockId, clock_gettime},
};

/// A moment of `CLOCK_MONOTONIC`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Instant(Duration);

impl Instant {
    pub fn now() -> Self {
        // Bypasses the C library's function, because some tools interpose it to stop time. Like the C library,
        // this code makes no system call.
        let time = clock_gettime(ClockId::Monotonic);
        Self(Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0)))
    }

    pub fn elapsed(&self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }

    /// The moment that was `duration` ago.
    #[cfg(test)]
    pub fn ago(duration: Duration) -> Self {
        Self(Self::now().0.saturating_sub(duration))
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
