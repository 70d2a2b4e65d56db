//! Reproducible random numbers: the same seed gives the same numbers.

use std::time::Duration;

#[derive(Debug)]
pub struct Dice(fastrand::Rng);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    /// Creates dice with the [seed](Self::seed) of this run, and prints the seed.
    pub fn seeded() -> Self {
        let seed = Self::seed();
        eprintln!("NVSHARE_TEST_SEED={seed}");
        Self::new(seed)
    }

    /// The seed of this run. By default the seed is a constant, so results are reproducible as far
    /// as timing allows. `NVSHARE_TEST_SEED` sets another number, or `random`.
    pub fn seed() -> u64 {
        match std::env::var("NVSHARE_TEST_SEED").as_deref() {
            Err(_) => 1,
            Ok("random") => fastrand::u64(..1_000_000_000),
            Ok(text) => text.parse().expect("NVSHARE_TEST_SEED is a number or `random`"),
        }
    }

    /// Any number.
    pub fn number(&mut self) -> u64 {
        self.0.u64(..)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.0.u64(..n.max(1))
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// A random element of a list, which must not be empty.
    pub fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        *self.choose(from).expect("something to pick from")
    }

    /// A random element of a list, or `None` if the list is empty.
    pub fn choose<'a, T>(&mut self, from: &'a [T]) -> Option<&'a T> {
        self.0.choice(from)
    }

    pub fn milliseconds(&mut self, most: u64) -> Duration {
        Duration::from_micros(self.below(most * 1000 + 1))
    }
}
