//! The atomics of [`fast`](super::fast) and [`gate`](super::gate). They are in a separate module, so
//! that the model in `tests/gate-model` can replace them.

pub use core::sync::atomic::*;
