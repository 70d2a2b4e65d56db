//! A listening socket with a single owner. The owner locks a file beside the socket, and removes
//! both files at the end.

use std::fs::{DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::process::umask;

use super::socket::{self, Kind};

/// The backlog that `listen` requests. The kernel caps it at `net.core.somaxconn`.
const BACKLOG: i32 = 4096;
/// Time to wait for the lock of a process that is gone, and the time between two attempts.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
const LOCK_RETRY: Duration = Duration::from_millis(5);

/// The reason why a socket cannot be bound, with a remedy if there is one.
#[derive(Debug, thiserror::Error)]
pub enum BindError {
    /// Another daemon holds the lock on the lock file.
    #[error(
        "another nvshare-scheduler ({pid}) already serves {}. Stop it first, or choose another path with --socket",
        path.display()
    )]
    Locked { path: PathBuf, pid: String },
    /// A process that does not use the lock file accepts connections on the socket.
    #[error(
        "another process already answers on {}. Stop it first, or choose another path with --socket",
        path.display()
    )]
    Answers { path: PathBuf },
    /// The file at `path` is not a socket.
    #[error("{} exists and is not a socket. Move it away, or choose another path", path.display())]
    NotASocket { path: PathBuf },
    #[error("cannot {what} {}: {error}", path.display())]
    Os { what: &'static str, path: PathBuf, error: io::Error },
}

/// The files of a socket that this process bound. Dropping this value removes them.
#[derive(Debug)]
pub struct Bound {
    path: PathBuf,
    lock_path: PathBuf,
    /// The lock file, which stays locked while the socket exists.
    _lock: File,
    /// The directory that this process created. Dropping the value removes the directory if it is
    /// empty.
    created_directory: Option<PathBuf>,
}

impl Drop for Bound {
    fn drop(&mut self) {
        // This process still holds the lock, so the socket cannot belong to another daemon.
        let _ = std::fs::remove_file(&self.path);
        let _ = std::fs::remove_file(&self.lock_path);
        if let Some(directory) = &self.created_directory {
            let _ = std::fs::remove_dir(directory);
        }
    }
}

/// Binds `path` with the file mode `mode`, and listens. Replaces the socket of a daemon that has
/// died.
///
/// The function temporarily changes the umask of the process, so it must be called before other
/// threads exist.
///
/// # Errors
/// Another process serves the socket, `path` is not a socket, or a system call fails.
pub fn listen(path: &Path, kind: Kind, mode: u32) -> Result<(OwnedFd, Bound), BindError> {
    let os = |what, error| BindError::Os { what, path: path.into(), error };
    let created_directory = create_directory(path).map_err(|e| os("create the directory of", e))?;
    let lock_path = {
        let mut name = path.as_os_str().to_owned();
        name.push(".lock");
        PathBuf::from(name)
    };
    let lock = take_lock(&lock_path, path)?;
    match std::fs::symlink_metadata(path) {
        Ok(found) if !found.file_type().is_socket() => return Err(BindError::NotASocket { path: path.into() }),
        Ok(_) => match socket::connect(path, kind) {
            Err(e) if e.kind() == io::ErrorKind::ConnectionRefused => {
                std::fs::remove_file(path).map_err(|e| os("remove the stale socket", e))?;
            }
            // Either the connection succeeded, or the listening process is slow or speaks another
            // protocol.
            _ => return Err(BindError::Answers { path: path.into() }),
        },
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(os("look at", e)),
    }
    let socket = socket::create(kind).map_err(|e| os("create a socket for", e))?;
    let address = socket::address(path).map_err(|e| os("bind", e))?;
    // `bind` creates the file with the mode that the umask allows, so the mode is never too
    // permissive.
    let before = umask(Mode::from_bits_truncate(!mode & 0o777));
    let bound = rustix::net::bind(&socket, &address);
    umask(before);
    bound.map_err(|e| os("bind", e.into()))?;
    let bound = Bound { path: path.into(), lock_path, _lock: lock, created_directory };
    rustix::net::listen(&socket, BACKLOG).map_err(|e| os("listen on", e.into()))?;
    Ok((socket, bound))
}

/// Binds `path` in a directory that only this user can write to, and listens for connections of all
/// users. Replaces the socket of a process that has died. Unlike [`listen`], this function may be
/// called while other threads exist.
///
/// # Errors
/// A system call fails.
pub fn listen_within(path: &Path) -> Result<OwnedFd, BindError> {
    let os = |what, error| BindError::Os { what, path: path.into(), error };
    if let Some(directory) = path.parent() {
        let made = DirBuilder::new().recursive(true).mode(0o755).create(directory);
        made.map_err(|e| os("create the directory of", e))?;
    }
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(os("remove the stale socket", e)),
        _ => {}
    }
    let socket = socket::create(Kind::Packets).map_err(|e| os("create a socket for", e))?;
    let address = socket::address(path).map_err(|e| os("bind", e))?;
    rustix::net::bind(&socket, &address).map_err(|e| os("bind", e.into()))?;
    // No client can connect before `listen`, so changing the mode after `bind` is safe.
    let everybody = std::fs::Permissions::from_mode(0o666);
    std::fs::set_permissions(path, everybody).map_err(|e| os("set the mode of", e))?;
    rustix::net::listen(&socket, BACKLOG).map_err(|e| os("listen on", e.into()))?;
    Ok(socket)
}

fn create_directory(path: &Path) -> io::Result<Option<PathBuf>> {
    let Some(directory) = path.parent().filter(|d| !d.as_os_str().is_empty() && !d.exists()) else { return Ok(None) };
    std::fs::create_dir_all(directory)?;
    Ok(Some(directory.into()))
}

/// Opens and locks the lock file. The previous holder removes the file when it exits. The lock
/// therefore counts only if the path still names the locked file.
///
/// If a daemon is killed while it starts a helper, the helper's process has the lock file open until it
/// executes the helper's program. The lock of a process that is gone is therefore awaited.
fn take_lock(lock_path: &Path, path: &Path) -> Result<File, BindError> {
    let os = |error| BindError::Os { what: "open", path: lock_path.into(), error };
    let begin = Instant::now();
    loop {
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .custom_flags(libc::O_NOFOLLOW)
            .open(lock_path)
            .map_err(os)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(os(error)),
            Err(TryLockError::WouldBlock) => {
                let mut pid = String::new();
                let _ = file.read_to_string(&mut pid);
                let is_gone = !pid.is_empty() && !Path::new("/proc").join(pid.trim()).exists();
                if is_gone && begin.elapsed() < LOCK_PATIENCE {
                    thread::sleep(LOCK_RETRY);
                    continue;
                }
                let pid = if pid.is_empty() { "starting now".into() } else { format!("process {}", pid.trim()) };
                return Err(BindError::Locked { path: path.into(), pid });
            }
        }
        let ours = file.metadata().map_err(os)?;
        let named = std::fs::symlink_metadata(lock_path).ok();
        if named.is_some_and(|named| named.ino() == ours.ino() && named.dev() == ours.dev()) {
            let _ =
                file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
            return Ok(file);
        }
    }
}
