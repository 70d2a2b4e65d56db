//! The host memory that this process can still allocate: the minimum of the kernel's available memory
//! and the room in the process's cgroups and their ancestors.

use crate::sys::file;
use alloc::{ffi::CString, format, vec::Vec};
use core::sync::atomic::{AtomicU64, Ordering};
use rustix::process::{Resource, getrlimit};

/// Bytes left to the host. If less is available, no further memory is evicted to host memory.
const HOST_RESERVE: u64 = 512 << 20;
/// Bytes of address space left to the process below its limit: enough for the stacks and heaps of a few
/// threads.
const ADDRESS_RESERVE: u64 = 32 << 20;
/// The most NUMA nodes parsed from one range of a list, in case the text is malformed.
const MOST_NODES: u64 = 1024;
/// The reserve of a cgroup is its limit divided by `GROUP_PART`, but at most `GROUP_RESERVE` bytes. The
/// reserve leaves room for the cgroup's other memory, which also grows.
const GROUP_PART: u64 = 16;
const GROUP_RESERVE: u64 = 256 << 20;
/// In cgroup version 1, a larger limit means no limit.
const NO_LIMIT: u64 = 1 << 60;
/// The deepest nesting of cgroups that is checked.
const DEPTH: usize = 32;

/// Bytes of buffers whose pages are being allocated. Possibly the kernel's figures do not include
/// these pages yet.
static BEING_TAKEN: AtomicU64 = AtomicU64::new(0);

/// Reserves bytes while their pages are being allocated.
#[derive(Debug)]
pub struct Claim(u64);

impl Claim {
    /// Claims `bytes` bytes. Returns `None` if fewer are left after the claims of other threads.
    pub fn new(bytes: u64) -> Option<Self> {
        let others = BEING_TAKEN.fetch_add(bytes, Ordering::SeqCst);
        let claim = Self(bytes);
        (Headroom::now().left >= bytes.saturating_add(others)).then_some(claim)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        BEING_TAKEN.fetch_sub(self.0, Ordering::SeqCst);
    }
}

/// The memory that is available to this process.
#[derive(Debug, Clone, Copy)]
pub struct Headroom {
    /// Bytes that the process can still allocate.
    pub left: u64,
    /// The shortfall of a cgroup's free memory below the cgroup's reserve, in bytes.
    pub lacking: u64,
    /// Whether a cgroup limits the process's memory.
    pub is_limited: bool,
}

impl Headroom {
    pub const UNLIMITED: Self = Self { left: u64::MAX, lacking: 0, is_limited: false };

    pub fn now() -> Self {
        let groups = of_groups();
        let left = of_host().min(groups.try_into().unwrap_or(0));
        Self { left, lacking: groups.saturating_neg().try_into().unwrap_or(0), is_limited: groups < i64::MAX }
    }
}

/// Returns the lowest memory limit of this process's cgroups, minus the reserve, in bytes; `u64::MAX`
/// if no cgroup has a limit.
pub fn most_in_groups() -> u64 {
    most(in_groups(|group, files| limit(group, files).map(|most| (most - reserve(most)) as i64)))
}

/// Converts the result of [`in_groups`]: `i64::MAX`, which means no limit, becomes `u64::MAX`, and
/// negative values become 0.
fn most(least: i64) -> u64 {
    if least == i64::MAX { u64::MAX } else { least.try_into().unwrap_or(0) }
}

/// Returns the available bytes of the NUMA nodes that this process may use, minus the reserve;
/// `u64::MAX` if unknown.
fn of_host() -> u64 {
    let status = file::read(c"/proc/thread-self/status");
    available(&file::read(c"/proc/meminfo"), &status, b"/sys/devices/system/node")
}

