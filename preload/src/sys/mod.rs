//! What the standard library would give, and what this library uses in its place.
//!
//! It is a `no_std` library for the sake of its hosts. Every function that the loader has to find and every pointer it has
//! to relocate is paid by every process that this library is preloaded into, and std brings a hundred of the former and a
//! thousand of the latter. System calls are made by `rustix` without the C library, so `errno`, which belongs to the
//! program, is not touched. What must come from the C library is either as old as GLIBC_2.17 or looked up when CUDA is
//! initialised ([`c`]), so one binary runs everywhere, wherever it was built.

pub mod alloc;
pub mod c;
pub mod errno;
pub mod file;
pub mod futex;
pub mod lock_file;
pub mod sync;
pub mod thread;
pub mod time;
