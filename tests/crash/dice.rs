//! Chance that can be had again: the same seed gives the same throws.

use std::time::Duration;

#[derive(Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The seed of this run: `NVSHARE_TEST_SEED`, or a new one.
    pub fn seed() -> u64 {
        match std::env::var("NVSHARE_TEST_SEED") {
            Ok(text) => text.parse().expect("NVSHARE_TEST_SEED is a number"),
            Err(_) => std::time::UNIX_EPOCH.elapsed().expect("a clock").as_nanos() as u64 % 1_000_000_000,
        }
    }

    /// SplitMix64: neighbouring seeds have nothing in common.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        (self.next() >> 11) % n.max(1)
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub fn milliseconds(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most * 1000 + 1))
    }
}
