//! Model checking of the gate of `libnvshare.so`. The library's own files `fast.rs` and `gate.rs` are
//! compiled against models of the modules that they use.
//!
//! [loom](https://docs.rs/loom) runs a small scenario repeatedly: once for every order of its
//! threads' steps, and for every value, however old, that the memory model lets a load return. The
//! scenarios are in `tests/gate.rs`. The models of the surrounding modules are in [`submit`] and
//! [`sys`].
//!
//! Orders with more preemptions than a scenario allows are not checked, because checking all orders
//! would never end. Steps between a fence and the instruction before it, and timing, are not
//! checked either. loom treats sequentially consistent loads and stores only as acquiring and
//! releasing. If the code relies on more than that, loom may report a false error.

pub mod driver;
pub mod submit;
pub mod sys;
