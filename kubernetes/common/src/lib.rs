//! Code shared by `nvshare-agent` and `nvshare-device-plugin`, which run in containers on a
//! Kubernetes node.
//!
//! - [`api_server`]: finding the API server, and describing its errors.
//! - [`command`]: the last steps of `main`, and `--check-config`.
//! - [`config`]: reading and reloading a configuration file that may be missing.
//! - [`log`]: the log, which is written to stderr.
//! - [`permissions`]: the keys that pods may set.
//! - [`retry`]: pauses between attempts.
//! - [`scheduler`]: connecting to the scheduler's control socket.
//! - [`signals`]: the signals that end a program or make it reload.

pub mod api_server;
pub mod command;
pub mod config;
pub mod log;
pub mod permissions;
pub mod retry;
pub mod scheduler;
pub mod signals;
