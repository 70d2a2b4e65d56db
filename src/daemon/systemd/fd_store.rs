//! Clients' connections, D-Bus locks and swap files in systemd's file descriptor store
//! (`FDSTORE=1`). Stored descriptors outlive the daemon.

use std::fmt;
use std::fs::File;
use std::os::fd::OwnedFd;

/// What is stored under a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A program, with one file descriptor: its socket.
    Program,
    /// A D-Bus lock, with two file descriptors under one name: the daemon's end of the `AcquireLock`
    /// socket, and a memfd with the state for the next daemon.
    Lock,
    /// A program's swap file, with two file descriptors under one name: the file, and a memfd that
    /// describes it.
    SwapFile,
}

/// The version of the locks' memfds that this daemon writes. Other versions are rejected.
pub const LOCK_RECORD: u16 = 2;
/// The version of the swap files' memfds that this daemon writes. Other versions are rejected.
pub const SWAP_FILE_RECORD: u16 = 1;

/// The name of an entry in the store. The name contains everything that the next daemon knows about the
/// client before the client answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EntryName {
    pub kind: Kind,
    /// The negotiated protocol version. For a lock or a swap file, the version of its memfd.
    pub version: u16,
    pub client: u64,
    /// Start time of the client's process, in clock ticks since boot. 0 if unknown. The start time
    /// distinguishes the process from a later process with the same PID.
    pub start_time: u64,
}

impl EntryName {
    /// Parses a name. `None` if it is not the name of an entry.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, rest) = match text.split_at_checked(1)? {
            ("v", rest) => (Kind::Program, rest),
            ("l", rest) => (Kind::Lock, rest),
            ("f", rest) => (Kind::SwapFile, rest),
            _ => return None,
        };
        let mut parts = rest.split('.');
        let version = parts.next()?.parse().ok()?;
        let mut number = || u64::from_str_radix(parts.next()?, 16).ok();
        let (client, start_time) = (number()?, number()?);
        parts.next().is_none().then_some(Self { kind, version, client, start_time })
    }
}

impl fmt::Display for EntryName {
    /// Formats the name. The name is short, because one environment variable of at most 128 KiB contains
    /// the names of all entries.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Program => 'v',
            Kind::Lock => 'l',
            Kind::SwapFile => 'f',
        };
        write!(f, "{kind}{}.{:x}.{:x}", self.version, self.client, self.start_time)
    }
}

/// What the previous daemon stored.
#[derive(Debug, Default)]
pub struct Inherited {
    pub connections: Vec<StoredConnection>,
    pub swap_files: Vec<StoredSwapFile>,
}

/// A connection that the previous daemon stored.
#[derive(Debug)]
pub struct StoredConnection {
    pub name: EntryName,
    pub socket: OwnedFd,
    /// The memfd of a lock. `None` for a program.
    pub record: Option<OwnedFd>,
}

/// A swap file that the previous daemon stored.
#[derive(Debug)]
pub struct StoredSwapFile {
    pub name: EntryName,
    pub file: File,
    /// The memfd.
    pub record: File,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_are_short() {
        for kind in [Kind::Program, Kind::Lock, Kind::SwapFile] {
            let name = EntryName { kind, version: 3, client: 0xabcdef, start_time: 0x12_3456_789a };
            assert_eq!(EntryName::parse(&name.to_string()), Some(name));
        }
        for other in [
            "", "l", "lock", "ä", "w3.1.2", "clients", "control", "v3", "v3.1", "v3.1.2.3", "vx.1.2", "v3.-1.2",
            "v3.1.2 ",
        ] {
            assert_eq!(EntryName::parse(other), None, "{other}");
        }
        // One environment variable must have room for the names of the listening sockets and of all
        // entries that nvshare.service can store.
        let unit = include_str!("../../../systemd/nvshare.service");
        let most = unit.lines().find_map(|line| line.strip_prefix("FileDescriptorStoreMax="));
        let most: usize = most.expect("nvshare.service keeps descriptors").parse().expect("a number");
        let kind = Kind::Program;
        let longest = EntryName { kind, version: 99, client: 1 << 40, start_time: 1 << 44 }.to_string().len() + 1;
        assert!(most * longest + 64 < 128 << 10);
    }
}
