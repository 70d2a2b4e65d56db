//! The link between a GPU and the host.

use std::time::Duration;

use crate::scheduler::Time;

/// Each direction carries one chunk after the other.
#[derive(Debug, Clone, Copy)]
pub struct Link {
    /// Bytes a second.
    rate: u64,
    out_free: Time,
    back_free: Time,
}

impl Link {
    pub fn new(rate: u64) -> Self {
        Self { rate: rate.max(1), out_free: Time::ZERO, back_free: Time::ZERO }
    }

    /// When a copy to the host is done that is wanted now.
    pub fn copy_out(&mut self, now: Time, bytes: u64) -> Time {
        self.out_free = now.max(self.out_free) + self.time(bytes);
        self.out_free
    }

    /// The same of a copy back to the GPU.
    pub fn copy_back(&mut self, now: Time, bytes: u64) -> Time {
        self.back_free = now.max(self.back_free) + self.time(bytes);
        self.back_free
    }

    fn time(&self, bytes: u64) -> Duration {
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.rate);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_carries_each_way_one_after_the_other() {
        const GIB: u64 = 1 << 30;
        let mut link = Link::new(GIB);
        let s = Duration::from_secs;
        assert_eq!((link.copy_out(s(0), GIB), link.copy_out(s(0), GIB)), (s(1), s(2)));
        assert_eq!((link.copy_back(s(0), GIB), link.copy_back(s(5), GIB)), (s(1), s(6)));
    }
}
