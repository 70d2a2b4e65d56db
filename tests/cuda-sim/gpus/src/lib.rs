//! The simulated GPUs as all processes see them: what they are ([`config`]), who has how much of their memory
//! ([`account`], [`shared`]), whose work they execute at this moment ([`engine`]), how far it is ([`mark`]), what the
//! host's memory can carry ([`host_link`]), what ails them ([`trouble`]), and how a process is taken off them ([`checkpoint`])
//! and put onto others ([`mod@place`]).
//!
//! Processes share nothing but files in one directory. Whatever a process holds is held by a `flock`, so that the
//! kernel gives it back when the process is killed. The simulated driver and the simulated NVML both build on this.

pub mod account;
pub mod checkpoint;
pub mod config;
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

/// How many GPUs a simulated machine can have.
pub const MAX_GPUS: usize = 16;
