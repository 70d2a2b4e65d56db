//! The gate of `libnvshare.so`, model-checked: the library's own file, compiled against models of the modules that it
//! uses.
//!
//! [loom](https://docs.rs/loom) runs a small scenario again and again, once for every order of the steps of its threads,
//! and for every value, however old, that the memory model lets a load return. The scenarios are in `tests/gate.rs`; the
//! models of the surrounding modules are here: [`atomic`], [`barrier`], [`futex`], [`threads`].
//!
//! Not checked are orders with more preemptions than a scenario allows (checking all would never end), steps between a
//! fence and the instruction right before it, and timing. Sequentially consistent loads and stores count only as
//! acquiring and releasing ones, so an alarm may be false if the code relies on more.

pub mod atomic;
pub mod barrier;
pub mod futex;
pub mod threads;

// Its own tests belong to the library, and its constructor is for statics.
#[cfg(not(test))]
#[allow(clippy::new_without_default)]
#[path = "../../../preload/src/gate/gate.rs"]
pub mod gate;
