//! The sockets for metrics: passed by systemd, or bound as configured.

use std::fmt;
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};

use crate::config::metrics::Listen;
use crate::sys::descriptors;
use crate::sys::listen::{self, Bound};
use crate::sys::socket::{self, Kind};

/// The group that may use the control socket may also read metrics.
const MODE: u32 = 0o660;

/// Binds the configured socket. Must be called before other threads start. Dropping the [`Bound`]
/// removes the socket's file.
///
/// # Errors
/// Returns a sentence if the socket cannot be bound.
pub fn bind(listen: &Listen) -> Result<Option<(OwnedFd, Option<Bound>)>, String> {
    let failed = |e: &dyn fmt::Display| format!("cannot serve metrics on {listen} (`listen` in [metrics]): {e}");
    match listen {
        Listen::Nowhere => Ok(None),
        Listen::Path(path) => {
            let (socket, bound) = listen::listen(path, Kind::Metrics, MODE).map_err(|e| failed(&e))?;
            Ok(Some((socket, Some(bound))))
        }
        Listen::Address(address) => {
            let listener = TcpListener::bind(address).map_err(|e| match e.raw_os_error() {
                // nvshare.service restricts the address families that the daemon may use.
                Some(libc::EAFNOSUPPORT) => {
                    failed(&"the service may not open TCP sockets. Enable nvshare-metrics.socket instead")
                }
                _ => failed(&e),
            })?;
            let socket = OwnedFd::from(listener);
            descriptors::prepare(socket.as_fd()).map_err(|e| failed(&e))?;
            Ok(Some((socket, None)))
        }
    }
}

/// A socket on which metrics are served.
#[derive(Debug)]
pub enum Listener {
    Unix(tokio::net::UnixListener),
    Tcp(tokio::net::TcpListener),
}

impl Listener {
    /// Registers the socket with the calling runtime. The socket must be non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        if socket::is_local(socket.as_fd()) {
            return tokio::net::UnixListener::from_std(socket.into()).map(Self::Unix);
        }
        tokio::net::TcpListener::from_std(socket.into()).map(Self::Tcp)
    }

    /// The address, for the log.
    pub fn place(&self) -> String {
        match self {
            Self::Unix(listener) => {
                let address = listener.local_addr().ok();
                let path = address.as_ref().and_then(|address| address.as_pathname());
                path.map_or_else(|| "a socket".into(), |path| path.display().to_string())
            }
            Self::Tcp(listener) => listener.local_addr().map_or_else(|_| "TCP".into(), |address| address.to_string()),
        }
    }
}
