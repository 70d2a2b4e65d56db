//! The gate of `libnvshare.so`, model-checked: the very file of the library, compiled against models of what it stands on.
//!
//! [loom](https://docs.rs/loom) runs a small scenario again and again, once for every order in which its threads can take
//! their steps and for every value, however old, that the memory model lets a load return. The scenarios are in
//! `tests/gate.rs`; here is what the gate takes from the library around it: [`atomic`], [`barrier`], [`futex`], [`threads`].
//!
//! What it does not show: the orders with more preemptions than a scenario is given (all of them would take for ever), a
//! step between a fence and what is right before it, and anything about time. Loads and stores that are sequentially
//! consistent count as acquiring and releasing ones only, so that an alarm may be false where the code relies on more.

pub mod atomic;
pub mod barrier;
pub mod futex;
pub mod threads;

// Its own tests are for the library, and its constructor is for statics.
#[cfg(not(test))]
#[allow(clippy::new_without_default)]
#[path = "../../../preload/src/gate/gate.rs"]
pub mod gate;
