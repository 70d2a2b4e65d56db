//! Determines from a program's file whether it heeds `LD_PRELOAD`.

use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use object::Endianness;
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, ProgramHeader};

/// The number of bytes that are read from a program's file. ELF headers are at the beginning of a
/// file.
const READ_MAX: u64 = 1 << 20;
const SETUID_OR_SETGID: u32 = 0o6000;

/// Returns the reason why a program ignores `LD_PRELOAD`, if the program's file shows one. The
/// program's children may still heed `LD_PRELOAD`.
pub fn obstacle(program: &Path) -> Option<&'static str> {
    let metadata = program.metadata().ok()?;
    let mut bytes = Vec::new();
    std::fs::File::open(program).ok()?.take(READ_MAX).read_to_end(&mut bytes).ok()?;
    if bytes.starts_with(b"#!") {
        return None;
    }
    if metadata.mode() & SETUID_OR_SETGID != 0 || xattr::get(program, "security.capability").ok().flatten().is_some() {
        return Some("is setuid, setgid or has file capabilities, so the loader ignores LD_PRELOAD");
    }
    // Only the headers are parsed. An ElfFile also needs the sections, which are at the end of the
    // file.
    let headers = FileHeader64::<Endianness>::parse(&*bytes).and_then(|header| {
        let endian = header.endian()?;
        Ok((endian, header.program_headers(endian, &*bytes)?))
    });
    let Ok((endian, headers)) = headers else {
        return Some("is not a program for this machine");
    };
    let interpreter = headers.iter().find_map(|segment| segment.interpreter(endian, &*bytes).ok().flatten());
    match interpreter.map(|path| path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()) {
        None => Some("is linked statically, so it loads no library"),
        Some(loader) if loader.starts_with(b"ld-linux") => None,
        Some(_) => Some("does not use glibc, so it cannot load the library"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn glibc_programs_have_no_obstacle() {
        assert_eq!(obstacle(Path::new("/bin/true")), None);
        assert_eq!(obstacle(Path::new("/gone")), None, "nothing is known of it");
    }

    #[test]
    fn an_obstacle_is_read_from_the_file() {
        let directory = tempfile::tempdir().expect("a directory");
        let file = |name: &str, bytes: &[u8]| {
            let path = directory.path().join(name);
            std::fs::write(&path, bytes).expect("a file");
            path
        };
        assert_eq!(obstacle(&file("script", b"#!/bin/sh\n")), None);
        assert!(obstacle(&file("text", b"exit 1\n")).is_some_and(|why| why.contains("not a program")));

        let own = std::fs::read("/bin/true").expect("a program");
        let at =
            own.windows(11).position(|bytes| bytes == b"/ld-linux-x" || bytes == b"/ld-linux-a").expect("its loader");
        let musl = [&own[..at], b"/ld-musl-xx", &own[at + 11..]].concat();
        assert!(obstacle(&file("musl", &musl)).is_some_and(|why| why.contains("does not use glibc")));

        let setuid = file("setuid", &own);
        std::fs::set_permissions(&setuid, std::os::unix::fs::PermissionsExt::from_mode(0o4755)).expect("its mode");
        assert!(obstacle(&setuid).is_some_and(|why| why.contains("ignores LD_PRELOAD")));
    }
}
