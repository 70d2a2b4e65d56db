//! The limit behind the free memory that the program sees. Programs measure free memory when they
//! start, allocate, and measure again. Some treat a rise as an error, because natively only the end of
//! another program explains it. So for some time after the first question, free memory rises only
//! if the program itself frees memory.

use super::account::Account;
use crate::sys::time::Instant;
use core::time::Duration;

/// How long after the first question a higher limit is not shown. Programs measure in their first
/// seconds, and a program that adapts to free memory all the time should not miss more.
const STEADY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub enum VisibleLimit {
    Unasked,
    /// Rises of the limit are not shown.
    Steady {
        until: Instant,
        lowest: u64,
        /// The account's refusals and its rule's limit at the first question. After a refused
        /// allocation the program looks for memory again, and a changed rule changes all sizes.
        begin: (u64, u64),
    },
    Current,
}

impl VisibleLimit {
    /// Returns the limit to show, in bytes. At most the account's limit.
    pub fn of(&mut self, account: &Account, now: Instant) -> u64 {
        let seen = (account.counts.refused, account.max);
        if matches!(self, Self::Unasked) {
            *self = Self::Steady { until: now + STEADY, lowest: account.limit, begin: seen };
        }
        match self {
            Self::Steady { until, lowest, begin } if now < *until && *begin == seen => {
                *lowest = account.limit.min(*lowest);
                *lowest
            }
            _ => {
                *self = Self::Current;
                account.limit
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits_after(change: impl Fn(&mut Account), after: Duration) -> [u64; 4] {
        let (mut account, mut visible) = (Account { limit: 10, ..Account::default() }, VisibleLimit::Unasked);
        let begin = Instant::now();
        let first = visible.of(&account, begin);
        account.limit = 7;
        let lower = visible.of(&account, begin);
        account.limit = 12;
        change(&mut account);
        let higher = visible.of(&account, begin + after);
        account.limit = 15;
        [first, lower, higher, visible.of(&account, begin + after)]
    }

    #[test]
    fn the_limit_only_falls_within_a_minute_of_the_first_question() {
        assert_eq!(limits_after(|_| {}, STEADY - Duration::from_secs(1)), [10, 7, 7, 7]);
        assert_eq!(limits_after(|_| {}, STEADY), [10, 7, 12, 15]);
    }

    #[test]
    fn a_refused_allocation_and_a_changed_rule_show_the_current_limit() {
        assert_eq!(limits_after(|account| account.counts.refused += 1, Duration::ZERO), [10, 7, 12, 15]);
        assert_eq!(limits_after(|account| account.max = 20, Duration::ZERO), [10, 7, 12, 15]);
    }
}
