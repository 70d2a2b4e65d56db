//! The daemon: I/O around the scheduler's state machine. One thread runs the scheduling loop; everything that can be slow
//! (D-Bus, NVML, metrics, the journal, files) has a separate thread.
//!
//! The modules are layers: each uses only those listed before it.
//!
//! - `logging`: the log, the journal.
//! - `node`: checks that a daemon in a pod sees the processes of its node.
//! - `systemd`: socket activation, notifications, the descriptor store.
//! - `tenants`: limits each tenant's use of the scheduler.
//! - `transport`: clients' connections as packets, the protocol's state, the peer's identity.
//! - `checkpoint`: takes clients' processes off their GPUs and restores them, through separate programs.
//! - `gpu`: NVML, memory accounting, host memory, the driver's limits.
//! - `swap_files`: files for memory that fits neither on GPUs nor in RAM.
//! - `metrics`: metrics for monitoring.
//! - `usage`: records of programs' usage, on disk.
//! - `core`: the scheduler's state machine, and all the state that it decides about.
//! - `connections`: clients' connections from beginning to end, GPU locks over D-Bus.
//! - `bus`: the D-Bus object.
//! - `control`: carries out requests of the D-Bus object on the scheduling loop; changed settings.
//! - `tasks`: periodic jobs of the scheduling loop.
//! - `run`: startup, the scheduling loop, shutdown.

mod bus;
pub mod checkpoint;
mod connections;
mod control;
mod core;
mod gpu;
mod logging;
mod metrics;
mod node;
mod run;
mod swap_files;
mod systemd;
mod tasks;
mod tenants;
mod transport;
mod usage;

pub use run::{Options, StartError, run};
