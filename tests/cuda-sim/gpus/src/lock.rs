//! Locks between processes: `flock` on files of the simulator's directory. A lock ends with the
//! process that holds it.

use crate::{Config, fork::close_in_child};
use std::{
    fs::{self, File, OpenOptions},
    io,
    os::{fd::AsRawFd, unix::fs::PermissionsExt},
    path::Path,
};

/// A file whose lock excludes other processes. The lock does not exclude other threads of this
/// process, which need a mutex too.
#[derive(Debug)]
pub(crate) struct LockFile(File);

impl LockFile {
    pub(crate) fn open(name: &str) -> io::Result<LockFile> {
        let file = open_shared(&Config::get().dir.join(name))?;
        close_in_child(file.as_raw_fd());
        Ok(LockFile(file))
    }

    pub(crate) fn lock(&self) {
        while !flock(&self.0, libc::LOCK_EX) {}
    }

    pub(crate) fn unlock(&self) {
        flock(&self.0, libc::LOCK_UN);
    }
}

/// Locks or unlocks. Returns false after a signal, or with `LOCK_NB` if another process holds the
/// lock.
pub(crate) fn flock(file: &File, operation: i32) -> bool {
    // SAFETY: the descriptor is open while `file` is borrowed.
    unsafe { libc::flock(file.as_raw_fd(), operation) == 0 }
}

/// Opens or creates a file that processes of every user may use.
pub(crate) fn open_shared(path: &Path) -> io::Result<File> {
    if let Some(dir) = path.parent().filter(|dir| !dir.exists()) {
        fs::create_dir_all(dir)?;
        let _ = fs::set_permissions(dir, fs::Permissions::from_mode(0o777));
    }
    let fresh = !path.exists();
    let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
    if fresh {
        let _ = file.set_permissions(fs::Permissions::from_mode(0o666));
    }
    Ok(file)
}
