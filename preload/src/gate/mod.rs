//! The gates at which work waits for the GPU lock and for memory.
//!
//! - [`gate`](self::gate): the gate of one GPU. [`threads`], [`barrier`] and [`epoch`] make it cheap to
//!   pass an open gate.
//! - [`is_active`]: whether this library gates work and moves memory in this process.

pub mod atomic;
pub mod barrier;
pub mod epoch;
#[allow(clippy::module_inception, reason = "the gate itself, which tests/gate-model compiles on its own")]
mod gate;
pub mod threads;

pub use gate::{Gate, closed};

use crate::sys::futex;
use core::sync::atomic::{AtomicBool, Ordering};

/// `false` before CUDA is initialised, if nvshare is disabled, and in the child of a fork, where the
/// driver does not work either. Every hook then passes its call to the driver unchanged.
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Whether this library gates work and moves memory in this process.
#[inline]
pub fn is_active() -> bool {
    ACTIVE.load(Ordering::Relaxed)
}

pub fn set_active(active: bool) {
    ACTIVE.store(active, Ordering::SeqCst);
}
