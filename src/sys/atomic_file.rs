//! Atomic replacement of a file. After a power failure, the file contains either the complete old
//! content or the complete new content.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

/// Writes `text` to a file in the same directory, syncs that file and renames it to `path`. An
/// empty text removes the file at `path`.
///
/// # Errors
/// Returns the error of the first call that failed. `path` then has its old content, unless syncing
/// the directory failed.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    if text.is_empty() {
        return match std::fs::remove_file(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => Ok(()),
        };
    }
    let beside = path.with_extension("new");
    // A file of an earlier attempt, or whatever else is there. Opening a FIFO would wait for a reader.
    let _ = std::fs::remove_file(&beside);
    let written = File::create_new(&beside).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    if let Err(e) = written.and_then(|()| std::fs::rename(&beside, path)) {
        // Removes the partial file, which would waste space on a disk that may be full.
        let _ = std::fs::remove_file(&beside);
        return Err(e);
    }
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}
