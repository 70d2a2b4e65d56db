//! Finds `libnvshare.so`, and checks whether every process of this machine can safely load it. This
//! module never runs the library.

use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use object::elf;
use object::read::elf::{FileHeader, NativeElfFile, ProgramHeader};

use super::entries;
use crate::ctl::CtlError;

/// The size limit of a library, in bytes.
const SIZE_MAX: u64 = 64 << 20;

const MACHINE: elf::Machine = if cfg!(target_arch = "aarch64") { elf::EM_AARCH64 } else { elf::EM_X86_64 };

/// Returns the requested library, or else the library installed beside this program. Links in the
/// path are resolved, so that the checked file is the file that the loader loads later.
pub fn find(asked: Option<&Path>) -> Result<PathBuf, CtlError> {
    let exe = std::env::current_exe().unwrap_or_default();
    let bin = exe.parent().unwrap_or(Path::new("/usr/bin"));
    let multiarch = format!("lib/{}-linux-gnu", std::env::consts::ARCH);
    let places: Vec<PathBuf> = match asked {
        Some(path) => vec![path.into()],
        None => {
            let prefix = bin.parent().unwrap_or(Path::new("/"));
            let directories = [&multiarch, "lib64", "lib", "lib/nvshare"].map(|directory| prefix.join(directory));
            directories.into_iter().chain([bin.into()]).map(|directory| directory.join("libnvshare.so")).collect()
        }
    };
    let found = places.iter().find_map(|place| place.canonicalize().ok());
    found.ok_or_else(|| {
        let places: Vec<_> = places.iter().map(|place| place.display().to_string()).collect();
        CtlError::Failed(format!("there is no library {}. Set its path with --library", places.join(" nor ")))
    })
}

/// Checks that the path can be an entry of the loader's list.
///
/// # Errors
/// The loader cannot parse the path in its list, or `disable` would not recognize the path.
pub fn check_name(path: &Path) -> Result<(), String> {
    let name = path.as_os_str().as_bytes();
    if !entries::is_ours(name) || name.ends_with(b"\r") {
        return Err(
            "its file name is not libnvshare.so. nvsharectl recognizes its entries in the loader's list by that name"
                .into(),
        );
    }
    // `#` begins a comment. `$` begins a token that the loader replaces.
    if name.iter().any(|byte| byte.is_ascii_whitespace() || byte.is_ascii_control() || b":#$".contains(byte)) {
        return Err(
            "its path contains a space, colon, # or $, which the loader cannot read. Install it elsewhere".into()
        );
    }
    Ok(())
}

/// Checks the owner and the mode of the library and its directories.
///
/// # Errors
/// Some user cannot read the file, or a user other than root can change the file or one of its
/// directories.
pub fn check_owner(path: &Path) -> Result<(), String> {
    for (level, part) in path.ancestors().enumerate() {
        let part_name = part.display();
        let metadata = part.symlink_metadata().map_err(|e| format!("{part_name}: {e}"))?;
        let mode = metadata.mode();
        if level == 0 && !metadata.is_file() {
            return Err("it is not a regular file".into());
        }
        if metadata.uid() != 0 {
            return Err(format!(
                "{part_name} belongs to user {}, who could replace the library for all users",
                metadata.uid()
            ));
        }
        if mode & 0o002 != 0 || (mode & 0o020 != 0 && metadata.gid() != 0) {
            return Err(format!("{part_name} is writable by users other than root (mode {:o})", mode & 0o7777));
        }
        let (needed, verb) = if level == 0 { (0o444, "read") } else { (0o111, "entered") };
        if mode & needed != needed {
            return Err(format!("{part_name} cannot be {verb} by all users (mode {:o})", mode & 0o7777));
        }
    }
    Ok(())
}

/// Returns the version of a `libnvshare.so` for this machine. For any other file, returns an error
/// that describes the file.
pub fn version(path: &Path) -> Result<String, String> {
    let regular = path.metadata().map_err(|e| e.to_string())?.is_file();
    if !regular {
        return Err("it is not a regular file".into());
    }
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path).map_err(|e| e.to_string())?;
    file.take(SIZE_MAX).read_to_end(&mut bytes).map_err(|e| e.to_string())?;
    let foreign = |_| "it is not a shared object for this machine's architecture".to_owned();
    let file = NativeElfFile::<&[u8]>::parse(&*bytes).map_err(foreign)?;
    let (header, endian) = (file.elf_header(), file.endian());
    if header.e_machine(endian) != MACHINE || header.e_type(endian) != elf::ET_DYN {
        return Err("it is not a shared object for this machine's architecture".into());
    }
    for segment in file.elf_program_headers() {
        let Ok(Some(mut notes)) = segment.notes(endian, &*bytes) else { continue };
        while let Ok(Some(note)) = notes.next() {
            if note.name() == b"nvshare"
                && let Ok(version) = std::str::from_utf8(note.desc())
            {
                return Ok(version.into());
            }
        }
    }
    Err("it is not nvshare's library or is incomplete: it contains no nvshare version".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_that_the_loader_would_split_is_refused() {
        assert_eq!(check_name(Path::new("/usr/lib/libnvshare.so")), Ok(()));
        assert_eq!(check_name(Path::new("/usr/l\u{ef}b/libnvshare.so")), Ok(()));
        for bad in [
            "/a b/libnvshare.so",
            "/a:/libnvshare.so",
            "/a#/libnvshare.so",
            "/$LIB/libnvshare.so",
            "/a\r/libnvshare.so",
        ] {
            assert!(check_name(Path::new(bad)).unwrap_err().contains("Install it elsewhere"), "{bad}");
        }
        for bad in ["/usr/lib/libnvshare.so.1", "/usr/lib/libnvshare.so\r", "/usr/lib/other.so"] {
            assert!(check_name(Path::new(bad)).unwrap_err().contains("file name"), "{bad}");
        }
    }

    #[test]
    fn other_files_have_no_version() {
        assert!(version(Path::new("/bin/true")).unwrap_err().contains("contains no nvshare version"));
        assert!(version(Path::new("/etc/passwd")).unwrap_err().contains("not a shared object"));
        assert!(version(Path::new("/")).unwrap_err().contains("regular file"));
    }
}
