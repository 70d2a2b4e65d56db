//! Model checking of the gate of `libnvshare.so`. The library's own file is compiled against models
//! of the modules that it uses.
//!
//! [loom](https://docs.rs/loom) runs a small scenario repeatedly: once for every order of its
//! threads' steps, and for every value, however old, that the memory model lets a load return. The
//! scenarios are in `tests/gate.rs`. The models of the surrounding modules are [`atomic`],
//! [`barrier`], [`futex`] and [`threads`].
//!
//! Orders with more preemptions than a scenario allows are not checked, because checking all orders
//! would never end. Steps between a fence and the instruction before it, and timing, are not
//! checked either. loom treats sequentially consistent loads and stores only as acquiring and
//! releasing. If the code relies on more than that, loom may report a false error.

pub mod atomic;
pub mod barrier;
pub mod futex;
pub mod threads;

// Excludes the gate's own tests, which run in the library. `Gate::new` is for statics.
#[cfg(not(test))]
#[allow(clippy::new_without_default)]
#[path = "../../../preload/src/gate/gate.rs"]
pub mod gate;
