//! The atomics that the [`gate`](crate::gate) uses, under a name of their own, so that the model in `tests/gate-model` can
//! replace them.

pub use core::sync::atomic::*;
