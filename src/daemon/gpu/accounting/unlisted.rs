//! The memory in use that NVML shows under no process.

use std::time::Duration;

use crate::scheduler::Time;

/// Growth of [`Unlisted::rest`] is provisional for this time: the report that explains the growth as managed
/// memory of a client may still arrive.
const PROVISIONAL: Duration = Duration::from_secs(2);

/// The memory in use that NVML shows under no process, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Unlisted {
    /// Clients' managed memory.
    pub managed: u64,
    /// The rest: memory of the driver, and managed memory of other programs. It is assumed to change only if
    /// clients' managed memory cannot explain the change.
    pub rest: u64,
    /// `rest` before its provisional growth, and when that growth began.
    settled: u64,
    since: Time,
}

impl Unlisted {
    /// The estimate before the first sample. `reserved`: the memory that the driver always uses.
    pub fn new(now: Time, reserved: u64) -> Self {
        Self { managed: 0, rest: reserved, settled: reserved, since: now }
    }

    /// Divides the `bytes` that a sample shows under no process. They can be wrong by as much as `moving`: the
    /// bytes that clients may have mapped or freed since the sample began. `managed`: the most managed bytes
    /// that clients have.
    pub fn divide(&mut self, now: Time, bytes: u64, moving: u64, managed: u64) {
        if now >= self.since + PROVISIONAL {
            self.settled = self.rest;
        }
        let was_settled = self.rest <= self.settled;
        let seen = self.settled.clamp(bytes.saturating_sub(managed), bytes);
        self.rest = self.rest.clamp(seen.saturating_sub(moving), seen.saturating_add(moving));
        self.managed = bytes.saturating_sub(self.rest).min(managed);
        self.settled = self.settled.min(self.rest);
        if was_settled || self.rest == self.settled {
            self.since = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_of_the_rest_is_provisional_until_reports_have_arrived() {
        let mut unlisted = Unlisted::new(Time::ZERO, 5);
        let mut rest = |ms, bytes, managed| {
            unlisted.divide(Duration::from_millis(ms), bytes, 0, managed);
            assert_eq!(unlisted.managed + unlisted.rest, bytes);
            unlisted.rest
        };
        assert_eq!(rest(0, 5, 0), 5);
        assert_eq!(rest(5000, 13, 0), 13);
        assert_eq!(rest(6900, 14, 8), 6, "a client reports 8 bytes, which explain most of the growth");
        assert_eq!(rest(6950, 13, 8), 5);
        // The growth settles if no report explains it.
        assert_eq!(rest(20_000, 20, 8), 12);
        assert_eq!(rest(21_000, 22, 8), 14);
        assert_eq!(rest(22_000, 22, 8), 14);
        assert_eq!(rest(22_100, 22, 20), 14, "a late claim");
        assert_eq!(rest(22_200, 9, 20), 9, "the memory is no longer in use");
        assert_eq!(rest(22_300, 14, 20), 9);
    }

    #[test]
    fn memory_that_moves_during_a_sample_does_not_change_the_rest() {
        let mut unlisted = Unlisted::new(Time::ZERO, 100);
        let mut divide = |ms, bytes, moving, managed| {
            unlisted.divide(Duration::from_millis(ms), bytes, moving, managed);
            (unlisted.rest, unlisted.managed)
        };
        assert_eq!(divide(0, 100, 0, 0), (100, 0));
        assert_eq!(divide(5000, 164, 64, 0), (100, 0), "a chunk was freed before the processes were listed");
        assert_eq!(divide(5100, 36, 64, 0), (100, 0), "a chunk was mapped before the processes were listed");
        assert_eq!(divide(5200, 174, 64, 0), (110, 0), "another program must have grown");
        assert_eq!(divide(5300, 108, 0, 0), (108, 0), "at rest, the sample is exact");
        assert_eq!(divide(9000, 300, 0, 200), (108, 192));
        assert_eq!(divide(9100, 150, 256, 50), (108, 42), "a client with managed memory ends while one attaches");
    }
}
