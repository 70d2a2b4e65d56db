//! Atomic replacement of a file: after a power failure, either the old or the new content is complete.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Writes `text` to a file beside `path`, syncs it and renames it over `path`. Empty text removes the file.
///
/// # Errors
/// The error of the first call that failed; `path` then has its old content, unless the error came from syncing the directory.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
    }
    let beside = path.with_extension("new");
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    if let Err(e) = written.and_then(|()| std::fs::rename(&beside, path)) {
        // On a full disk, a partial file wastes space.
        let _ = std::fs::remove_file(&beside);
        return Err(e);
    }
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}
