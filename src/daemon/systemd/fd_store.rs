//! Clients' connections in systemd's file descriptor store (`FDSTORE=1`), where they outlive the daemon.

use std::fmt;
use std::os::fd::OwnedFd;

/// The name of a connection in the store: all that the next daemon knows about the client before it asks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectionName {
    /// The protocol version negotiated on it.
    pub version: u16,
    pub client: u64,
    /// Start time of the client's process, in clock ticks since boot, or 0 if unknown. It distinguishes the process from a
    /// later one with the same id.
    pub start_time: u64,
}

impl ConnectionName {
    /// `None` for a name that is not a connection's.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix('v')?.split('.');
        let version = parts.next()?.parse().ok()?;
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let (client, start_time) = (number()?, number()?);
        parts.next().is_none().then_some(Self { version, client, start_time })
    }
}

impl fmt::Display for ConnectionName {
    /// Short: the names of all connections together are one environment variable, which has 128 KiB at most.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}.{:x}.{:x}", self.version, self.client, self.start_time)
    }
}

/// A connection that the previous daemon stored.
#[derive(Debug)]
pub struct StoredConnection {
    pub name: ConnectionName,
    pub socket: OwnedFd,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written_and_short() {
        let name = ConnectionName { version: 3, client: 0xabcdef, start_time: 0x12_3456_789a };
        assert_eq!(ConnectionName::parse(&name.to_string()), Some(name));
        for other in ["", "clients", "control", "v3", "v3.1", "v3.1.2.3", "vx.1.2", "v3.-1.2", "v3.1.2 "] {
            assert_eq!(ConnectionName::parse(other), None, "{other}");
        }
        // As many connections as nvshare.service stores at most, in one environment variable with the listening sockets.
        let unit = include_str!("../../../systemd/nvshare.service");
        let most = unit.lines().find_map(|line| line.strip_prefix("FileDescriptorStoreMax="));
        let most: usize = most.expect("nvshare.service keeps descriptors").parse().expect("a number");
        let longest = ConnectionName { version: 99, client: 1 << 40, start_time: 1 << 44 }.to_string().len() + 1;
        assert!(most * longest + 64 < 128 << 10);
    }
}
