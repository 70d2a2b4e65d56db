//! `/etc/ld.so.preload` on disk. The file is read and replaced atomically. The old file is kept
//! under another name until the trials of the new file have passed. After a power failure or a
//! kill, either the complete old file or the complete new file exists.

use std::fs::{File, Metadata, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::{Builder, NamedTempFile, TempPath};
use xattr::FileExt;

use crate::ctl::CtlError;

pub const FILE: &str = "/etc/ld.so.preload";
/// Prefix of temporary files in the same directory. The next change removes leftover files.
const BESIDE: &str = ".ld.so.preload.nvshare-";
/// The lock file for changes. Only root can lock it, and a reboot removes it.
const LOCK: &str = "/run/nvshare-preload.lock";
/// Timeout of waiting for another process that holds the lock.
const PATIENCE: Duration = Duration::from_secs(120);
/// The size limit of the file, in bytes.
const SIZE_MAX: u64 = 64 << 10;

/// The file before a change. `before` is `None` if the file does not exist.
#[derive(Debug)]
pub struct Found {
    path: PathBuf,
    before: Option<(Vec<u8>, Metadata)>,
}

/// Reads the file. If the file is a symbolic link, its target is read and will be replaced.
pub fn read() -> Result<Found, CtlError> {
    let file = Path::new(FILE);
    let metadata = match file.symlink_metadata() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Found { path: file.into(), before: None }),
        metadata => metadata.map_err(|e| cannot("read", file, &e))?,
    };
    let path = file.canonicalize().map_err(|e| match metadata.is_symlink() {
        true => CtlError::Failed(format!("{FILE} is a dangling symbolic link ({e}). Remove it first")),
        false => cannot("read", file, &e),
    })?;
    if !path.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return Err(CtlError::Failed(format!("{FILE} is not a regular file. Remove it first")));
    }
    let before = read_regular(&path).map_err(|e| cannot("read", &path, &e))?;
    Ok(Found { path, before: Some(before) })
}

fn read_regular(path: &Path) -> io::Result<(Vec<u8>, Metadata)> {
    let file = File::open(path)?;
    let metadata = file.metadata()?;
    let mut bytes = Vec::new();
    file.take(SIZE_MAX + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > SIZE_MAX {
        true => Err(io::Error::other("it is longer than 64 KiB, so it is not a list of libraries")),
        false => Ok((bytes, metadata)),
    }
}

/// Takes the lock. Waits while another process that changes the file holds the lock.
pub fn lock() -> Result<File, CtlError> {
    let path = Path::new(LOCK);
    let open = File::options().create(true).truncate(false).write(true).mode(0o600).open(path);
    let file = open.map_err(|e| cannot("open", path, &e))?;
    let until = Instant::now() + PATIENCE;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(cannot("lock", path, &e)),
            Err(TryLockError::WouldBlock) if Instant::now() > until => {
                return Err(CtlError::Failed(format!("cannot lock {FILE}: another nvsharectl holds the lock")));
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

impl Found {
    pub fn text(&self) -> &[u8] {
        self.before.as_ref().map_or(&[], |(text, _)| text)
    }

    /// Returns true if some user cannot read the file. The loader silently ignores the file for
    /// such users.
    pub fn is_hidden(&self) -> bool {
        self.before.as_ref().is_some_and(|(_, metadata)| metadata.mode() & 0o044 != 0o044)
    }

    /// Replaces the file with one that contains `text`. If `text` is empty and the file is not a
    /// link, removes the file.
    pub fn replace(self, text: &[u8]) -> Result<Replaced, CtlError> {
        let Self { path, before } = self;
        let replaced = replace(&path, before.as_ref(), text);
        replaced.map_err(|e| cannot("change", &path, &e))
    }
}

/// A replaced file. The old file still exists under another name.
#[derive(Debug)]
pub struct Replaced {
    path: PathBuf,
    old: Option<TempPath>,
}

impl Replaced {
    /// Restores the old file, which is the original and not a copy.
    pub fn undo(self) -> Result<(), CtlError> {
        let undone = match self.old {
            Some(old) => old.persist(&self.path).map_err(|e| e.error),
            None => std::fs::remove_file(&self.path),
        };
        undone.and_then(|()| sync_directory(&self.path)).map_err(|e| cannot("put back", &self.path, &e))
    }
}

fn replace(path: &Path, before: Option<&(Vec<u8>, Metadata)>, text: &[u8]) -> io::Result<Replaced> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    sweep(directory);
    let old = before.map(|_| keep(path, directory)).transpose()?;
    if let (Some(old), Some((read, _))) = (&old, before)
        && read_regular(old)?.0 != *read
    {
        return Err(io::Error::other("another process has just changed it. Try again"));
    }
    if text.is_empty() && path == Path::new(FILE) {
        if before.is_some() {
            std::fs::remove_file(path)?;
        }
    } else {
        let new = beside(directory, before.map(|(_, metadata)| metadata), old.as_deref(), text)?;
        match before {
            Some(_) => drop(new.persist(path)?),
            // `persist_noclobber` fails if another process has created the file since it was read.
            None => drop(new.persist_noclobber(path)?),
        }
    }
    sync_directory(path)?;
    Ok(Replaced { path: path.into(), old })
}

/// Creates a second hard link to the file. Dropping the value removes the link.
fn keep(path: &Path, directory: &Path) -> io::Result<TempPath> {
    let link = Builder::new().prefix(BESIDE).make_in(directory, |name| std::fs::hard_link(path, name));
    link.map(NamedTempFile::into_temp_path)
}

/// Creates a file with `text`, synced to disk, and with the owner, mode and attributes of the old
/// file.
fn beside(directory: &Path, like: Option<&Metadata>, old: Option<&Path>, text: &[u8]) -> io::Result<NamedTempFile> {
    let mut new = Builder::new().prefix(BESIDE).tempfile_in(directory)?;
    new.write_all(text)?;
    let file = new.as_file();
    if let Some(metadata) = like {
        fchown(file, Some(metadata.uid()), Some(metadata.gid()))?;
    }
    file.set_permissions(PermissionsExt::from_mode(like.map_or(0o644, |metadata| metadata.mode() & 0o7777)))?;
    if let Some(old) = old {
        let old = File::open(old)?;
        // Errors are ignored, because a file system may lack attributes, and the kernel sets some
        // attributes itself.
        for name in old.list_xattr().into_iter().flatten() {
            if let Some(value) = old.get_xattr(&name)? {
                let _ = file.set_xattr(&name, &value);
            }
        }
    }
    file.sync_all()?;
    Ok(new)
}

fn sync_directory(path: &Path) -> io::Result<()> {
    File::open(path.parent().unwrap_or(Path::new("/")))?.sync_all()
}

/// Removes the temporary files of an nvsharectl that was killed.
fn sweep(directory: &Path) {
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        if entry.file_name().as_encoded_bytes().starts_with(BESIDE.as_bytes()) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// Returns the error as a sentence, with a remedy.
fn cannot(verb: &str, path: &Path, error: &io::Error) -> CtlError {
    use io::ErrorKind as Kind;
    let hint = match error.kind() {
        Kind::PermissionDenied if rustix::process::geteuid().is_root() => {
            " (it may be immutable: check with `lsattr`, clear with `chattr -i`)"
        }
        Kind::ReadOnlyFilesystem => " (remount its file system read-write, or change the image)",
        Kind::ResourceBusy | Kind::CrossesDevices => " (a file system is mounted on it. Unmount that first)",
        _ => "",
    };
    CtlError::Failed(format!("cannot {verb} {}: {error}{hint}", path.display()))
}
