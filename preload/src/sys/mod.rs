//! Substitutes for the standard library.
//!
//! The library is `no_std` for the sake of its host programs. Every process that preloads it pays for each function
//! that the loader has to find and each pointer that it has to relocate; std adds a hundred functions and a thousand
//! pointers. `rustix` makes system calls without the C library, so the program's `errno` is not touched. Functions of
//! the C library are either as old as GLIBC_2.17 or looked up when CUDA is initialised ([`c`]), so one binary runs
//! everywhere, wherever it was built.

pub mod alloc;
pub mod c;
pub mod elf;
pub mod errno;
pub mod file;
pub mod futex;
pub mod lock_file;
pub mod once;
pub mod rank;
pub mod sync;
pub mod tasks;
pub mod thread;
pub mod time;
