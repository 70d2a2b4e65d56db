//! Epochs: periods in which the facts about a thread's last launch stay true. For example, its stream
//! is recorded, no capture is active, and the queue is not full. Any change of such a fact ends the
//! epoch. So a thread passes an open gate with one comparison instead of one per fact.

use core::sync::atomic::{AtomicU64, Ordering};

static EPOCH: AtomicU64 = AtomicU64::new(1);

/// No epoch has this number.
pub const NONE: u64 = 0;

#[inline]
pub fn now() -> u64 {
    EPOCH.load(Ordering::Acquire)
}

/// Ends the epoch. Called after a fact about launches has changed. A thread that reads the
/// old epoch may miss the change, but checks all facts again in the next epoch.
pub fn end() {
    EPOCH.fetch_add(1, Ordering::AcqRel);
}
