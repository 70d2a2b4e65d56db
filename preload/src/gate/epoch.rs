//! Epochs: the period in which the facts about a thread's last launch hold (its stream is noted, no capture is active,
//! the queue is not full, and so on). Any change of one of these facts ends the epoch, so a thread passes an open gate
//! with one comparison instead of one per fact.

use core::sync::atomic::{AtomicU64, Ordering};

static EPOCH: AtomicU64 = AtomicU64::new(1);

/// No epoch has this number.
pub const NONE: u64 = 0;

#[inline]
pub fn now() -> u64 {
    EPOCH.load(Ordering::Acquire)
}

/// Ends the epoch. Called after the change, so that a thread that reads the old epoch and misses the change checks
/// again in the next epoch.
pub fn end() {
    EPOCH.fetch_add(1, Ordering::AcqRel);
}
