//! Where metrics are served: sockets that systemd passed, and what the configuration says.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use serde::Deserialize;
use serde::de::{self, Deserializer};

use crate::daemon::config::Scalar;
use crate::daemon::socket::{self, Bound, Kind};

/// The group may read them, as it may use the control socket.
const MODE: u32 = 0o660;

/// The section `[metrics]`.
#[derive(Debug, Clone, Deserialize, Default)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct Section {
    /// An empty text says: nowhere.
    #[serde(default, deserialize_with = "read_listen")]
    pub listen: Option<Listen>,
}

/// Where the configuration has metrics served.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Listen {
    #[default]
    Nowhere,
    Path(PathBuf),
    Address(SocketAddr),
}

const ALLOWED: &str = "the path of a socket, like \"/run/nvshare-metrics/metrics.sock\", an address with a port, like \
                       \"127.0.0.1:9810\" or \"[::1]:9810\", or nothing at all";

impl Listen {
    fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Ok(Self::Nowhere);
        }
        if text.starts_with('/') {
            return Ok(Self::Path(text.into()));
        }
        let wrong = |_| format!("metrics.listen cannot be {text:?}: {ALLOWED} is allowed");
        text.parse().map(Self::Address).map_err(wrong)
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nowhere => f.write_str("nowhere"),
            Self::Path(path) => path.display().fmt(f),
            Self::Address(address) => address.fmt(f),
        }
    }
}

fn read_listen<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Listen>, D::Error> {
    let parsed = match Scalar::read(from, "metrics.listen", ALLOWED)? {
        Scalar::Text(text) => Listen::parse(&text),
        Scalar::Number(number) => Err(format!("metrics.listen cannot be {number}: {ALLOWED} is allowed")),
    };
    parsed.map(Some).map_err(de::Error::custom)
}

/// Binds what the configuration says, before there are other threads. What is returned beside the socket removes its file.
pub fn bind(listen: &Listen) -> Result<Option<(OwnedFd, Option<Bound>)>, String> {
    let failed = |e: &dyn fmt::Display| format!("cannot serve metrics on {listen}, as [metrics] listen says: {e}");
    match listen {
        Listen::Nowhere => Ok(None),
        Listen::Path(path) => {
            let (socket, bound) = socket::listen(path, Kind::Metrics, MODE).map_err(|e| failed(&e))?;
            Ok(Some((socket, Some(bound))))
        }
        Listen::Address(address) => {
            let listener = TcpListener::bind(address).map_err(|e| match e.raw_os_error() {
                // The unit has it so.
                Some(libc::EAFNOSUPPORT) => failed(
                    &"as a service the scheduler may open no such socket: systemd can, see nvshare-metrics.socket",
                ),
                _ => failed(&e),
            })?;
            let socket = OwnedFd::from(listener);
            socket::prepare(socket.as_fd()).map_err(|e| failed(&e))?;
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
    /// For the runtime that this is called in. The socket does not block.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        if socket::is_local(socket.as_fd()) {
            return tokio::net::UnixListener::from_std(socket.into()).map(Self::Unix);
        }
        tokio::net::TcpListener::from_std(socket.into()).map(Self::Tcp)
    }

    /// What it is bound to, for the log.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_or_an_address_with_a_port_is_allowed() {
        assert_eq!(Listen::parse(""), Ok(Listen::Nowhere));
        assert_eq!(Listen::parse("/run/m.sock"), Ok(Listen::Path("/run/m.sock".into())));
        for address in ["127.0.0.1:9810", "[::1]:9810", "0.0.0.0:1"] {
            let Ok(Listen::Address(parsed)) = Listen::parse(address) else { panic!("{address}") };
            assert_eq!(parsed.to_string(), address);
        }
        for wrong in ["9810", "localhost:9810", "::1:9810:x", "127.0.0.1", "metrics.sock", ":9810"] {
            let error = Listen::parse(wrong).expect_err(wrong);
            assert!(error.starts_with(&format!("metrics.listen cannot be {wrong:?}: the path of a socket")), "{error}");
        }
    }
}
