//! Host memory that is available for swapped memory: measured, and limited by `[swap] max`.

use std::collections::VecDeque;
use std::time::Duration;

use crate::config::swap::SwapMax;
use crate::scheduler::Time;

/// Bytes reserved for other use. The library allocates no buffers when less than the first is left; the second is
/// what an exchange needs beside the memory that it exchanges, or a sixteenth of a small host.
const RESERVE: u64 = 512 << 20;
const EXCHANGE: u64 = 512 << 20;
const SMALLEST_PART: u64 = 16;
/// Less memory is believed when there was no more for so long: buffers are made before they are reported, and would
/// count twice.
const BELIEVED_AFTER: Duration = Duration::from_secs(2);
/// Smaller changes do not lead to new limits: this many bytes, and the last figure divided by this.
const WORTH_TELLING: u64 = 64 << 20;
const WORTH_PART: u64 = 32;

/// `/proc/meminfo`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    pub total: u64,
    /// Can be used without swapping.
    pub available: u64,
}

impl MemInfo {
    pub fn read() -> Option<Self> {
        Self::parse(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
        };
        Some(Self { total: field("MemTotal")?, available: field("MemAvailable")? })
    }
}

/// The recent measurements.
#[derive(Debug, Default)]
pub struct HostMemory {
    lately: VecDeque<(Time, u64)>,
    told: Option<u64>,
}

impl HostMemory {
    /// Processes a measurement; `held` is the host memory that clients report to hold. Returns the bytes that may be
    /// committed, if they changed significantly.
    pub fn sample(&mut self, now: Time, info: MemInfo, held: u64, max: SwapMax) -> Option<u64> {
        let reserve = RESERVE + EXCHANGE.min(info.total / SMALLEST_PART);
        let measured = info.available.saturating_add(held).saturating_sub(reserve);
        self.lately.retain(|(at, bytes)| *at + BELIEVED_AFTER > now && *bytes > measured);
        self.lately.push_back((now, measured));
        let most = self.lately.front().map_or(measured, |(_, bytes)| *bytes);
        let bytes = most.min(max.bytes(info.total));
        let worth = |told: u64| told.abs_diff(bytes) > WORTH_TELLING.min(told / WORTH_PART);
        if self.told.is_some_and(|told| !worth(told)) {
            return None;
        }
        self.told = Some(bytes);
        self.told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn info(available: u64) -> MemInfo {
        MemInfo { total: 64 * GIB, available: available * GIB }
    }

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_kernels_figures_are_read() {
        let text = "MemTotal:       24576 kB\nMemFree:        1 kB\nMemAvailable:      2048 kB\n";
        assert_eq!(MemInfo::parse(text), Some(MemInfo { total: 24 << 20, available: 2 << 20 }));
        assert_eq!(MemInfo::parse("MemTotal: x kB"), None);
        assert!(MemInfo::read().is_some_and(|info| info.available <= info.total));
    }

    #[test]
    fn the_most_is_a_part_or_a_size_or_not_set() {
        assert_eq!(SwapMax::parse("80%"), Ok(SwapMax::Percent(80)));
        assert_eq!(SwapMax::parse("64G"), Ok(SwapMax::Bytes(64 * GIB)));
        assert_eq!(SwapMax::parse("none"), Ok(SwapMax::None));
        for wrong in ["101%", "-1%", "%", "lots", "", "None"] {
            assert!(SwapMax::parse(wrong).is_err(), "{wrong}");
        }
        let mut host = HostMemory::default();
        assert_eq!(host.sample(at(0), info(60), 0, SwapMax::Percent(50)), Some(32 * GIB));
        assert_eq!(host.sample(at(0), info(60), 0, SwapMax::Bytes(7)), Some(7));
        assert_eq!(host.sample(at(0), info(60), 0, SwapMax::None), Some(59 * GIB));
    }

    #[test]
    fn what_programs_hold_already_is_there_for_them() {
        let mut host = HostMemory::default();
        assert_eq!(host.sample(at(0), info(41), 0, SwapMax::None), Some(40 * GIB));
        assert_eq!(host.sample(at(1), info(21), 20 * GIB, SwapMax::None), None, "they have swapped 20 GiB out");
    }

    #[test]
    fn less_is_believed_when_it_lasts_and_more_at_once() {
        let mut host = HostMemory::default();
        host.sample(at(10), info(41), 0, SwapMax::None);
        assert_eq!(host.sample(at(11), info(21), 0, SwapMax::None), None);
        assert_eq!(host.sample(at(12), info(21), 0, SwapMax::None), Some(20 * GIB));
        assert_eq!(host.sample(at(13), info(31), 0, SwapMax::None), Some(30 * GIB));
    }
}
