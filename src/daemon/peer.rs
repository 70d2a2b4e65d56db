//! Who a client is, as the kernel says: its user, process, command line, systemd unit and container. A client never
//! says any of this itself, but for the name and the reason of one that is no program but holds a lock for somebody.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::socket;

/// A process that connected.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Identity {
    /// 0 where the process is in a PID namespace that we cannot see into.
    pub pid: i32,
    pub uid: u32,
    /// The short name (`comm`), which everybody may know; empty where unknown.
    pub name: String,
    /// The command line, which only its user and root may see.
    pub command: String,
    /// What it wants the lock for, where it says so.
    pub why: String,
    /// The systemd unit, like `session-2.scope` or `jupyter.service`; empty where there is none.
    pub unit: String,
    pub slice: String,
    /// The id of its container, shortened as container tools show it; empty where there is none.
    pub container: String,
    /// The kernel said where it belongs: where nothing is said of a container, there is none.
    pub placed: bool,
}

impl Identity {
    /// Whether one of the two may open memory that the other exports: they are of one user, in one container or both in
    /// none. Of a process that cannot be seen, the container is not known.
    pub fn may_share_with(&self, other: &Self) -> bool {
        self.placed && other.placed && (self.uid, &self.container) == (other.uid, &other.container)
    }
}

/// What the kernel knows of the process at the other end, and a descriptor that tells of its death.
pub fn identify(socket: BorrowedFd<'_>) -> std::io::Result<(Identity, Option<OwnedFd>)> {
    let credentials = socket::credentials(socket)?;
    let pidfd = socket::pidfd(socket, credentials.pid)?;
    let mut identity = Identity { pid: credentials.pid.max(0), uid: credentials.uid, ..Identity::default() };
    if identity.pid > 0 {
        let read = |file: &str| std::fs::read(format!("/proc/{}/{file}", identity.pid)).unwrap_or_default();
        identity.name = printable(&read("comm"));
        identity.command = command_line(&read("cmdline"));
        let cgroup = read("cgroup");
        let place = place(&String::from_utf8_lossy(&cgroup));
        identity.placed = !cgroup.is_empty();
        (identity.unit, identity.slice, identity.container) = (place.unit, place.slice, place.container);
    }
    Ok((identity, pidfd))
}

/// Whether the process is stopped, by a signal or by a debugger. One that is gone is not.
pub fn is_stopped(pid: i32) -> bool {
    if pid <= 0 {
        return false;
    }
    let stat = std::fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
    matches!(state(&stat), Some(b'T' | b't'))
}

/// When a process began, as `/proc/PID/stat` counts it: with its number this is a name that is never used twice.
pub fn began(pid: i32) -> Option<u64> {
    let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
    let end = stat.iter().rposition(|b| *b == b')')?;
    // The 22nd field; the state after the name is the third.
    let rest = std::str::from_utf8(stat.get(end + 2..)?).ok()?;
    rest.split(' ').nth(22 - 3)?.parse().ok()
}

/// The state letter of `/proc/PID/stat`. The name before it is in parentheses and may contain some itself.
fn state(stat: &[u8]) -> Option<u8> {
    let end = stat.iter().rposition(|b| *b == b')')?;
    stat.get(end + 2).copied()
}

/// How much of a command line is kept.
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

#[derive(Debug, Default, PartialEq, Eq)]
struct Place {
    unit: String,
    slice: String,
    container: String,
}

/// Reads `/proc/PID/cgroup`: version 2 has one line `0::/path`, version 1 has systemd's own hierarchy by name.
fn place(cgroup: &str) -> Place {
    let path = cgroup
        .lines()
        .filter_map(|line| line.split_once(':')?.1.split_once(':'))
        .find(|(controllers, _)| controllers.is_empty() || *controllers == "name=systemd")
        .map_or("", |(_, path)| path);
    let mut place = Place::default();
    for part in path.split('/') {
        let part = printable(part.as_bytes());
        if part.ends_with(".slice") {
            place.slice = part.clone();
        } else if part.ends_with(".service") || part.ends_with(".scope") {
            place.unit = part.clone();
        }
        if let Some(id) = container(&part) {
            place.container = id;
        }
    }
    place
}

/// The container id in a cgroup's name: `docker-<id>.scope`, `libpod-<id>.scope`, `cri-containerd-<id>.scope` or `<id>`.
fn container(part: &str) -> Option<String> {
    let name = part.strip_suffix(".scope").unwrap_or(part);
    let id = name.rsplit(['-', ':']).next().unwrap_or(name);
    (id.len() == 64 && id.bytes().all(|b| b.is_ascii_hexdigit())).then(|| id.chars().take(12).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_is_the_innermost_and_containers_are_known() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        let cases = [
            ("0::/user.slice/user-1000.slice/session-2.scope\n".to_owned(), ("session-2.scope", "user-1000.slice", "")),
            ("0::/system.slice/jupyter.service\n".to_owned(), ("jupyter.service", "system.slice", "")),
            (
                "0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-3.scope\n".to_owned(),
                ("run-3.scope", "app.slice", ""),
            ),
            (
                format!("0::/system.slice/docker-{id}.scope\n"),
                (&*format!("docker-{id}.scope"), "system.slice", "0123456789ab"),
            ),
            (
                format!("12:devices:/x\n1:name=systemd:/kubepods.slice/cri-containerd-{id}.scope\n"),
                (&*format!("cri-containerd-{id}.scope"), "kubepods.slice", "0123456789ab"),
            ),
            (format!("0::/docker/{id}\n"), ("", "", "0123456789ab")),
            ("0::/\n".to_owned(), ("", "", "")),
            (String::new(), ("", "", "")),
        ]
        .map(|(text, (unit, slice, container))| (text, [unit, slice, container].map(str::to_owned)));
        for (text, expected) in cases {
            let place = place(&text);
            assert_eq!([place.unit, place.slice, place.container], expected, "{text}");
        }
    }

    #[test]
    fn memory_is_shared_within_a_user_and_a_container_only() {
        let process =
            |uid, container: &str, placed| Identity { uid, container: container.into(), placed, ..Identity::default() };
        let one = process(1000, "a", true);
        assert!(one.may_share_with(&process(1000, "a", true)));
        for other in [(1001, "a", true), (1000, "b", true), (1000, "", true), (1000, "a", false)] {
            let other = process(other.0, other.1, other.2);
            assert!(!one.may_share_with(&other) && !other.may_share_with(&one), "{other:?}");
        }
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