/// Does the same as [`of_host`], with the contents of `/proc/meminfo` and of a thread's
/// `/proc/…/status`, and the directory of the NUMA nodes.
fn available(meminfo: &[u8], status: &[u8], nodes: &[u8]) -> u64 {
    let all = kib(meminfo, b"MemAvailable:").unwrap_or(u64::MAX);
    all.min(of_nodes(status, nodes).unwrap_or(u64::MAX)).saturating_sub(HOST_RESERVE)
}

/// Returns the free memory and page cache of the NUMA nodes that a thread may use, in bytes; `None` if
/// it may use all nodes. `status` is the thread's `/proc/…/status`. If the process allocates more, the
/// kernel kills it even if other nodes have free memory.
fn of_nodes(status: &[u8], root: &[u8]) -> Option<u64> {
    let allowed = list(line(status, b"Mems_allowed_list:")?);
    let mut is_limited = false;
    let mut left: u64 = 0;
    for node in list(&read(root, b"/has_memory")) {
        if !allowed.contains(&node) {
            is_limited = true;
            continue;
        }
        let name = format!("/node{node}/meminfo");
        let text = read(root, name.as_bytes());
        for what in ["MemFree:", "Inactive(file):"] {
            let bytes = kib(&text, format!("Node {node} {what}").as_bytes()).unwrap_or(0);
            left = left.saturating_add(bytes);
        }
    }
    is_limited.then_some(left)
}

/// Parses a list of numbers such as `0,2-3`.
fn list(text: &[u8]) -> Vec<u64> {
    let ranges = text.trim_ascii().split(|b| *b == b',').filter_map(|range| {
        let first = number(range)?;
        let last = range.iter().position(|b| *b == b'-').and_then(|dash| number(range.get(dash + 1..)?));
        Some(first..=last.unwrap_or(first).min(first.saturating_add(MOST_NODES)))
    });
    ranges.flatten().collect()
}

/// Returns the bytes of address space and private memory that this process may still map, minus the
/// reserve; `u64::MAX` without a limit.
pub fn addresses_left() -> u64 {
    let status = file::read(c"/proc/self/status");
    let below = |limit: Option<u64>, used: &[u8]| {
        limit.map_or(u64::MAX, |limit| limit.saturating_sub(kib(&status, used).unwrap_or(0) + ADDRESS_RESERVE))
    };
    let addresses = below(getrlimit(Resource::As).current, b"VmSize:");
    let data = below(getrlimit(Resource::Data).current, b"VmData:");
    addresses.min(data).min(commitment_left())
}

/// Returns the bytes that the host can still commit, minus the reserve; `u64::MAX` if the host
/// overcommits.
fn commitment_left() -> u64 {
    const NEVER: u64 = 2;
    if number(&file::read(c"/proc/sys/vm/overcommit_memory")) != Some(NEVER) {
        return u64::MAX;
    }
    let text = file::read(c"/proc/meminfo");
    let (limit, promised) = (kib(&text, b"CommitLimit:"), kib(&text, b"Committed_AS:"));
    limit.zip(promised).map_or(u64::MAX, |(limit, promised)| limit.saturating_sub(promised + HOST_RESERVE))
}

/// Returns the least room in any cgroup of this process. The value is negative if a cgroup's free
/// memory is below its reserve.
fn of_groups() -> i64 {
    in_groups(of_group)
}

/// Returns the minimum of `figure` over all cgroups of this process; `i64::MAX` if no cgroup has the
/// figure.
fn in_groups(figure: fn(&[u8], &Files) -> Option<i64>) -> i64 {
    let text = file::read(c"/proc/self/cgroup");
    let lines = text.split(|b| *b == b'\n');
    lines.filter_map(|line| of_line(line, b"/sys/fs/cgroup", figure)).min().unwrap_or(i64::MAX)
}

