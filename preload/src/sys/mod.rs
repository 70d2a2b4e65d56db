//! Substitutes for the standard library.
//!
//! The library is `no_std` to reduce the cost for the programs that preload it. Each process pays
//! for each function that the loader has to find, and for each pointer that the loader has to
//! relocate. `std` adds a hundred functions and a thousand pointers. `rustix` makes system calls
//! without the C library, and thus does not touch the program's `errno`. Functions of the C library
//! are either no newer than GLIBC_2.17 or looked up on first use ([`c`]). So one binary runs with
//! every supported C library, independent of the machine that built it.

pub mod alloc;
pub mod c;
pub mod elf;
pub mod errno;
pub mod file;
pub mod futex;
pub mod lock_file;
pub mod once;
pub mod pad;
pub mod rank;
pub mod sync;
pub mod tasks;
pub mod thread;
pub mod time;
