//! The monotonic clock, a timer on it, and dates.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime, timerfd_create,
    timerfd_settime,
};
use tokio::io::unix::AsyncFd;

use super::descriptors;

/// Returns the time of `CLOCK_MONOTONIC`, which starts at boot.
pub fn now() -> Duration {
    let time = clock_gettime(ClockId::Monotonic);
    Duration::new(time.tv_sec.try_into().unwrap_or(0), time.tv_nsec.try_into().unwrap_or(0))
}

/// Returns the seconds since 1970, by the computer's clock.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// Formats the time `seconds` after 1970 as `20261127T043355Z`.
pub fn utc(seconds: u64) -> String {
    // SAFETY: a `tm` consists of numbers and a pointer, for which zero is a valid value.
    let mut date: libc::tm = unsafe { std::mem::zeroed() };
    let seconds = libc::time_t::try_from(seconds).unwrap_or(0);
    // SAFETY: both pointers are valid for the call. If the year does not fit, `gmtime_r` leaves
    // `date` unchanged.
    unsafe { libc::gmtime_r(&raw const seconds, &raw mut date) };
    let (year, month) = (i64::from(date.tm_year) + 1900, date.tm_mon + 1);
    format!("{year}{month:02}{:02}T{:02}{:02}{:02}Z", date.tm_mday, date.tm_hour, date.tm_min, date.tm_sec)
}

/// A local time, in the time zone of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Local {
    pub year: i64,
    /// The month, counted from 1.
    pub month: u32,
    pub day: u32,
    pub hour: u32,
    pub minute: u32,
    pub second: u32,
    /// Offset from UTC in seconds, positive east of Greenwich.
    pub offset: i32,
}

/// Returns the local time `seconds` after 1970 (UTC).
pub fn local(seconds: u64) -> Local {
    // SAFETY: a `tm` consists of numbers and a pointer, for which zero is a valid value.
    let mut date: libc::tm = unsafe { std::mem::zeroed() };
    let seconds = libc::time_t::try_from(seconds).unwrap_or(0);
    // SAFETY: both pointers are valid for the call. If the year does not fit, `localtime_r` leaves
    // `date` unchanged.
    unsafe { libc::localtime_r(&raw const seconds, &raw mut date) };
    let number = |field: libc::c_int| u32::try_from(field).unwrap_or(0);
    Local {
        year: i64::from(date.tm_year) + 1900,
        month: number(date.tm_mon) + 1,
        day: number(date.tm_mday),
        hour: number(date.tm_hour),
        minute: number(date.tm_min),
        second: number(date.tm_sec),
        offset: i32::try_from(date.tm_gmtoff).unwrap_or(0),
    }
}

/// A timer on `CLOCK_MONOTONIC` with the kernel's resolution. tokio's own timers have a resolution
/// of one millisecond.
#[derive(Debug)]
pub struct Timer(AsyncFd<OwnedFd>);

impl Timer {
    /// Creates a disarmed timer.
    ///
    /// # Errors
    /// The process has no file descriptors left.
    pub fn new() -> io::Result<Self> {
        let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        descriptors::watch(fd).map(Self)
    }

    /// Arms the timer to expire at `at`, or disarms it if `at` is `None`. The new time replaces the
    /// old one.
    pub fn set(&self, at: Option<Duration>) {
        let never = Timespec { tv_sec: 0, tv_nsec: 0 };
        let it_value = at.map_or(never, |at| Timespec {
            tv_sec: at.as_secs().try_into().unwrap_or(i64::MAX),
            // A time of zero would disarm the timer, so zero becomes one nanosecond.
            tv_nsec: at.subsec_nanos().max(1).into(),
        });
        let set = timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &Itimerspec { it_interval: never, it_value });
        debug_assert!(set.is_ok());
    }

    /// Waits until the timer expires.
    ///
    /// # Errors
    /// The runtime is shutting down.
    pub async fn expired(&self) -> io::Result<()> {
        loop {
            let mut ready = self.0.readable().await?;
            let mut count = [0; 8];
            if let Ok(result) = ready.try_io(|fd| Ok(rustix::io::read(fd, &mut count)?)) {
                return result.map(drop);
            }
        }
    }
}