/// Returns the minimum of `figure` over a cgroup and its ancestors. `line` is a line of
/// `/proc/self/cgroup`: `0::/path` (version 2) or `N:memory:/path` (version 1). `root` is the mount
/// point of the cgroup file systems.
fn of_line(line: &[u8], root: &[u8], figure: fn(&[u8], &Files) -> Option<i64>) -> Option<i64> {
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
    let mut least = i64::MAX;
    for _ in 0..DEPTH {
        let group = [&root[..], path].concat();
        least = least.min(figure(&group, &files).unwrap_or(i64::MAX));
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
    /// Names of the files that contain limits; the smallest limit applies.
    most: &'static [&'static [u8]],
    used: &'static [u8],
    /// The field of `memory.stat` that counts page cache, which the kernel reclaims first.
    cached: &'static [u8],
}

const VERSION_2: Files =
    Files { mount: b"", most: &[b"/memory.max", b"/memory.high"], used: b"/memory.current", cached: b"inactive_file " };
const VERSION_1: Files = Files {
    mount: b"/memory",
    most: &[b"/memory.limit_in_bytes"],
    used: b"/memory.usage_in_bytes",
    cached: b"total_inactive_file ",
};

fn read(group: &[u8], name: &[u8]) -> Vec<u8> {
    CString::new([group, name].concat()).map(|path| file::read(&path)).unwrap_or_default()
}

/// Returns the limit of a cgroup, or `None` if it has no limit. `memory.high` is also a limit: above
/// it, the kernel throttles every allocation of the cgroup, because the kernel cannot reclaim
/// memory that is registered with the driver.
fn limit(group: &[u8], files: &Files) -> Option<u64> {
    let limits = files.most.iter().filter_map(|name| number(&read(group, name)));
    limits.min().filter(|most| *most < NO_LIMIT)
}

/// The part of a limit that is left to the cgroup's other memory.
fn reserve(most: u64) -> u64 {
    (most / GROUP_PART).min(GROUP_RESERVE)
}

/// Returns the room in a cgroup, or `None` if the cgroup has no limit.
fn of_group(group: &[u8], files: &Files) -> Option<i64> {
    let most = limit(group, files)?;
    let used = number(&read(group, files.used))?;
    let cached = field(&read(group, b"/memory.stat"), files.cached).unwrap_or(0);
    Some((most - reserve(most)).saturating_add(cached.min(used)) as i64 - used.min(NO_LIMIT) as i64)
}

/// Returns the rest of the line that begins with `name`.
fn line<'a>(text: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    text.split(|b| *b == b'\n').find_map(|line| line.strip_prefix(name))
}

/// Returns the number after `name`.
fn field(text: &[u8], name: &[u8]) -> Option<u64> {
    line(text, name).and_then(number)
}

/// Returns the number of KiB after `name`, converted to bytes.
fn kib(text: &[u8], name: &[u8]) -> Option<u64> {
    field(text, name).map(|kib| kib.saturating_mul(1024))
}

