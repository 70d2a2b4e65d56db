//! What `nvshare-agent` and `nvshare-device-plugin` have in common as programs in a container on a node of Kubernetes.
//!
//! - [`command`]: the end of `main`, and `--check-config`.
//! - [`config`]: a configuration file that may be missing, and reading it again.
//! - [`log`]: the log, which goes to stderr.
//! - [`scheduler`]: connecting to the scheduler's control socket.
//! - [`signals`]: the signals that end a program or make it reload.

pub mod command;
pub mod config;
pub mod log;
pub mod scheduler;
pub mod signals;
