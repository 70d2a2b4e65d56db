//! The state of the simulated GPUs, which all processes share: configuration ([`config`]), memory
//! per process ([`account`], [`shared`]), engines ([`engine`]), events ([`mark`]), host bandwidth
//! ([`host_link`]), device files ([`device_file`]), faults ([`trouble`]), checkpoints ([`checkpoint`]) and restores on other GPUs
//! ([`mod@place`]).
//!
//! Processes share only files in one directory. Each process holds a `flock` on its account file, and on
//! the files of the engines that it uses. When the process is killed, the kernel releases these locks,
//! and the process's memory no longer counts. The simulated driver and the simulated NVML both use this
//! crate.

pub mod account;
pub mod checkpoint;
pub mod config;
pub mod device_file;
pub mod engine;
mod fork;
pub mod host_link;
mod lock;
pub mod mark;
pub mod place;
pub mod shared;
pub mod trouble;

pub use account::Account;
pub use config::Config;
pub use engine::{Engine, EngineKind};
pub use fork::after_fork;
pub use mark::Mark;
pub use place::{at_place, place};

/// The largest number of GPUs of a simulated machine.
pub const MAX_GPUS: usize = 16;
