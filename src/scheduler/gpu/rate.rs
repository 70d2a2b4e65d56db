//! The speed at which memory leaves a GPU and comes back.

use super::Gpu;
use crate::api::*;
use std::time::Duration;

/// Bytes per second of evictions until one was measured, where the link's rate is unknown: half the rate of copies to
/// registered memory (H200).
const FIRST_RATE: u64 = 24 << 30;
/// Bytes per second at which memory comes back, likewise: the rate of copies from registered memory (H200, PCIe 5).
const RATE_BACK: u64 = 48 << 30;
/// A smaller eviction says little about the rate.
const MEASURABLE: u64 = 64 << 20;
/// Measured rates are clamped to these: 64 MiB/s and 1 TiB/s.
const RATES: (u64, u64) = (64 << 20, 1 << 40);

/// Bytes per second.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Rates {
    /// Of copies during evictions, smoothed.
    out: u64,
    /// Of copies of memory that comes back.
    back: u64,
    /// `back` is the link's, not an estimate.
    is_known: bool,
}

impl Default for Rates {
    fn default() -> Self {
        Self { out: FIRST_RATE, back: RATE_BACK, is_known: false }
    }
}

impl Rates {
    /// Takes the rate of the link, in bytes per second in each direction.
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

    /// The time for `bytes` to come back.
    pub fn coming(&self, bytes: u64) -> Duration {
        at_rate(bytes, self.back)
    }

    /// The time for `bytes` to leave at a client's rate (`None`: unknown) and to come back. Chunks that did not change
    /// since they came in leave without being copied, but are copied when they come back.
    pub fn both_ways(&self, bytes: u64, rate: Option<u64>) -> Duration {
        let rate = rate.unwrap_or(self.out);
        at_rate(bytes, rate) + at_rate(bytes, rate.min(self.back))
    }
}

impl Gpu {
    /// Learns from an eviction: the client's own rate, and the rate of clients that have not evicted yet.
    pub fn learn_rate(&mut self, client: ClientId, bytes: u64, contents: u64, time: Duration) {
        let before = self.rates.out;
        if contents >= MEASURABLE {
            // Some of it may have been in host memory already.
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

/// A rate rises faster than it falls: what makes an eviction slow (host memory that must be allocated first, a busy
/// CPU) says little about the next one.
fn smoothed(rate: u64, measured: u64) -> u64 {
    if measured > rate { rate / 2 + measured / 2 } else { rate / 4 * 3 + measured / 4 }
}

fn at_rate(bytes: u64, per_second: u64) -> Duration {
    Duration::from_micros(((u128::from(bytes) * 1_000_000) / u128::from(per_second.max(1))).min(1 << 50) as u64)
}
