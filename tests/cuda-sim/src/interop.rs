//! Resources of graphics APIs. The simulator has no graphics, so it only numbers them.

use crate::{error::Done, out};
use std::sync::atomic::{AtomicUsize, Ordering};

static LAST: AtomicUsize = AtomicUsize::new(0);

pub fn register(resource: *mut usize, _buffer: u32, _flags: u32) -> Done {
    out(resource, LAST.fetch_add(1, Ordering::Relaxed) + 1)
}

pub fn import(semaphore: *mut usize, _description: *const u8) -> Done {
    out(semaphore, LAST.fetch_add(1, Ordering::Relaxed) + 1)
}