/// Parses the number at the beginning of a text.
fn number(text: &[u8]) -> Option<u64> {
    let text = text.trim_ascii_start();
    let end = text.iter().position(|b| !b.is_ascii_digit()).unwrap_or(text.len());
    core::str::from_utf8(text.get(..end)?).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{fs, path::PathBuf, string::ToString};

    const MIB: i64 = 1 << 20;

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

        fn of(&self, line: &str) -> Option<i64> {
            of_line(line.as_bytes(), self.0.as_os_str().as_encoded_bytes(), of_group)
        }
    }

    impl Drop for Groups {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn the_tightest_cgroup_determines_the_headroom() {
        let groups = Groups::new("v2");
        let put = |group, most: &str, used: i64| {
            let used = (used * MIB).to_string();
            groups.put(group, [("memory.max", most), ("memory.current", &used), ("memory.stat", "inactive_file 0\n")]);
        };
        put("a", "1073741824\n", 500);
        put("a/b", "max\n", 400);
        put("a/b/c", "8589934592\n", 300);
        assert_eq!(groups.of("0::/a/b/c"), Some((1024 - 500 - 64) * MIB), "that above, less its sixteenth");
        put("a/b", "419430400\n", 400);
        assert_eq!(groups.of("0::/a/b/c"), Some(-25 * MIB), "what is left to its other memory is taken");
        assert_eq!(groups.of("0::/other"), Some(i64::MAX));
        assert_eq!(groups.of("0::/"), Some(i64::MAX));
        assert_eq!(groups.of("5:cpu,cpuacct:/a"), None);
        assert_eq!(groups.of("nonsense"), None);
    }

    #[test]
    fn memory_high_limits_the_headroom() {
        let groups = Groups::new("high");
        let put = |high| {
            groups.put("a", [("memory.max", "1073741824\n"), ("memory.high", high), ("memory.current", "0\n")]);
            groups.of("0::/a")
        };
        assert_eq!(put("536870912\n"), Some((512 - 32) * MIB));
        assert_eq!(put("max\n"), Some((1024 - 64) * MIB));
    }

    #[test]
    fn only_allowed_numa_nodes_count() {
        let groups = Groups::new("nodes");
        let put = |name: &str, text: &str| groups.put(name, [("meminfo", text), ("x", ""), ("y", "")]);
        put("node0", "Node 0 MemTotal: 9000 kB\nNode 0 MemFree: 100 kB\nNode 0 Inactive(file): 20 kB\n");
        put("node2", "Node 2 MemFree: 7000 kB\n");
        fs::write(groups.0.join("has_memory"), "0,2-3\n").unwrap();
        let left = |list: &str| {
            let status = std::format!("Name:\tx\nMems_allowed_list:\t{list}\n");
            of_nodes(status.as_bytes(), groups.0.as_os_str().as_encoded_bytes())
        };
        assert_eq!(left("0"), Some(120 << 10));
        assert_eq!(left("0-2"), Some(7120 << 10));
        assert_eq!((left("0-7"), left("0,2,3")), (None, None));
        assert_eq!(of_nodes(b"Name:\tx\n", b"/nowhere"), None);
    }

    #[test]
    fn memory_of_the_host_and_of_the_allowed_nodes_limits_the_headroom() {
        let groups = Groups::new("host");
        groups.put("node0", [("meminfo", "Node 0 MemFree: 1048576 kB\n"), ("x", ""), ("y", "")]);
        fs::write(groups.0.join("has_memory"), "0-1\n").unwrap();
        let left = |host: &str, list: &str| {
            let (host, status) =
                (std::format!("MemAvailable: {host} kB\n"), std::format!("Mems_allowed_list:\t{list}\n"));
            available(host.as_bytes(), status.as_bytes(), groups.0.as_os_str().as_encoded_bytes())
        };
        const GIB: u64 = 1 << 30;
        assert_eq!(left("4194304", "0"), GIB - HOST_RESERVE);
        assert_eq!(left("4194304", "0-1"), 4 * GIB - HOST_RESERVE);
        assert_eq!(left("786432", "0"), GIB / 4);
    }

    #[test]
    fn an_unlimited_cgroup_has_unlimited_headroom() {
        assert_eq!((most(i64::MAX), most(5), most(-5)), (u64::MAX, 5, 0));
    }

    #[test]
    fn inactive_page_cache_counts_as_free() {
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
    fn an_unlimited_cgroup_v1_has_unlimited_headroom() {
        let groups = Groups::new("v1-unlimited");
        let files =
            [("memory.limit_in_bytes", "9223372036854771712\n"), ("memory.usage_in_bytes", "5\n"), ("memory.stat", "")];
        groups.put("memory/a", files);
        assert_eq!(groups.of("9:memory:/a"), Some(i64::MAX));
    }

    #[test]
    fn bytes_of_pending_claims_count_as_used() {
        let all = Claim::new(0).map(|_| Headroom::now().left).unwrap();
        let half = Claim::new(all / 2).expect("there is room for half of it");
        assert!(Claim::new(all / 4 * 3).is_none());
        drop(half);
    }
}
