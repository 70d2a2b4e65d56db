//! The daemon: I/O around the scheduler's state machine. One thread runs the scheduling loop. Every
//! part that can be slow has a separate thread: D-Bus, NVML, metrics, the journal, and files.
//!
//! The modules are layers. Each module uses only the modules listed before it.
//!
//! - `logging`: the log and the journal.
//! - `node`: checks that a daemon in a pod sees the processes of its node.
//! - `state_file`: files for state that outlives the daemon.
//! - `systemd`: socket activation, notifications, and the file descriptor store.
//! - `tenants`: limits each tenant's use of the scheduler.
//! - `transport`: clients' connections as packets, the protocol's state, and the peer's identity.
//! - `checkpoint`: checkpoints and restores clients' processes, through separate programs.
//! - `gpu`: NVML, memory accounting, and host memory.
//! - `swap_files`: files for memory that fits neither on GPUs nor in RAM.
//! - `usage`: records of programs' usage, on disk.
//! - `core`: the scheduler's state machine, and the state that its decisions depend on.
//! - `hibernate`: saves programs to disk and restores them, through a separate program.
//! - `connections`: clients' connections from the handshake to their end, and GPU locks over D-Bus.
//! - `control`: requests that change settings and rules, and orders that are saved.
//! - `metrics`: metrics for monitoring.
//! - `bus`: the D-Bus object.
//! - `tasks`: periodic jobs of the scheduling loop.
//! - `run`: startup, the scheduling loop, and shutdown.

mod bus;
pub mod checkpoint;
mod connections;
mod control;
mod core;
mod gpu;
mod hibernate;
mod logging;
mod metrics;
mod node;
mod run;
mod state_file;
mod swap_files;
mod systemd;
mod tasks;
mod tenants;
mod transport;
mod usage;

pub use run::{Options, StartError, run};
