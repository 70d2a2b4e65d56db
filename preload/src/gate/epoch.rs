//! What a thread has found out about the way of its launches (their stream is noted, nothing is captured, the queue is not
//! full, …) holds for one epoch. Whatever may make some of it untrue ends the epoch, so an open gate is passed with one look
//! instead of one for each of these.

use core::sync::atomic::{AtomicU64, Ordering};

static EPOCH: AtomicU64 = AtomicU64::new(1);

/// No epoch.
pub const NONE: u64 = 0;

#[inline]
pub fn now() -> u64 {
    EPOCH.load(Ordering::Acquire)
}

/// Something has changed. Called after the change, so that who sees this epoch and not the change looks again in the next.
pub fn end() {
    EPOCH.fetch_add(1, Ordering::AcqRel);
}
