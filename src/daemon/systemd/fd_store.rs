//! Clients' connections and D-Bus locks in systemd's file descriptor store (`FDSTORE=1`). Stored
//! descriptors outlive the daemon.

use std::fmt;
use std::os::fd::OwnedFd;

/// The kind of client that a stored connection belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A program, with one file descriptor: its socket.
    Program,
    /// A D-Bus lock, with two file descriptors under one name: the daemon's end of the `AcquireLock`
    /// socket, and a memfd with the state for the next daemon.
    Lock,
}

/// The version of the locks' memfds that this daemon writes. Other versions are rejected.
pub const LOCK_RECORD: u16 = 1;

/// The name of a connection in the store. The name contains everything that the next daemon knows about
/// the client before the client answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionName {
    pub kind: Kind,
    /// The negotiated protocol version. For a lock, the version of its memfd.
    pub version: u16,
    pub client: u64,
    /// Start time of the client's process, in clock ticks since boot. 0 if unknown. The start time
    /// distinguishes the process from a later process with the same PID.
    pub start_time: u64,
}

impl ConnectionName {
    /// Parses a name. `None` if it is not the name of a connection.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, rest) = match text.strip_prefix('v') {
            Some(rest) => (Kind::Program, rest),
            None => (Kind::Lock, text.strip_prefix('l')?),
        };
        let mut parts = rest.split('.');
        let version = parts.next()?.parse().ok()?;
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let (client, start_time) = (number()?, number()?);
        parts.next().is_none().then_some(Self { kind, version, client, start_time })
    }
}

impl fmt::Display for ConnectionName {
    /// Formats the name. The name is short, because one environment variable of at most 128 KiB contains
    /// the names of all connections.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Program => 'v',
            Kind::Lock => 'l',
        };
        write!(f, "{kind}{}.{:x}.{:x}", self.version, self.client, self.start_time)
    }
}

/// A connection that the previous daemon stored.
#[derive(Debug)]
pub struct StoredConnection {
    pub name: ConnectionName,
    pub socket: OwnedFd,
    /// The memfd of a lock. `None` for a program.
    pub record: Option<OwnedFd>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_names_round_trip_and_are_short() {
        for kind in [Kind::Program, Kind::Lock] {
            let name = ConnectionName { kind, version: 3, client: 0xabcdef, start_time: 0x12_3456_789a };
            assert_eq!(ConnectionName::parse(&name.to_string()), Some(name));
        }
        for other in
            ["", "l", "lock", "w3.1.2", "clients", "control", "v3", "v3.1", "v3.1.2.3", "vx.1.2", "v3.-1.2", "v3.1.2 "]
        {
            assert_eq!(ConnectionName::parse(other), None, "{other}");
        }
        // One environment variable must have room for the names of the listening sockets and of all
        // connections that nvshare.service can store.
        let unit = include_str!("../../../systemd/nvshare.service");
        let most = unit.lines().find_map(|line| line.strip_prefix("FileDescriptorStoreMax="));
        let most: usize = most.expect("nvshare.service keeps descriptors").parse().expect("a number");
        let kind = Kind::Program;
        let longest = ConnectionName { kind, version: 99, client: 1 << 40, start_time: 1 << 44 }.to_string().len() + 1;
        assert!(most * longest + 64 < 128 << 10);
    }
}
