//! The speed at which memory is evicted from a GPU and restored.

use super::Gpu;
use crate::api::*;
use std::time::Duration;

/// The assumed eviction rate in bytes per second until an eviction is measured, if the link's rate
/// is unknown. The value is half the rate of copies to registered memory on an H200.
const FIRST_RATE: u64 = 24 << 30;
/// The assumed restore rate in bytes per second if the link's rate is unknown. The value is the
/// rate of copies from registered memory on an H200 with PCIe 5.
const RATE_BACK: u64 = 48 << 30;
/// An eviction of fewer bytes says little about the rate.
const MEASURABLE: u64 = 64 << 20;
/// The lowest and the highest rate that is recorded: 64 MiB/s and 1 TiB/s.
const RATES: (u64, u64) = (64 << 20, 1 << 40);

/// The rates of a GPU in bytes per second.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Rates {
    /// Rate of copies during evictions, smoothed.
    out: u64,
    /// Rate of copies that restore memory.
    back: u64,
    /// `back` is the link's rate, not an estimate.
    is_known: bool,
}

impl Default for Rates {
    fn default() -> Self {
        Self { out: FIRST_RATE, back: RATE_BACK, is_known: false }
    }
}

impl Rates {
    /// Records the rate of the link, in bytes per second in each direction.
    pub fn link_found(&mut self, rate: u64) {
        self.back = rate.clamp(RATES.0, RATES.1);
        self.out = self.back;
        self.is_known = true;
    }

    /// The rate of the link, if it was found.
    pub fn link(&self) -> Option<u64> {
        self.is_known.then_some(self.back)
    }

    /// The time to evict `bytes` if all of them must be copied.
    pub fn moving(&self, bytes: u64) -> Duration {
        at_rate(bytes, self.out)
    }

    /// The time to restore `bytes`.
    pub fn coming(&self, bytes: u64) -> Duration {
        at_rate(bytes, self.back)
    }

    /// The time to evict `bytes` at a client's rate (`None`: unknown), plus the time to restore
    /// them. Chunks that did not change after their last restore are evicted without a copy, so the
    /// client's rate can exceed the link's. Restoring these chunks needs a copy, so the link's rate
    /// limits the restore.
    pub fn both_ways(&self, bytes: u64, rate: Option<u64>) -> Duration {
        let rate = rate.unwrap_or(self.out);
        at_rate(bytes, rate) + at_rate(bytes, rate.min(self.back))
    }
}

impl Gpu {
    /// Updates the client's own rate after an eviction, and the rate assumed for clients that have
    /// not evicted yet.
    pub fn learn_rate(&mut self, client: ClientId, bytes: u64, contents: u64, time: Duration) {
        let before = self.rates.out;
        if contents >= MEASURABLE {
            // Some contents may have been in host memory already.
            self.rates.out = measured(before, contents, time).min(self.rates.back);
        }
        if let Some(client) = self.attachments.get_mut(&client).filter(|_| bytes >= MEASURABLE) {
            client.rate = Some(measured(client.rate.unwrap_or(before), bytes, time));
        }
    }
}

/// The smoothed rate after `bytes` took `time`.
fn measured(rate: u64, bytes: u64, time: Duration) -> u64 {
    let now = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    smoothed(rate, now.clamp(RATES.0.into(), RATES.1.into()) as u64)
}

/// Smooths a rate so that it rises faster than it falls. The causes of a slow eviction, such as
/// host memory that must be allocated first or a busy CPU, say little about the next eviction.
fn smoothed(rate: u64, measured: u64) -> u64 {
    if measured > rate { rate / 2 + measured / 2 } else { rate / 4 * 3 + measured / 4 }
}

fn at_rate(bytes: u64, per_second: u64) -> Duration {
    Duration::from_micros(((u128::from(bytes) * 1_000_000) / u128::from(per_second.max(1))).min(1 << 50) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_rate_rises_faster_than_it_falls() {
        let second = Duration::from_secs(1);
        assert_eq!(measured(8 * GIB, 16 * GIB, second), 12 * GIB);
        assert_eq!(measured(8 * GIB, 4 * GIB, second), 7 * GIB);
        assert_eq!(measured(8 * GIB, 8 * GIB, second * 2), 7 * GIB);
        assert_eq!(measured(RATES.0, 1, second), RATES.0);
        assert_eq!(measured(RATES.1, u64::MAX, Duration::ZERO), RATES.1);
    }

    #[test]
    fn memory_moves_at_the_rate_of_the_link_or_of_its_client() {
        let ms = Duration::from_millis;
        let mut rates = Rates::default();
        assert_eq!((rates.link(), rates.moving(24 * GIB), rates.coming(24 * GIB)), (None, ms(1000), ms(500)));
        rates.link_found(8 * GIB);
        assert_eq!((rates.link(), rates.moving(4 * GIB), rates.coming(4 * GIB)), (Some(8 * GIB), ms(500), ms(500)));
        assert_eq!(rates.both_ways(4 * GIB, None), ms(1000));
        assert_eq!(rates.both_ways(4 * GIB, Some(16 * GIB)), ms(750), "it is restored at the rate of the link");
        assert_eq!(rates.both_ways(4 * GIB, Some(2 * GIB)), ms(4000));
    }

    #[test]
    fn a_measured_eviction_sets_the_clients_rate_and_lowers_the_gpus_rate() {
        let client = ClientId(1);
        let mut gpu = Gpu::new(GpuId(Uuid([0; 16])), 16 * GIB);
        gpu.attach(Time::ZERO, client, TenantId(0), Engine::Swap);
        gpu.rates.link_found(8 * GIB);
        let mut learn = |bytes, contents, seconds| {
            gpu.learn_rate(client, bytes, contents, Duration::from_secs(seconds));
            (gpu.attachments.get(&client).and_then(|attachment| attachment.rate), gpu.rates.out)
        };
        assert_eq!(learn(MEASURABLE - 1, MEASURABLE - 1, 1), (None, 8 * GIB), "too little says nothing");
        assert_eq!(learn(24 * GIB, 0, 1), (Some(16 * GIB), 8 * GIB), "no contents were copied");
        assert_eq!(learn(24 * GIB, 24 * GIB, 1), (Some(20 * GIB), 8 * GIB), "the link is no faster");
        assert_eq!(learn(4 * GIB, 4 * GIB, 1), (Some(16 * GIB), 7 * GIB));
    }
}
