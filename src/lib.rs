//! nvshare: the scheduler daemon and its command line.
//!
//! - [`scheduler`]: who may run and whose memory is on the GPU: a state machine without I/O, the crate `nvshare-sched`.
//! - [`daemon`]: the I/O around it: the clients' socket, D-Bus, systemd and NVML.
//! - [`gpu_faults`]: which GPUs the driver reports errors of, for the daemon and the device plugin.
//! - [`config`]: configuration and rules, for all programs; [`identity`]: who a process is.
//! - [`bus`]: the D-Bus interface as types, for the daemon and for `nvsharectl`.
//! - [`recorder`]: the newest events and commands of the scheduler, for debug bundles.
//! - [`simulate`]: what the scheduler would do with a described mix of programs, in virtual time.
//! - `sys`: system calls: sockets, clocks, credentials.
//! - [`ctl`]: what `nvsharectl` does, a file a command.
pub mod bus;
pub mod config;
pub mod ctl;
pub mod daemon;
pub mod gpu_faults;
pub mod identity;
#[cfg(test)]
mod layers;
pub mod recorder;
pub mod simulate;
mod sys;
pub mod timeline;

pub use nvshare_sched as scheduler;
