//! Clients' connections, and locks over D-Bus, in systemd's file descriptor store (`FDSTORE=1`), where they outlive the daemon.

use std::fmt;
use std::os::fd::OwnedFd;

/// The kind of a connection's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A program's: one socket.
    Program,
    /// A lock's: the daemon's end of the socket that was given to the caller of `AcquireLock`, and a memory file with the data
    /// for the next daemon, both under the same name.
    Lock,
}

/// The version of the memory file of locks that this daemon writes, and the only one that it reads.
pub const LOCK_RECORD: u16 = 1;

/// The name of a connection in the store: all that the next daemon knows about the client before it asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionName {
    pub kind: Kind,
    /// The protocol version negotiated on it; for a lock, the version of its memory file.
    pub version: u16,
    pub client: u64,
    /// Start time of the client's process, in clock ticks since boot, or 0 if unknown. It distinguishes the process from a
    /// later one with the same id.
    pub start_time: u64,
}

impl ConnectionName {
    /// `None` for a name that is not a connection's.
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
    /// Short: the names of all connections together are one environment variable, which has 128 KiB at most.
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
    /// The memory file of a lock.
    pub record: Option<OwnedFd>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_short() {
        for kind in [Kind::Program, Kind::Lock] {
            let name = ConnectionName { kind, version: 3, client: 0xabcdef, start_time: 0x12_3456_789a };
            assert_eq!(ConnectionName::parse(&name.to_string()), Some(name));
        }
        for other in
            ["", "l", "lock", "w3.1.2", "clients", "control", "v3", "v3.1", "v3.1.2.3", "vx.1.2", "v3.-1.2", "v3.1.2 "]
        {
            assert_eq!(ConnectionName::parse(other), None, "{other}");
        }
        // As many connections as nvshare.service stores at most, in one environment variable with the listening sockets.
        let unit = include_str!("../../../systemd/nvshare.service");
        let most = unit.lines().find_map(|line| line.strip_prefix("FileDescriptorStoreMax="));
        let most: usize = most.expect("nvshare.service keeps descriptors").parse().expect("a number");
        let kind = Kind::Program;
        let longest = ConnectionName { kind, version: 99, client: 1 << 40, start_time: 1 << 44 }.to_string().len() + 1;
        assert!(most * longest + 64 < 128 << 10);
    }
}
