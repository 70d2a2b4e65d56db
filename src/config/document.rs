//! TOML documents, and errors that name the file, line and column of a mistake.

use std::path::{Path, PathBuf};

use serde::de;

/// A mistake in a configuration file. The displayed text is a whole sentence that names the file
/// and, if known, the line and column.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read {}: {reason}", path.display())]
    Unreadable { path: PathBuf, reason: String },
    #[error("{}:{line}:{column}: {reason}", path.display())]
    Invalid { path: PathBuf, line: usize, column: usize, reason: String },
}

/// Parses the text of a file.
///
/// # Errors
/// Returns the first mistake, with its line and column.
pub fn parse<T: de::DeserializeOwned>(text: &str, path: &Path) -> Result<T, ConfigError> {
    toml::from_str(text).map_err(|e| {
        let at = e.span().map_or(0, |span| span.start);
        let reason = if lacks_value(text, at) { "there is no value after `=`" } else { e.message() };
        wrong(text, path, at, reason.to_owned())
    })
}

/// Returns true if the value at byte `at` is missing, that is, if the line ends after `=`.
fn lacks_value(text: &str, at: usize) -> bool {
    let (before, after) = text.split_at_checked(at).unwrap_or((text, ""));
    let is_end = |rest: &str| rest.is_empty() || rest.starts_with(['\n', '\r', '#']);
    before.trim_end_matches([' ', '\t']).ends_with('=') && is_end(after.trim_start_matches([' ', '\t']))
}

/// Builds an error about the mistake at byte `at` of a file.
pub fn wrong(text: &str, path: &Path, at: usize, reason: String) -> ConfigError {
    let (line, column) = position(text, at);
    ConfigError::Invalid { path: path.into(), line, column, reason }
}

/// Returns the line and column of byte `at`. Both are counted from 1, and columns count characters.
pub fn position(text: &str, at: usize) -> (usize, usize) {
    let before = text.get(..at).unwrap_or(text);
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or("").chars().count() + 1;
    (line, column)
}
