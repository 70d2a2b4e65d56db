//! Locks. They are futexes, take no system call unless somebody waits, and have no poison.

pub use rustix_futex_sync::{Mutex, OnceLock, RwLock};
