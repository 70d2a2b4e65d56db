//! Subordinate user ids. A user may run processes with the ids of the ranges that `/etc/subuid` assigns
//! to the user, for example in rootless containers. Such a process may choose any of these ids, so the
//! ids do not tell users apart. The owner of the range is accountable for the process.

use std::fs::{File, Metadata};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::sync::{Mutex, PoisonError};

const RANGES: &str = "/etc/subuid";
const USERS: &str = "/etc/passwd";
const GROUPS: &str = "/etc/group";

/// Returns the user that is accountable for processes with this user id: the owner of the id's range,
/// otherwise the user itself.
///
/// Knows only ranges in `/etc/subuid`, because other sources may be slow or unavailable.
pub fn accountable(uid: u32) -> u32 {
    static CACHE: Mutex<Option<(Version, Ranges)>> = Mutex::new(None);
    let mut cache = CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    let version = std::fs::metadata(RANGES).map(|file| Version::of(&file)).unwrap_or_default();
    if cache.as_ref().is_none_or(|(cached, _)| *cached != version) {
        *cache = Some(Ranges::read());
    }
    cache.as_ref().and_then(|(_, ranges)| ranges.owner(uid)).unwrap_or(uid)
}

/// Returns the groups of a user, by `/etc/passwd` and `/etc/group`.
pub fn groups(uid: u32) -> Vec<u32> {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    groups_of(uid, &read(USERS), &read(GROUPS))
}

/// The state of a file, which changes when the file is edited or replaced.
#[derive(Debug, Default, PartialEq, Eq)]
struct Version {
    inode: u64,
    changed: (i64, i64),
}

impl Version {
    fn of(file: &Metadata) -> Self {
        Self { inode: file.ino(), changed: (file.ctime(), file.ctime_nsec()) }
    }
}

/// Ranges of user ids and their owners, in the file's order.
#[derive(Debug, Default)]
struct Ranges(Vec<Range>);

#[derive(Debug)]
struct Range {
    first: u32,
    count: u32,
    owner: u32,
}

impl Ranges {
    fn read() -> (Version, Self) {
        let mut text = String::new();
        // Takes the version from the open file, so that the version fits the text even if another
        // file replaces this one.
        let version = File::open(RANGES).and_then(|mut file| {
            let version = Version::of(&file.metadata()?);
            file.read_to_string(&mut text)?;
            Ok(version)
        });
        let users = std::fs::read_to_string(USERS).unwrap_or_default();
        (version.unwrap_or_default(), Self::parse(&text, &users))
    }

    /// Parses `text`, the contents of `/etc/subuid`. Looks up named owners in `users`, the contents
    /// of `/etc/passwd`. Skips lines that the system's tools do not understand either.
    fn parse(text: &str, users: &str) -> Self {
        let range = |line: &str| {
            let mut fields = line.split(':');
            let (owner, first, count) = (fields.next()?, fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
            let named = users.lines().find_map(|line| {
                let mut fields = line.split(':');
                (fields.next()? == owner).then(|| fields.nth(1)?.parse().ok()).flatten()
            });
            Some(Range { first, count, owner: named.or_else(|| owner.parse().ok())? })
        };
        Self(text.lines().filter_map(range).collect())
    }

    /// Returns the owner of an id. Root's own ranges have no owner: root gives their ids to separate
    /// containers.
    fn owner(&self, uid: u32) -> Option<u32> {
        let of = |range: &&Range| range.owner != 0 && uid.checked_sub(range.first).is_some_and(|at| at < range.count);
        self.0.iter().find(of).map(|range| range.owner)
    }
}

fn groups_of(uid: u32, users: &str, groups: &str) -> Vec<u32> {
    let accounts = users.lines().filter_map(|line| {
        let fields: Vec<&str> = line.split(':').collect();
        let [name, _, id, group, ..] = fields[..] else { return None };
        (id.parse() == Ok(uid)).then(|| (name, group.parse::<u32>().ok()))
    });
    let mut found: Vec<u32> = Vec::new();
    for (name, primary) in accounts {
        found.extend(primary);
        found.extend(groups.lines().filter_map(|line| {
            let fields: Vec<&str> = line.split(':').collect();
            let [_, _, id, members, ..] = fields[..] else { return None };
            members.split(',').any(|member| member == name).then(|| id.parse::<u32>().ok()).flatten()
        }));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str =
        "root:x:0:0:root:/root:/bin/sh\nalice:x:1000:1000::/home/alice:/bin/sh\nbob:x:1001:100::/:/bin/sh\n";

    #[test]
    fn owner_is_found_by_name_or_number() {
        let text = "root:500000:65536\nalice:100000:65536\n1001:165536:10\nnobody-here:1:5\nbob:x:3\nbob:7\n";
        let ranges = Ranges::parse(text, PASSWD);
        for (uid, owner) in [
            (99_999, None),
            (100_000, Some(1000)),
            (165_535, Some(1000)),
            (165_536, Some(1001)),
            (165_546, None),
            (3, None),
            (500_000, None),
            (u32::MAX, None),
        ] {
            assert_eq!(ranges.owner(uid), owner, "{uid}");
        }
        let last = Ranges::parse(&format!("alice:{}:4294967295", u32::MAX), PASSWD);
        assert_eq!(last.owner(u32::MAX), Some(1000));
    }

    #[test]
    fn groups_are_primary_and_supplementary() {
        let groups = "root:x:0:\nlab:x:50:bob,alice\nvideo:x:44:alicex,bob\nusers:x:100:\nbroken\n";
        assert_eq!(groups_of(1000, PASSWD, groups), [1000, 50]);
        assert_eq!(groups_of(1001, PASSWD, groups), [100, 50, 44]);
        assert_eq!(groups_of(7, PASSWD, groups), [0; 0]);
    }
}
