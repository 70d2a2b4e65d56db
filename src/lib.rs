//! nvshare: the scheduler daemon and its command line.
//!
//! - [`scheduler`]: the crate `nvshare-sched`, a state machine without I/O. It decides which
//!   programs run and whose memory is on the GPU.
//! - [`daemon`]: the scheduler's I/O: the clients' socket, D-Bus, systemd and NVML.
//! - [`gpu_faults`]: errors of GPUs that the driver reports, for the daemon and the device plugin.
//! - [`config`]: configuration and rules, for all programs.
//! - [`identity`]: the identity of a process.
//! - [`bus`]: the D-Bus interface as types, for the daemon and for `nvsharectl`.
//! - [`recorder`]: the newest events and commands of the scheduler, for debug bundles.
//! - [`timeline`]: pictures of the holders and the waiting clients of each GPU over time.
//! - [`simulate`]: simulates a described mix of programs under the scheduler, in virtual time.
//! - `sys`: system calls: sockets, clocks, credentials.
//! - [`ctl`]: the commands of `nvsharectl`, one file each.
pub mod bus;
#[cfg(test)]
mod calls;
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
