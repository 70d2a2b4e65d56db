//! The process at the other end of a connection, as the kernel describes it: user, process, command line, systemd
//! unit and container. None of this is the client's own word, except the name and the reason of a lock acquired over
//! D-Bus.

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::identity::{Cgroup, Identity};
use crate::sys::credentials;

/// The identity of the process at the other end, and a descriptor that becomes readable when the process ends.
pub fn identify(socket: BorrowedFd<'_>) -> std::io::Result<(Identity, Option<OwnedFd>)> {
    let credentials = credentials::credentials(socket)?;
    let pidfd = credentials::pidfd(socket, credentials.pid)?;
    let groups = credentials::groups(socket, credentials.gid)?;
    let mut identity = Identity { pid: credentials.pid.max(0), uid: credentials.uid, groups, ..Identity::default() };
    describe(&mut identity);
    Ok((identity, pidfd))
}

/// The identity of a process that does not connect to the clients' socket itself: a caller on D-Bus, as the bus or the kernel
/// identified it.
pub fn identify_caller(pid: i32, uid: u32, groups: Vec<u32>) -> Identity {
    let mut identity = Identity { pid, uid, groups, ..Identity::default() };
    describe(&mut identity);
    identity
}

/// Adds what the kernel says of the process.
fn describe(identity: &mut Identity) {
    if identity.pid <= 0 {
        return;
    }
    let read = |file: &str| std::fs::read(format!("/proc/{}/{file}", identity.pid)).unwrap_or_default();
    let (name, command, cgroup) = (read("comm"), read("cmdline"), read("cgroup"));
    identity.name = printable(&name);
    identity.command = command_line(&command);
    if !cgroup.is_empty() {
        place(identity, Cgroup::read(&String::from_utf8_lossy(&cgroup)));
    }
}

/// Adds the control group of the process, and what follows from it.
pub fn place(identity: &mut Identity, cgroup: Cgroup) {
    identity.placed = true;
    identity.unit = cgroup.unit().to_owned();
    identity.slice = cgroup.slice().to_owned();
    identity.container = cgroup.container().to_owned();
    identity.pod.uid = cgroup.of_system().pod.map_or_else(String::new, |(_, uid)| uid);
    identity.cgroup = cgroup;
}

/// The short name of a process. `None` if it has ended.
pub fn name(pid: i32) -> Option<String> {
    Some(printable(&std::fs::read(format!("/proc/{pid}/comm")).ok()?)).filter(|_| pid > 0)
}

/// True if the process is in a PID namespace below ours, as processes in containers are, or in one that is not
/// visible.
pub fn is_in_another_namespace(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let of_each = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    // Kernels before 4.1 do not show NSpid; a process that has ended has no status.
    pid <= 0 || of_each.is_some_and(|numbers| numbers.split_whitespace().count() > 1)
}

/// True if the process is stopped, by a signal or by a debugger. False if it has ended.
pub fn is_stopped(pid: i32) -> bool {
    if pid <= 0 {
        return false;
    }
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    matches!(state(&stat), Some(b'T' | b't'))
}

/// When a process began, as `/proc/PID/stat` counts it: with its number this is a name that is never used twice.
pub fn start_time(pid: i32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|b| *b == b')')?;
    // The 22nd field; the state after the name is the third.
    let rest = std::str::from_utf8(stat.get(end + 2..)?).ok()?;
    rest.split(' ').nth(22 - 3)?.parse().ok()
}

/// The process that started it, or who is in its place.
pub fn parent(pid: i32) -> Option<i32> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|b| *b == b')')?;
    // The fourth field, after the state.
    std::str::from_utf8(stat.get(end + 2..)?).ok()?.split(' ').nth(1)?.parse().ok()
}

/// The state letter of `/proc/PID/stat`. The name before it is in parentheses and may contain some itself.
fn state(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|b| *b == b')')?;
    stat.get(end + 2).copied()
}

/// Bytes of a command line that are kept.
const MAX_COMMAND: usize = 512;

fn command_line(raw: &[u8]) -> String {
    let words: Vec<String> = raw.split(|b| *b == 0).filter(|w| !w.is_empty()).map(printable).collect();
    let mut line = words.join(" ");
    if line.len() > MAX_COMMAND {
        let end = (0..=MAX_COMMAND).rev().find(|i| line.is_char_boundary(*i)).unwrap_or(0);
        line.truncate(end);
        line.push('…');
    }
    line
}

/// Text that is safe on a terminal and in a log: a process chooses its own name and command line.
fn printable(raw: &[u8]) -> String {
    let text = String::from_utf8_lossy(raw);
    text.trim_end_matches('\n').chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn the_groups_of_who_connected_are_all_of_its_groups() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("a pair of sockets");
        let (identity, _) = identify(ours.as_fd()).expect("an identity");
        let mut expected = nix::unistd::getgroups().expect("groups");
        expected.push(nix::unistd::getegid());
        let expected: std::collections::BTreeSet<u32> = expected.into_iter().map(|gid| gid.as_raw()).collect();
        assert_eq!(identity.groups.into_iter().collect::<std::collections::BTreeSet<_>>(), expected);
        drop(theirs);
    }

    #[test]
    fn the_state_follows_the_last_parenthesis() {
        assert_eq!(state(b"17 (a) T (b) S 1 2 3"), Some(b'S'));
        assert_eq!(state(b"17 (sh) T 1 2 3"), Some(b'T'));
        assert_eq!(state(b""), None);
    }

    #[test]
    fn what_a_process_calls_itself_cannot_write_to_a_terminal() {
        assert_eq!(command_line(b"python\0-c\0print('\x1b[2J')\0"), "python -c print('?[2J')");
        let long = command_line(&[b'x'; 10_000]);
        assert_eq!(long.chars().count(), MAX_COMMAND + 1);
    }
}
