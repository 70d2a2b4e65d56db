//! A world in virtual time around the scheduler's machine. Its clients behave as the library does
//! (`nvshare_simulated_client`), or misbehave. Checks of the invariants follow every event.
//! Messages take a little time in both directions and keep their order, so messages cross each
//! other as on a real host.

mod checks;
mod client;
mod decisions;
mod plan;
mod rooms;
mod sleep;
mod trouble;
mod world;

pub use client::Model;
pub use decisions::Decisions;
pub use plan::{ENDLESS, Lie, Plan};
pub use sleep::Sleeps;
pub use trouble::Trouble;
pub use world::World;

use nvshare_sched::*;
use std::collections::BTreeMap;
use std::time::Duration;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;
/// The period in which shares of the time are counted.
pub const PERIOD: Duration = Duration::from_secs(10);

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn gpu(n: u64) -> GpuId {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&n.to_le_bytes());
    GpuId(Uuid(bytes))
}

pub fn gpus<const N: usize>(n: [u64; N]) -> GpuSet {
    n.into_iter().map(gpu).collect()
}

pub fn client(n: u64) -> ClientId {
    ClientId(n)
}

pub fn settings(anti_thrash: AntiThrash, time_quantum: Duration) -> Settings {
    Settings {
        time_quantum,
        anti_thrash,
        policy: PolicyName::Fcfs,
        max_wait: Duration::ZERO,
        reserve: 0,
        context: 0,
        time_period: PERIOD,
        placement: Placement::None,
        sleep_after: None,
    }
}

/// An exact measurement.
pub fn exactly(bytes: u64) -> Found {
    Found { least: bytes, most: bytes }
}

/// Reproducible random numbers: the same seed gives the same numbers.
#[derive(Debug, Clone)]
pub struct Dice(fastrand::Rng);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }
    pub fn seed(&mut self) -> u64 {
        self.0.u64(..)
    }
    pub fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n.max(1))
    }
    pub fn between(&mut self, a: Duration, b: Duration) -> Duration {
        a + Duration::from_nanos(self.below((b.saturating_sub(a)).as_nanos() as u64 + 1))
    }
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
