//! How a file is written that outlives the daemon, in the directory that systemd gives it.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// All of it or nothing, whenever the power fails. Nothing to say is no file.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
    }
    let beside = path.with_extension("new");
    let mut file = File::create(&beside)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}
