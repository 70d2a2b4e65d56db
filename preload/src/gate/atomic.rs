//! The atomics of the [`gate`](crate::gate), in a module of their own, so that the model in `tests/gate-model` can
//! replace them.

pub use core::sync::atomic::*;
