//! Reads a configuration file at the start, and again on SIGHUP.

use std::fmt;
use std::io;
use std::path::Path;

use nvshare::config::ConfigError;
use tracing::{info, warn};

/// Reads `explicit`, or `default_path`. If the file at `default_path` is missing, returns the
/// default configuration.
///
/// # Errors
/// The file cannot be read, or `parse` rejects its text.
pub fn load<T: Default>(
    explicit: Option<&Path>,
    default_path: &str,
    parse: impl FnOnce(&str, &Path) -> Result<T, ConfigError>,
) -> Result<T, ConfigError> {
    let path = explicit.unwrap_or(Path::new(default_path));
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, path),
        Err(e) if e.kind() == io::ErrorKind::NotFound && explicit.is_none() => Ok(T::default()),
        Err(e) => Err(ConfigError::Unreadable { path: path.into(), reason: e.to_string() }),
    }
}

/// Logs the result of a reload, and returns the new configuration. If the file is invalid, returns
/// `None`, and the old configuration stays in effect.
pub fn reloaded<T, E: fmt::Display>(read: Result<T, E>) -> Option<T> {
    match read {
        Ok(config) => {
            info!("the configuration was reloaded");
            Some(config)
        }
        Err(e) => {
            warn!("cannot reload the configuration, keeping the current one: {e}");
            None
        }
    }
}
