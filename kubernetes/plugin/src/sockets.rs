//! The socket files in kubelet's directory: the plugin's own socket, which this module creates, and
//! kubelet's socket.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use tokio::net::UnixListener;

/// The plugin's socket, which kubelet calls.
pub const PLUGIN: &str = "nvshare.sock";

/// kubelet's socket for registrations.
pub const KUBELET: &str = "kubelet.sock";

/// Identifies a file, so that a new file of the same name is recognized. Inode numbers are reused,
/// so the identity includes the time of the last change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

impl Identity {
    pub fn of(path: &Path) -> Option<Self> {
        let metadata = path.symlink_metadata().ok()?;
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        Some(Self { device: metadata.dev(), inode: metadata.ino(), changed })
    }

    /// Returns true if both identities have the same inode. The inode number of a bound socket is
    /// not reused, and the socket's mode may change.
    fn is_file(&self, other: &Self) -> bool {
        (self.device, self.inode) == (other.device, other.inode)
    }
}

/// The reason why the plugin's socket cannot be bound.
#[derive(Debug)]
pub enum BindError {
    /// Another process serves the socket.
    Taken(PathBuf),
    Failed(PathBuf, io::Error),
}

impl fmt::Display for BindError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Taken(path) => {
                write!(
                    f,
                    "another process serves {}. Only one plugin can run on a node: stop the other first",
                    path.display()
                )
            }
            Self::Failed(path, error) => write!(f, "cannot listen on {}: {error}", path.display()),
        }
    }
}

impl std::error::Error for BindError {}

/// The state of the plugin's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketState {
    Ours,
    /// The socket was removed. A starting kubelet removes all sockets of plugins.
    Gone,
    /// Another process has replaced the socket.
    Anothers,
}

/// The plugin's socket. Dropping this value removes the socket's file.
#[derive(Debug)]
pub struct PluginSocket {
    path: PathBuf,
    identity: Identity,
}

impl PluginSocket {
    /// Binds the socket. Replaces a socket on which no process listens any more.
    ///
    /// # Errors
    /// Another process serves the socket, or a system call fails.
    pub fn bind(path: &Path) -> Result<(UnixListener, Self), BindError> {
        let path = path.to_owned();
        if UnixStream::connect(&path).is_ok() {
            return Err(BindError::Taken(path));
        }
        let bound = match std::fs::remove_file(&path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(e),
            _ => UnixListener::bind(&path),
        };
        let listener = match bound {
            Ok(listener) => listener,
            Err(e) => return Err(BindError::Failed(path, e)),
        };
        match Identity::of(&path) {
            Some(identity) => Ok((listener, Self { path, identity })),
            None => Err(BindError::Failed(path, io::ErrorKind::NotFound.into())),
        }
    }

    pub fn state(&self) -> SocketState {
        match Identity::of(&self.path) {
            None => SocketState::Gone,
            Some(now) if now.is_file(&self.identity) => SocketState::Ours,
            Some(_) => SocketState::Anothers,
        }
    }
}

impl Drop for PluginSocket {
    fn drop(&mut self) {
        if self.state() == SocketState::Ours {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
