//! Checks whether another user may open a file, by the file's mode and access control list. The
//! kernel offers this check only for the calling process.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The permission bits for read and write.
const BOTH: u32 = 6;

/// Returns true if a process with this user and these groups may open a file for reading and
/// writing.
///
/// # Errors
/// The file cannot be examined.
pub fn may_read_and_write(path: &Path, uid: u32, groups: &[u32]) -> io::Result<bool> {
    let file = std::fs::metadata(path)?;
    if uid == 0 {
        return Ok(true);
    }
    let mode = file.mode();
    let of_class = |shift: u32| mode >> shift & BOTH == BOTH;
    if uid == file.uid() {
        return Ok(of_class(6));
    }
    // If a file has an access control list, the group bits of its mode are the list's mask. The
    // list is therefore checked first.
    match xattr::get(path, "system.posix_acl_access") {
        Ok(Some(list)) => Ok(by_list(&list, file.gid(), uid, groups)),
        Ok(None) => Ok(of_class(if groups.contains(&file.gid()) { 3 } else { 0 })),
        Err(e) if e.kind() == io::ErrorKind::Unsupported => {
            Ok(of_class(if groups.contains(&file.gid()) { 3 } else { 0 }))
        }
        Err(e) => Err(e),
    }
}

/// Applies the access check algorithm of acl(5) to users other than the owner. `list` has the
/// format of the extended attribute: a four-byte version, then entries that consist of a two-byte
/// tag, a two-byte permission and a four-byte id.
fn by_list(list: &[u8], owner: u32, uid: u32, groups: &[u32]) -> bool {
    const USER: u16 = 0x02;
    const GROUP_OF_FILE: u16 = 0x04;
    const GROUP: u16 = 0x08;
    const MASK: u16 = 0x10;
    const OTHER: u16 = 0x20;
    let entries: Vec<(u16, u32, u32)> = list
        .get(4..)
        .unwrap_or_default()
        .as_chunks::<8>()
        .0
        .iter()
        .map(|&[a, b, c, d, id @ ..]| {
            (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]).into(), u32::from_le_bytes(id))
        })
        .collect();
    let of = |tag: u16| entries.iter().find(|(found, ..)| *found == tag).map(|(_, permission, _)| *permission);
    let mask = of(MASK).unwrap_or(BOTH);
    if let Some((_, permission, _)) = entries.iter().find(|(tag, _, id)| (*tag, *id) == (USER, uid)) {
        return permission & mask & BOTH == BOTH;
    }
    let mut mine = entries.iter().filter(|(tag, _, id)| match *tag {
        GROUP_OF_FILE => groups.contains(&owner),
        GROUP => groups.contains(id),
        _ => false,
    });
    let mut is_in_a_group = false;
    let by_group = mine.any(|(_, permission, _)| {
        is_in_a_group = true;
        permission & mask & BOTH == BOTH
    });
    by_group || (!is_in_a_group && of(OTHER).unwrap_or(0) & BOTH == BOTH)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn file() -> tempfile::NamedTempFile {
        tempfile::NamedTempFile::new().expect("a file")
    }

    #[test]
    fn file_mode_bits_of_the_users_class_apply() {
        let file = file();
        let about = std::fs::metadata(file.path()).expect("its metadata");
        let (owner, group, stranger) = (about.uid(), about.gid(), 12345);
        let may = |mode: u32, uid: u32, groups: &[u32]| {
            std::fs::set_permissions(file.path(), Permissions::from_mode(mode)).expect("its mode");
            may_read_and_write(file.path(), uid, groups).expect("an answer")
        };
        assert!(may(0o666, stranger, &[]) && may(0o666, stranger, &[group]));
        assert!(may(0o660, stranger, &[5, group]) && !may(0o660, stranger, &[5]));
        assert!(!may(0o664, stranger, &[5]) && !may(0o600, stranger, &[group]));
        assert!(!may(0o606, stranger, &[group]), "the class counts, not what others may");
        assert_eq!(may(0o066, owner, &[]), owner == 0);
        assert!(may(0o000, 0, &[]), "root may do everything");
        assert!(may_read_and_write(Path::new("/no/such/file"), 0, &[]).is_err());
    }

    #[test]
    fn an_acl_grants_access_to_users_and_groups() {
        const ALL: u16 = 7;
        let list = |entries: &[(u16, u16, u32)]| {
            let mut list = 2u32.to_le_bytes().to_vec();
            for (tag, permission, id) in entries {
                list.extend(tag.to_le_bytes());
                list.extend(permission.to_le_bytes());
                list.extend(id.to_le_bytes());
            }
            list
        };
        let seat = list(&[(1, 6, 0), (2, 6, 1000), (2, 4, 1001), (4, 6, 0), (8, 6, 44), (16, ALL, 0), (32, 0, 0)]);
        let may = |uid, groups: &[u32]| by_list(&seat, 50, uid, groups);
        assert!(may(1000, &[]) && !may(1001, &[]) && !may(1001, &[44]) && !may(1002, &[]));
        assert!(may(1002, &[44]) && may(1002, &[7, 50]));
        let masked = list(&[(1, 6, 0), (2, 6, 1000), (4, 6, 0), (16, 4, 0), (32, 6, 0)]);
        assert!(!by_list(&masked, 50, 1000, &[]) && !by_list(&masked, 50, 5, &[50]) && by_list(&masked, 50, 5, &[]));
        assert!(!by_list(&[], 50, 5, &[50]) && !by_list(&[2, 0, 0], 50, 5, &[]));
    }
}
