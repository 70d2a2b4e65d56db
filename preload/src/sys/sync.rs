//! Locks: futexes without poisoning, which make a system call only under contention.

pub use rustix_futex_sync::{Mutex, OnceLock, RwLock};
