//! How fast memory leaves a GPU and comes back.

use super::GpuMemory;
use crate::api::*;
use std::time::Duration;

/// Bytes per second before an eviction was measured, where nothing is known of the link: half of what copies to registered
/// memory reach (H200).
const FIRST_RATE: u64 = 24 << 30;
/// Bytes per second at which memory comes back then: what copies from registered memory reach [H200, PCIe 5].
const RATE_BACK: u64 = 48 << 30;
/// An eviction of less says little about the rate of evictions.
const MEASURABLE: u64 = 64 << 20;
/// Rates stay between these, whatever was measured: 64 MiB/s and 1 TiB/s.
const RATES: (u64, u64) = (64 << 20, 1 << 40);

/// Bytes per second.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct Rates {
    /// Of evictions, smoothed: of what had to be copied.
    out: u64,
    /// At which memory comes back.
    back: u64,
}

impl Default for Rates {
    fn default() -> Self {
        Self { out: FIRST_RATE, back: RATE_BACK }
    }
}

impl Rates {
    /// What the link can carry.
    pub fn link_found(&mut self, rate: u64) {
        self.back = rate.clamp(RATES.0, RATES.1);
        self.out = self.back;
    }

    pub fn link(&self) -> u64 {
        self.back
    }

    /// How long evicting that much takes, where all of it must be copied.
    pub fn moving(&self, bytes: u64) -> Duration {
        at_rate(bytes, self.out)
    }

    /// How long it takes for that much to leave at a client's rate, and to come back. What did not change since it came in leaves
    /// without being copied, but is copied when it comes again.
    pub fn both_ways(&self, bytes: u64, rate: Option<u64>) -> Duration {
        let rate = rate.unwrap_or(self.out);
        at_rate(bytes, rate) + at_rate(bytes, rate.min(self.back))
    }
}

impl GpuMemory {
    /// What an eviction tells of the next: of that client's, and of those of clients of which nothing is known yet.
    pub fn learn_rate(&mut self, client: ClientId, bytes: u64, contents: u64, time: Duration) {
        let before = self.rates.out;
        if contents >= MEASURABLE {
            // Some of it may have been in the host already.
            self.rates.out = measured(before, contents, time).min(self.rates.back);
        }
        if let Some(client) = self.clients.get_mut(&client).filter(|_| bytes >= MEASURABLE) {
            client.rate = Some(measured(client.rate.unwrap_or(before), bytes, time));
        }
    }
}

/// The rate of evictions after another one was measured.
fn measured(rate: u64, bytes: u64, time: Duration) -> u64 {
    let now = u128::from(bytes) * 1_000_000_000 / time.as_nanos().max(1);
    smoothed(rate, now.clamp(RATES.0.into(), RATES.1.into()) as u64)
}

/// A rate rises faster than it falls: what makes an eviction slow (host memory that is made first, a busy processor) says little of
/// the next.
fn smoothed(rate: u64, measured: u64) -> u64 {
    if measured > rate { rate / 2 + measured / 2 } else { rate / 4 * 3 + measured / 4 }
}

fn at_rate(bytes: u64, per_second: u64) -> Duration {
    Duration::from_micros(((u128::from(bytes) * 1_000_000) / u128::from(per_second.max(1))).min(1 << 50) as u64)
}
