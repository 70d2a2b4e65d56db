//! Reads small files, such as state and configuration. Whatever else is at a file's path, reading neither
//! blocks nor fills the memory.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The most bytes of a small file.
const MOST: u64 = 16 << 20;

/// Reads a file.
///
/// # Errors
/// The file cannot be read, has more than 16 MiB, or is a FIFO, a device or a directory.
pub fn read(path: &Path) -> io::Result<String> {
    // Without `O_NONBLOCK`, opening a FIFO would wait for a writer.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    check_kind(&file)?;
    let mut text = String::new();
    // The size is not checked before, because the file may grow.
    let read = file.take(MOST + 1).read_to_string(&mut text)?;
    if read as u64 > MOST {
        return Err(io::Error::new(ErrorKind::FileTooLarge, "it has more than 16 MiB"));
    }
    Ok(text)
}

/// Checks that an open file is neither a FIFO, nor a device or a directory.
///
/// # Errors
/// It is one.
pub fn check_kind(file: &File) -> io::Result<()> {
    if file.metadata()?.is_file() {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is not a regular file"))
}
