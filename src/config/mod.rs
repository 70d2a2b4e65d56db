//! Configuration and rules, shared by the daemon, `nvsharectl`, the simulator and the Kubernetes
//! programs. This module imports none of those programs.
//!
//! - [`file`]: the configuration file and its drop-ins, with every default.
//! - [`settings`], [`swap`], [`metrics`], [`log_level`]: the values of the file's sections.
//! - [`names`]: the names of settings' values.
//! - [`rules`]: limits of programs by unit, container, user and so on.
//! - [`document`]: TOML documents and their errors.
//! - [`scalar`]: values that are a number or a text.
//! - [`units`]: sizes and durations.
//! - [`paths`]: paths that several programs share.

pub mod document;
pub mod file;
pub mod log_level;
pub mod metrics;
pub mod names;
pub mod paths;
pub mod rules;
pub mod scalar;
pub mod settings;
pub mod swap;
pub mod units;

pub use document::ConfigError;
pub use file::Config;
pub use log_level::LogLevel;
