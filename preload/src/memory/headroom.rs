//! The memory that this process can still take: what the kernel has available, and what its control groups and their parents
//! have left, whichever is less.

use crate::sys::file;
use alloc::{ffi::CString, vec::Vec};
use core::sync::atomic::{AtomicU64, Ordering};

/// Left to the host: below this, nothing more is swapped out.
const HOST_RESERVE: u64 = 512 << 20;
/// Left to a control group for its other memory, which grows as well: this fraction of its limit, and this much at most.
const GROUP_PART: u64 = 16;
const GROUP_RESERVE: u64 = 256 << 20;
/// No limit in version 1 is a number beyond this one.
const NO_LIMIT: u64 = 1 << 60;
/// The deepest nesting of control groups that is looked at.
const DEPTH: usize = 32;

/// Bytes of buffers whose pages are being allocated, which may not show in the figures yet.
static BEING_TAKEN: AtomicU64 = AtomicU64::new(0);

/// A claim on so many bytes, while their pages are being allocated.
#[derive(Debug)]
pub struct Claim(u64);

impl Claim {
    /// `None` if there is no room for so many bytes.
    pub fn new(bytes: u64) -> Option<Self> {
        let others = BEING_TAKEN.fetch_add(bytes, Ordering::SeqCst);
        let claim = Self(bytes);
        (of_host().min(of_groups()) >= bytes.saturating_add(others)).then_some(claim)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        BEING_TAKEN.fetch_sub(self.0, Ordering::SeqCst);
    }
}

/// `MemAvailable` of the kernel less the reserve, in bytes; `u64::MAX` if unknown.
fn of_host() -> u64 {
    let text = file::read(c"/proc/meminfo");
    let kib = field(&text, b"MemAvailable:");
    kib.map_or(u64::MAX, |kib| kib.saturating_mul(1024).saturating_sub(HOST_RESERVE))
}

/// Whether a control group limits the memory of this process. What is allocated ahead could then be what the program lacks.
pub fn is_limited() -> bool {
    of_groups() < u64::MAX
}

/// The least that any of the control groups has left.
fn of_groups() -> u64 {
    let text = file::read(c"/proc/self/cgroup");
    text.split(|b| *b == b'\n').filter_map(|line| of_line(line, b"/sys/fs/cgroup")).min().unwrap_or(u64::MAX)
}

/// The headroom of a line of `/proc/self/cgroup`: `0::/path` (version 2) or `N:memory:/path` (version 1), mounted at `root`.
fn of_line(line: &[u8], root: &[u8]) -> Option<u64> {
    let mut parts = line.splitn(3, |b| *b == b':');
    let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
    let files: Files = if controllers.is_empty() {
        VERSION_2
    } else if controllers.split(|b| *b == b',').any(|c| c == b"memory") {
        VERSION_1
    } else {
        return None;
    };
    let root = [root, files.mount].concat();
    let mut path = path.trim_ascii_end();
    let mut least = u64::MAX;
    for _ in 0..DEPTH {
        let group = [&root[..], path].concat();
        least = least.min(of_group(&group, &files).unwrap_or(u64::MAX));
        match path.iter().rposition(|b| *b == b'/') {
            Some(end) if path.len() > 1 => path = path.get(..end)?,
            _ => break,
        }
    }
    Some(least)
}

/// The files of one version of control groups.
struct Files {
    mount: &'static [u8],
    most: &'static [u8],
    used: &'static [u8],
    /// The field of `memory.stat` that counts page cache, which the kernel reclaims first.
    cached: &'static [u8],
}

const VERSION_2: Files =
    Files { mount: b"", most: b"/memory.max", used: b"/memory.current", cached: b"inactive_file " };
const VERSION_1: Files = Files {
    mount: b"/memory",
    most: b"/memory.limit_in_bytes",
    used: b"/memory.usage_in_bytes",
    cached: b"total_inactive_file ",
};

/// `None` if the group has no limit.
fn of_group(group: &[u8], files: &Files) -> Option<u64> {
    let read = |name: &[u8]| -> Vec<u8> {
        CString::new([group, name].concat()).map(|path| file::read(&path)).unwrap_or_default()
    };
    let most = number(&read(files.most)).filter(|most| *most < NO_LIMIT)?;
    let used = number(&read(files.used))?;
    let cached = field(&read(b"/memory.stat"), files.cached).unwrap_or(0);
    let reserve = (most / GROUP_PART).min(GROUP_RESERVE);
    Some(most.saturating_add(cached.min(used)).saturating_sub(used).saturating_sub(reserve))
}

/// The number after a name at the beginning of a line.
fn field(text: &[u8], name: &[u8]) -> Option<u64> {
    text.split(|b| *b == b'\n').find_map(|line| number(line.strip_prefix(name)?))
}

/// The number at the beginning of a text.
fn number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let end = text.iter().position(|b| !b.is_ascii_digit()).unwrap_or(text.len());
    core::str::from_utf8(text.get(..end)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::PathBuf, string::ToString};

    const MIB: u64 = 1 << 20;

    struct Groups(PathBuf);

    impl Groups {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(std::format!("nvshare-groups-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }

        fn put(&self, group: &str, files: [(&str, &str); 3]) {
            let group = self.0.join(group);
            fs::create_dir_all(&group).unwrap();
            for (name, contents) in files {
                fs::write(group.join(name), contents).unwrap();
            }
        }

        fn of(&self, line: &str) -> Option<u64> {
            of_line(line.as_bytes(), self.0.as_os_str().as_encoded_bytes())
        }
    }

    impl Drop for Groups {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_group_with_the_least_left_decides() {
        let groups = Groups::new("v2");
        let put = |group, most: &str, used: u64| {
            let used = (used * MIB).to_string();
            groups.put(group, [("memory.max", most), ("memory.current", &used), ("memory.stat", "inactive_file 0\n")]);
        };
        put("a", "1073741824\n", 500);
        put("a/b", "max\n", 400);
        put("a/b/c", "8589934592\n", 300);
        assert_eq!(groups.of("0::/a/b/c"), Some((1024 - 500 - 64) * MIB), "that above, less its sixteenth");
        put("a/b", "419430400\n", 400);
        assert_eq!(groups.of("0::/a/b/c"), Some(0));
        assert_eq!(groups.of("0::/other"), Some(u64::MAX));
        assert_eq!(groups.of("0::/"), Some(u64::MAX));
        assert_eq!(groups.of("5:cpu,cpuacct:/a"), None);
        assert_eq!(groups.of("nonsense"), None);
    }

    #[test]
    fn pages_of_files_are_not_in_the_way() {
        let groups = Groups::new("v1");
        groups.put(
            "memory/a",
            [
                ("memory.limit_in_bytes", "1073741824\n"),
                ("memory.usage_in_bytes", "1073741824\n"),
                ("memory.stat", "cache 1\ninactive_file 7\ntotal_inactive_file 209715200\n"),
            ],
        );
        assert_eq!(groups.of("9:memory:/a"), Some((200 - 64) * MIB));
    }

    #[test]
    fn no_limit_of_version_1_is_none() {
        let groups = Groups::new("v1-unlimited");
        let files =
            [("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.usage_in_bytes", "5\n"), ("memory.stat", "")];
        groups.put("memory/a", files);
        assert_eq!(groups.of("9:memory:/a"), Some(u64::MAX));
    }

    #[test]
    fn what_is_being_touched_counts() {
        let all = Claim::new(0).map(|_| of_host().min(of_groups())).unwrap();
        let half = Claim::new(all / 2).expect("there is room for half of it");
        assert!(Claim::new(all / 4 * 3).is_none());
        drop(half);
    }
}
