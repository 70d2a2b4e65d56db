//! Host memory that may hold swapped memory: measured on the host, and limited by `[swap] max`.

use std::collections::VecDeque;
use std::time::Duration;

use crate::config::swap::SwapMax;
use crate::scheduler::Time;

/// Bytes reserved for other use. If less than `RESERVE` is available, the library allocates no buffers.
/// An exchange needs additional memory: `EXCHANGE` bytes, or `1 / SMALLEST_PART` of the host's memory
/// if that is less.
const RESERVE: u64 = 512 << 20;
const EXCHANGE: u64 = 512 << 20;
const SMALLEST_PART: u64 = 16;
/// A lower figure is accepted only after it has persisted for this time. Buffers are allocated before
/// clients report them, so they would otherwise count twice.
const BELIEVED_AFTER: Duration = Duration::from_secs(2);
/// A changed figure leads to new limits only if the change is large enough: more than `WORTH_TELLING`
/// bytes, or more than `1 / WORTH_PART` of the last figure.
const WORTH_TELLING: u64 = 64 << 20;
const WORTH_PART: u64 = 32;

/// The host counts as short of memory for `SHORT_FOR` after processes were stalled on memory. Processes
/// count as stalled if stalls made up at least `1 / STALL_PART` of a period of at least `STALL_PERIOD`.
const STALL_PERIOD: Duration = Duration::from_secs(1);
const STALL_PART: u32 = 10;
const SHORT_FOR: Duration = Duration::from_secs(30);

/// Figures from `/proc/meminfo`, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    pub total: u64,
    /// Bytes that programs can use before the kernel must swap.
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

/// Bytes that are reserved on a host of this size.
fn reserve(total: u64) -> u64 {
    RESERVE + EXCHANGE.min(total / SMALLEST_PART)
}

/// The usable host memory, from the most recent measurements.
#[derive(Debug, Default)]
pub struct HostMemory {
    lately: VecDeque<(Time, u64)>,
    told: Option<u64>,
}

impl HostMemory {
    /// The usable bytes. `None` before the first measurement.
    pub fn bytes(&self) -> Option<u64> {
        self.told
    }

    /// Processes a measurement. `held`: host memory that clients use, by their own reports. Returns
    /// the bytes that clients may commit, or `None` if this number has not changed significantly.
    pub fn sample(&mut self, now: Time, info: MemInfo, held: u64, max: SwapMax) -> Option<u64> {
        let measured = info.available.saturating_add(held).saturating_sub(reserve(info.total));
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

/// Total time since boot for which processes on the host have been stalled on memory (PSI). `None` if
/// the kernel does not report it.
fn stalled() -> Option<Duration> {
    parse_stalled(&std::fs::read_to_string("/proc/pressure/memory").ok()?)
}

fn parse_stalled(text: &str) -> Option<Duration> {
    let some = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let total = some.split(' ').find_map(|field| field.strip_prefix("total="))?;
    Some(Duration::from_micros(total.parse().ok()?))
}

/// The host memory that clients may allocate in advance, for memory that is still on a GPU.
#[derive(Debug, Default)]
pub struct HostAhead {
    /// The time of the last measurement, and the total stall time at that moment.
    since: Option<(Time, Duration)>,
    short_until: Time,
    told: Option<Option<u64>>,
}

/// The present use of host memory, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct HostUse {
    pub info: MemInfo,
    /// `held`: bytes of host memory that clients use. `swapped`: the part of `held` that stores
    /// evicted memory.
    pub held: u64,
    pub swapped: u64,
}

impl HostAhead {
    /// Returns the bytes that all clients together may allocate in advance, or `None` if this
    /// number has not changed significantly. `Some(None)` means that the host is short of memory,
    /// and that clients must free empty buffers.
    ///
    /// The result is at most `most`, and at most half of the available memory. Without pressure information
    /// (PSI), the result is at most a quarter of the available memory. Many kernels do not provide PSI by
    /// default.
    pub fn sample(&mut self, now: Time, host: HostUse, most: SwapMax) -> Option<Option<u64>> {
        self.decide(now, host, most, stalled())
    }

    fn decide(&mut self, now: Time, host: HostUse, most: SwapMax, stalled: Option<Duration>) -> Option<Option<u64>> {
        let HostUse { info, held, swapped } = host;
        let spare = info.available.saturating_sub(reserve(info.total));
        // Without PSI, a shortage of memory is noticed only when hardly any memory is available.
        let part = if stalled.is_some() { 2 } else { 4 };
        if self.stalls(now, stalled) || (spare == 0 && held > swapped) {
            self.short_until = now + SHORT_FOR;
        }
        let most = most.bytes(info.total);
        let bytes =
            (now >= self.short_until).then(|| most.min(spare.saturating_add(held.saturating_sub(swapped)) / part));
        let is_told = self.told.is_some_and(|told| match (told, bytes) {
            (Some(told), Some(bytes)) => told.abs_diff(bytes) <= told / 8,
            (told, bytes) => told == bytes,
        });
        if is_told {
            return None;
        }
        self.told = Some(bytes);
        self.told
    }

