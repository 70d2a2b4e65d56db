//! The scheduler's answers to requests of program threads. The client's thread stores the answers; the
//! requesting threads wait for them.

use crate::sys::{
    futex,
    sync::{Mutex, Rank},
};
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

/// The scheduler's answers to requests for a higher limit on one GPU ([`super::limit_request`]).
#[derive(Debug)]
pub struct LimitAnswers {
    /// Counts answers.
    pub(super) count: AtomicU32,
    /// The size of the latest refused limit in bytes, and the value of `count` at the refusal.
    denied: Mutex<(u64, u32)>,
    /// Whether the scheduler has replied that its answer follows when other clients no longer need
    /// the memory.
    pub(super) awaited: AtomicBool,
}

impl LimitAnswers {
    pub const fn new() -> Self {
        Self {
            count: AtomicU32::new(0),
            denied: Mutex::new(Rank::DeniedLimit, (0, 0)),
            awaited: AtomicBool::new(false),
        }
    }

    /// Called when a new limit has arrived, when the scheduler was replaced or its connection was lost, and when
    /// the client begins to run without a scheduler.
    pub fn on_change(&self) {
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }

    pub fn on_denial(&self, bytes: u64) {
        let mut denied = self.denied.lock();
        *denied = (bytes, self.count.fetch_add(1, Ordering::SeqCst).wrapping_add(1));
        self.awaited.store(false, Ordering::SeqCst);
        drop(denied);
        futex::wake_all(&self.count);
    }

    /// Called when the scheduler replies that the memory becomes available after other clients have
    /// freed some.
    pub fn on_deferral(&self) {
        self.awaited.store(true, Ordering::SeqCst);
    }

    /// Returns the size of the latest refused limit, if the refusal came after the count was `seen`.
    pub(super) fn denial_since(&self, seen: u32) -> Option<u64> {
        let (bytes, at) = *self.denied.lock();
        (at.wrapping_sub(seen) as i32 > 0).then_some(bytes)
    }
}

/// The scheduler's answers to requests for memory for the driver itself ([`super::reservation`]).
#[derive(Debug)]
pub struct ReservationAnswers {
    pub(super) count: AtomicU32,
    /// Bytes that the scheduler has made available.
    pub(super) bytes: AtomicU64,
    /// The time at which a call last failed although room was made, in milliseconds; 0 if never.
    pub(super) futile: AtomicU64,
}

impl ReservationAnswers {
    pub const fn new() -> Self {
        Self { count: AtomicU32::new(0), bytes: AtomicU64::new(0), futile: AtomicU64::new(0) }
    }

    /// Forgets failures that concerned another GPU.
    pub fn forget(&self) {
        self.futile.store(0, Ordering::Relaxed);
    }

    pub fn room(&self, bytes: u64) {
        self.bytes.store(bytes, Ordering::SeqCst);
        self.count.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_answers_only_earlier_requests() {
        let answers = LimitAnswers::new();
        let seen = answers.count.load(Ordering::SeqCst);
        assert_eq!(answers.denial_since(seen), None);
        answers.on_change();
        assert_eq!(answers.denial_since(seen), None);
        answers.on_denial(7);
        assert_eq!(answers.denial_since(seen), Some(7));
        let seen = answers.count.load(Ordering::SeqCst);
        assert_eq!(answers.denial_since(seen), None);
    }
}
