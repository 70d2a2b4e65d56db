//! Models of the substitutes for the standard library.

pub mod futex;
pub mod thread;