    /// True if the host is short of memory.
    pub fn is_short(&self, now: Time) -> bool {
        now < self.short_until
    }

    /// True if processes were stalled on memory since the last measurement.
    fn stalls(&mut self, now: Time, stalled: Option<Duration>) -> bool {
        let Some(stalled) = stalled else { return false };
        let (at, before) = *self.since.get_or_insert((now, stalled));
        let time = now.saturating_sub(at);
        if time < STALL_PERIOD {
            return false;
        }
        self.since = Some((now, stalled));
        stalled.saturating_sub(before) >= time / STALL_PART
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_pressure_is_parsed_from_psi() {
        let text =
            "some avg10=0.00 avg60=0.12 avg300=0.00 total=2500000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(parse_stalled(text), Some(Duration::from_millis(2500)));
        assert_eq!(parse_stalled("full total=7"), None);
    }

    #[test]
    fn buffers_are_lent_ahead_and_reclaimed_under_memory_pressure() {
        let mut ahead = HostAhead::default();
        let using =
            |available, held, swapped| HostUse { info: info(available), held: held * GIB, swapped: swapped * GIB };
        let ms = Duration::from_millis;
        let quarter = SwapMax::Percent(25);
        assert_eq!(ahead.decide(at(0), using(61, 0, 0), quarter, Some(ms(0))), Some(Some(16 * GIB)), "of 64 GiB");
        assert_eq!(ahead.decide(at(1), using(45, 16, 0), quarter, Some(ms(50))), None, "clients have allocated it");
        // Without the 1 GiB in reserve, 20 GiB are available, including 4 GiB that are lent.
        // Clients may allocate half of the 20 GiB.
        assert_eq!(ahead.decide(at(2), using(17, 4, 0), quarter, Some(ms(100))), Some(Some(10 * GIB)));
        assert_eq!(ahead.decide(at(3), using(17, 4, 0), quarter, Some(ms(250))), Some(None), "150 ms of a second");
        assert_eq!(ahead.decide(at(30), using(21, 0, 0), quarter, Some(ms(250))), None, "it was short lately");
        assert_eq!(ahead.decide(at(33), using(21, 0, 0), quarter, Some(ms(250))), Some(Some(10 * GIB)));
        assert_eq!(ahead.decide(at(34), using(1, 10, 0), quarter, Some(ms(250))), Some(None), "there is no more");
        let mut untold = HostAhead::default();
        let all = SwapMax::Percent(100);
        assert_eq!(
            untold.decide(at(0), using(61, 0, 0), all, None),
            Some(Some(15 * GIB)),
            "pressure is not noticed early"
        );
        assert_eq!(untold.decide(at(1), using(1, 10, 0), all, None), Some(None), "there is no more");
    }

    const GIB: u64 = 1 << 30;

    fn info(available: u64) -> MemInfo {
        MemInfo { total: 64 * GIB, available: available * GIB }
    }

    fn at(seconds: u64) -> Time {
        Duration::from_secs(seconds)
    }

    #[test]
    fn meminfo_is_parsed() {
        let text = "MemTotal:       24576 kB\nMemFree:        1 kB\nMemAvailable:      2048 kB\n";
        assert_eq!(MemInfo::parse(text), Some(MemInfo { total: 24 << 20, available: 2 << 20 }));
        assert_eq!(MemInfo::parse("MemTotal: x kB"), None);
        assert!(MemInfo::read().is_some_and(|info| info.available <= info.total));
    }

    #[test]
    fn swap_max_is_a_percentage_a_size_or_none() {
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
    fn memory_swapped_by_programs_counts_as_available() {
        let mut host = HostMemory::default();
        assert_eq!(host.sample(at(0), info(41), 0, SwapMax::None), Some(40 * GIB));
        assert_eq!(host.sample(at(1), info(21), 20 * GIB, SwapMax::None), None, "they have swapped 20 GiB out");
    }

    #[test]
    fn a_decrease_must_last_and_an_increase_applies_immediately() {
        let mut host = HostMemory::default();
        host.sample(at(10), info(41), 0, SwapMax::None);
        assert_eq!(host.sample(at(11), info(21), 0, SwapMax::None), None);
        assert_eq!(host.sample(at(12), info(21), 0, SwapMax::None), Some(20 * GIB));
        assert_eq!(host.sample(at(13), info(31), 0, SwapMax::None), Some(30 * GIB));
    }
}
