//! The atomics of the [`gate`](crate::gate), under a name of their own, so that a model of it (`tests/gate-model`) can put
//! its own in their place.

pub use core::sync::atomic::*;
