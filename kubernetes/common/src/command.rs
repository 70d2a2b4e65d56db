//! The last steps of a program's `main`.

use std::path::Path;
use std::process::ExitCode;

use nvshare::config::ConfigError;

/// Prints the result of `--check-config`.
///
/// # Errors
/// Returns the mistake in the file, with its line.
pub fn check_config<T>(path: &Path, read: Result<T, ConfigError>) -> Result<(), String> {
    read.map_err(|e| e.to_string())?;
    println!("{}: the configuration has no errors", path.display());
    Ok(())
}

/// Prints the error of `program`, if there is one, and returns the exit code.
pub fn exit_code(program: &str, result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{program}: {e}");
            ExitCode::FAILURE
        }
    }
}
