//! When to try again what failed: ever later, and not at the same moment as the agents of all other nodes.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// The first wait, and the longest.
const FIRST: Duration = Duration::from_millis(250);
const LAST: Duration = Duration::from_secs(30);

/// Ever longer waits.
#[derive(Debug, Default)]
pub struct Retry(Option<Duration>);

impl Retry {
    /// How long to wait now: between a half and all of what it is this time.
    pub fn next(&mut self) -> Duration {
        let wait = self.0.map_or(FIRST, |last| (last * 2).min(LAST));
        self.0 = Some(wait);
        let half = wait / 2;
        // Each of these hashes with keys of its own.
        let random = RandomState::new().hash_one(()) % (half.as_millis() as u64 + 1);
        half + Duration::from_millis(random)
    }

    /// It has worked.
    pub fn reset(&mut self) {
        self.0 = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_the_longest_and_begin_anew_once_it_has_worked() {
        let mut retry = Retry::default();
        assert!((FIRST / 2..=FIRST).contains(&retry.next()));
        let later: Vec<Duration> = (0..20).map(|_| retry.next()).collect();
        assert!(later.iter().all(|wait| *wait <= LAST));
        assert!(later.last().is_some_and(|wait| *wait >= LAST / 2));
        retry.reset();
        assert!(retry.next() <= FIRST);
    }
}
