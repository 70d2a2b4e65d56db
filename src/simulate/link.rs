//! The link between a GPU and the host.

use std::time::Duration;

use crate::scheduler::Time;

/// Each direction copies chunks in order, and both directions share the host's memory bandwidth.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    out: Lane,
    back: Lane,
    /// The host's memory bandwidth. `None` if the bandwidth suffices for both directions at full
    /// speed.
    host: Option<Lane>,
}

/// A channel that copies chunks in order.
#[derive(Debug, Clone, Copy)]
struct Lane {
    /// Bytes per second.
    rate: u64,
    free: Time,
}

impl Lane {
    fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), free: Time::ZERO }
    }

    fn takes(self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }

    fn carry(&mut self, now: Time, bytes: u64) -> Time {
        self.free = now.max(self.free) + self.takes(bytes);
        self.free
    }
}

impl Link {
    /// `rate` is the bandwidth of each direction, and `total` is the bandwidth of both directions
    /// together, both in bytes per second.
    pub fn new(rate: u64, total: u64) -> Self {
        let host = (total < rate.saturating_mul(2)).then(|| Lane::new(total));
        Self { out: Lane::new(rate), back: Lane::new(rate), host }
    }

    /// Returns how long a copy in one direction takes while the other direction is idle.
    pub fn carries(&self, bytes: u64) -> Duration {
        self.out.takes(bytes)
    }

    /// Returns the time at which the host's memory has transferred `bytes` more.
    fn host(&mut self, now: Time, bytes: u64) -> Time {
        self.host.as_mut().map_or(Time::ZERO, |host| host.carry(now, bytes))
    }

    /// Requests a copy to the host at `now`, and returns the time at which it ends.
    pub fn copy_out(&mut self, now: Time, bytes: u64) -> Time {
        self.out.free = self.out.carry(now, bytes).max(self.host(now, bytes));
        self.out.free
    }

    /// Requests a copy to the GPU at `now`, and returns the time at which it ends.
    pub fn copy_back(&mut self, now: Time, bytes: u64) -> Time {
        self.back.free = self.back.carry(now, bytes).max(self.host(now, bytes));
        self.back.free
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_direction_carries_chunks_in_order() {
        const GIB: u64 = 1 << 30;
        let mut link = Link::new(GIB, 2 * GIB);
        let s = Duration::from_secs;
        assert_eq!((link.copy_out(s(0), GIB), link.copy_out(s(0), GIB)), (s(1), s(2)));
        assert_eq!((link.copy_back(s(0), GIB), link.copy_back(s(5), GIB)), (s(1), s(6)));
    }

    #[test]
    fn both_directions_share_the_hosts_bandwidth() {
        const GIB: u64 = 1 << 30;
        let (mut out, mut back) = (Duration::ZERO, Duration::ZERO);
        let mut link = Link::new(25 * GIB, 35 * GIB);
        for _ in 0..35 {
            (out, back) = (link.copy_out(out, GIB), link.copy_back(back, GIB));
        }
        let near = |time: Duration, seconds: f64| (time.as_secs_f64() - seconds).abs() < 0.05;
        assert!(near(out, 2.0) && near(back, 2.0), "{out:?} and {back:?} for 35 GiB each way");
        for _ in 0..25 {
            out = link.copy_out(out, GIB);
        }
        assert!(near(out, 3.0), "{out:?}: one way alone has its own rate");
    }
}
