//! Pauses between attempts. The pauses grow exponentially. Each pause is random within a range, so
//! that the agents of all nodes do not retry at the same moment.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// The first pause.
const FIRST: Duration = Duration::from_millis(250);

/// The state of growing pauses.
#[derive(Debug)]
pub struct Retry {
    longest: Duration,
    last: Option<Duration>,
}

impl Retry {
    pub fn up_to(longest: Duration) -> Self {
        Self { longest, last: None }
    }

    /// Returns the next pause, which is between half of the current maximum and the maximum.
    pub fn wait(&mut self) -> Duration {
        let wait = self.last.map_or(FIRST, |last| last * 2).min(self.longest);
        self.last = Some(wait);
        let half = wait / 2;
        // Each `RandomState` has random keys, so its hashes are random numbers.
        let random = RandomState::new().hash_one(()) % (half.as_millis() as u64 + 1);
        half + Duration::from_millis(random)
    }

    /// Resets to the first pause after a success.
    pub fn reset(&mut self) {
        self.last = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_retry_delay_grows_to_its_maximum_and_resets_on_success() {
        let longest = Duration::from_secs(5);
        let mut retry = Retry::up_to(longest);
        assert!((FIRST / 2..=FIRST).contains(&retry.wait()));
        let later: Vec<Duration> = (0..20).map(|_| retry.wait()).collect();
        assert!(later.iter().all(|wait| *wait <= longest));
        assert!(later.last().is_some_and(|wait| *wait >= longest / 2));
        retry.reset();
        assert!(retry.wait() <= FIRST);
    }
}
