//! Records: state for the next daemon, in memfds that systemd stores together with the descriptors
//! that they describe.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum size of a record in bytes. A process can have 65536 groups.
const MAX_LEN: u64 = 1 << 20;

/// Creates an empty memfd.
pub fn create(name: &str) -> io::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC)?.into())
}

/// Writes a value at this position, as the file's last content.
pub fn write(file: &File, at: u64, value: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(value)?;
    file.write_all_at(&text, at)?;
    file.set_len(at + text.len() as u64)
}

/// Reads the value that begins at this position.
///
/// # Errors
/// The file cannot be read, or contains no such value.
pub fn read<T: DeserializeOwned>(file: &File, at: u64) -> io::Result<T> {
    let len = file.metadata()?.len().min(MAX_LEN).saturating_sub(at);
    let mut text = vec![0; len as usize];
    file.read_exact_at(&mut text, at)?;
    Ok(serde_json::from_slice(&text)?)
}
