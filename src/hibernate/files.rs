//! The files that a program needs, because it has opened or mapped them. They are examined by a worker, as the
//! owner: the helper tells no user whether a file exists that the user may not see, and does not wait for
//! a file system of the owner that never answers.

use crate::{
    Refusal,
    process::Tree,
    rights::Rights,
    scope::Scope,
    store::hex,
    worker::{self, Limit, Task},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Read},
    os::{
        fd::AsFd,
        unix::fs::{FileExt, OpenOptionsExt},
    },
};

/// Maximum number of files that a program's needs contain.
const MAX_FILES: usize = 4000;
/// Maximum number of files that a check names.
const MAX_NAMED: usize = 20;
/// Bytes at the start of a file without a build ID that identify its build.
const START: u64 = 4096;
/// The type of the note with the build ID.
const NT_GNU_BUILD_ID: u32 = 3;
const PT_NOTE: u32 = 4;

/// How a program uses a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Use {
    Read,
    Write,
    /// Mapped with the right to execute it.
    Code,
}

/// A file that a program needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NeededFile {
    pub path: String,
    pub used: Use,
    /// The size or the build of a regular file. `None`: the file only has to exist.
    pub identity: Option<String>,
}

/// The work of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Examination {
    /// Prints the identity of each file.
    Identify(Vec<NeededFile>),
    /// Prints a text for each of the first files that differ.
    Compare(Vec<NeededFile>),
}

impl Examination {
    /// Examines the files, as the owner, and returns the text to print.
    ///
    /// # Errors
    /// The answer cannot be encoded.
    pub fn perform(self) -> io::Result<String> {
        Ok(match self {
            Self::Identify(files) => {
                let identify = |file: &NeededFile| identity(file).ok().flatten();
                serde_json::to_string(&files.iter().map(identify).collect::<Vec<_>>())?
            }
            Self::Compare(files) => {
                serde_json::to_string(&files.iter().filter_map(differs).take(MAX_NAMED).collect::<Vec<_>>())?
            }
        })
    }
}

/// Says how a file differs from the file that a program had.
fn differs(file: &NeededFile) -> Option<String> {
    let NeededFile { path, used, identity: expected } = file;
    let shown: String = format!("{path:?}").chars().take(500).collect();
    match identity(file) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            Some(format!("{shown} is missing. Copy it to this host, to the same path"))
        }
        Err(e) => Some(format!("its user may not open {shown} as the program did: {e}")),
        Ok(found) if expected.is_none() || found == *expected => None,
        Ok(found) => {
            let found = found.unwrap_or_else(|| "no regular file".into());
            let expected = expected.as_deref().unwrap_or_default();
            let remedy = match used {
                Use::Code => "Install the same build",
                Use::Read | Use::Write => "Copy it to this host",
            };
            Some(format!("{shown} is {found}, and was {expected} when the program was saved. {remedy}"))
        }
    }
}

/// Opens a file as the program did, and returns its identity. `None`: it is no regular file.
fn identity(file: &NeededFile) -> io::Result<Option<String>> {
    let metadata = fs::metadata(&file.path)?;
    if !metadata.is_file() {
        return Ok(None);
    }
    let is_written = file.used == Use::Write;
    let mut options = OpenOptions::new();
    let opened = options.read(!is_written).write(is_written).custom_flags(libc::O_NONBLOCK).open(&file.path)?;
    let size = metadata.len();
    if file.used != Use::Code {
        return Ok(Some(format!("{size} bytes")));
    }
    if let Some(id) = build_id(&opened) {
        return Ok(Some(format!("build {}", hex(id.get(..32).unwrap_or(&id)))));
    }
    let mut start = Vec::new();
    opened.take(START).read_to_end(&mut start)?;
    let digest = hex(Sha256::digest(&start).get(..8).unwrap_or_default());
    Ok(Some(format!("{size} bytes ({digest})")))
}

/// Returns the build ID of a 64-bit ELF file.
fn build_id(file: &File) -> Option<Vec<u8>> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (number(&header, 32, 8)?, number(&header, 54, 2)?, number(&header, 56, 2)?);
    let segments = (0..count.min(256)).filter_map(|index| {
        let mut segment = [0; 56];
        file.read_exact_at(&mut segment, table.checked_add(index * size)?).ok()?;
        (number(&segment, 0, 4)? == u64::from(PT_NOTE)).then_some((
            number(&segment, 8, 8)?,
            number(&segment, 32, 8)?,
            number(&segment, 48, 8)?,
        ))
    });
    segments.filter_map(|(offset, length, align)| id_in_notes(&notes(file, offset, length)?, align)).next()
}

fn notes(file: &File, offset: u64, length: u64) -> Option<Vec<u8>> {
    let mut notes = vec![0; usize::try_from(length).ok().filter(|length| *length <= 64 << 10)?];
    file.read_exact_at(&mut notes, offset).ok()?;
    Some(notes)
}

/// Returns the build ID among the notes of a segment.
fn id_in_notes(mut notes: &[u8], align: u64) -> Option<Vec<u8>> {
    let align = if align == 8 { 8 } else { 4 };
    loop {
        let part = |at| Some(number(notes, at, 4)? as usize);
        let (name, length, kind) = (part(0)?, part(4)?, part(8)?);
        let begin = (12_usize.checked_add(name)?).next_multiple_of(align);
        let end = begin.checked_add(length)?;
        if kind == NT_GNU_BUILD_ID as usize && notes.get(12..16) == Some(b"GNU\0") {
            return notes.get(begin..end).map(<[u8]>::to_vec);
        }
        notes = notes.get(end.next_multiple_of(align)..)?;
    }
}

/// Returns a little-endian number of this size in bytes.
fn number(bytes: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}

/// True if a path is a file of the kernel. Those of a process exist again when CRIU has created the process.
fn is_of_kernel(path: &str) -> bool {
    path.starts_with("/proc/") || path.starts_with("/sys/")
}

/// Returns the files that the processes of a tree have open or mapped, without their identities. Does not touch
/// the files.
fn needed(tree: &Tree) -> Vec<NeededFile> {
    let mut files = BTreeMap::new();
    for (path, is_written) in tree.files() {
        if let Some(path) = path.to_str().filter(|path| !is_of_kernel(path)) {
            let used = files.entry(path.to_owned()).or_insert(Use::Read);
            if is_written {
                *used = Use::Write;
            }
        }
    }
    for (path, is_code) in mappings(tree) {
        let used = files.entry(path).or_insert(Use::Read);
        if is_code && *used == Use::Read {
            *used = Use::Code;
        }
    }
    let file = |(path, used)| NeededFile { path, used, identity: None };
    files.into_iter().take(MAX_FILES).map(file).collect()
}

/// Returns the files that the processes of a tree have mapped, and whether each may be executed. Does not touch
/// the files.
pub fn mappings(tree: &Tree) -> Vec<(String, bool)> {
    let of = |pid: i32| {
        let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        maps.lines().filter_map(mapped).map(|(path, is_code)| (path.to_owned(), is_code)).collect::<Vec<_>>()
    };
    tree.pids().into_iter().flat_map(of).collect()
}

/// Returns the file in a line of `/proc/PID/maps`, and whether it may be executed.
fn mapped(line: &str) -> Option<(&str, bool)> {
    let mut fields = line.splitn(6, ' ');
    let (_, access, _, _, inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let path = fields.next()?.trim_start();
    // Names with escapes cannot be told from others. Files without a name have none on another host either.
    let is_named = path.starts_with('/') && !path.contains('\\') && !path.ends_with(" (deleted)");
    let is_file = inode != "0" && !path.starts_with("/dev/") && !path.starts_with("/memfd:");
    (is_named && is_file).then_some((path, access.contains('x')))
}

fn examine(rights: &Rights, work: Examination, limit: Limit<'_>) -> Result<worker::Done, Refusal> {
    let words = |e: io::Error| Refusal::new(format!("cannot examine its files: {e}"));
    let scope = Scope::new("files", rights.owner.uid).map_err(words)?;
    let root = File::open("/").map_err(words)?;
    worker::run(&scope, rights, Task::Examine(work), root.as_fd(), limit)
}

fn answer<T: for<'a> Deserialize<'a>>(done: &worker::Done) -> Result<T, Refusal> {
    serde_json::from_slice(&done.output)
        .map_err(|_| Refusal::new(format!("cannot examine its files: the worker failed: {}", done.status)))
}

/// Returns the files that a program needs, with their identities.
///
/// # Errors
/// The worker does not answer in time.
pub fn identify(rights: &Rights, tree: &Tree, limit: Limit<'_>) -> Result<Vec<NeededFile>, Refusal> {
    let files = needed(tree);
    let done = examine(rights, Examination::Identify(files.clone()), limit)?;
    let identities: Vec<Option<String>> = answer(&done)?;
    Ok(files.into_iter().zip(identities).map(|(file, identity)| NeededFile { identity, ..file }).collect())
}

/// Lists the files that are missing here or differ, each with the remedy.
///
/// # Errors
/// The worker does not answer in time.
pub fn compare(rights: &Rights, files: &[NeededFile], limit: Limit<'_>) -> Result<Vec<String>, Refusal> {
    answer(&examine(rights, Examination::Compare(files.to_vec()), limit)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_support::Directory;

    fn identified(path: &std::path::Path, used: Use) -> NeededFile {
        let file = NeededFile { path: path.to_str().expect("text").into(), used, identity: None };
        NeededFile { identity: identity(&file).expect("a file"), ..file }
    }

    #[test]
    fn programs_are_identified_by_their_build() {
        let own = std::env::current_exe().expect("this program");
        let file = identified(&own, Use::Code);
        let known = file.identity.as_deref().expect("an identity");
        assert!(known.starts_with("build ") || known.contains(" bytes ("), "{known}");
        assert_eq!(differs(&file), None);
        let why = differs(&NeededFile { identity: Some("build 00".into()), ..file }).expect("another build");
        assert!(why.contains(known) && why.contains("Install the same build"), "{why}");
    }

    #[test]
    fn a_build_id_is_found_among_other_notes() {
        let note = |kind: u32, description: &[u8]| {
            let mut note = [4_u32, description.len() as u32, kind].map(u32::to_le_bytes).concat();
            note.extend(b"GNU\0");
            note.extend(description);
            note
        };
        let id = [7; 20];
        let notes = [note(1, &[0; 16]), note(NT_GNU_BUILD_ID, &id)].concat();
        assert_eq!(id_in_notes(&notes, 4), Some(id.to_vec()));
        assert_eq!(id_in_notes(&notes[..notes.len() - 1], 4), None, "it is cut off");
        assert_eq!(id_in_notes(&note(1, &[0; 16]), 4), None);
        assert_eq!(id_in_notes(&[0xff; 32], 8), None);
    }

    #[test]
    fn files_that_differ_are_named_with_the_remedy() {
        let directory = Directory::new();
        let path = directory.0.join("log");
        fs::write(&path, "one").expect("a file");
        let (log, parent) = (identified(&path, Use::Write), identified(&directory.0, Use::Read));
        assert_eq!((log.identity.as_deref(), parent.identity.as_deref()), (Some("3 bytes"), None));
        assert_eq!((differs(&log), differs(&parent)), (None, None));
        fs::write(&path, "longer").expect("a file");
        assert!(differs(&log).is_some_and(|why| why.contains("is 6 bytes, and was 3 bytes")));
        fs::remove_file(&path).expect("removed");
        assert!(differs(&log).is_some_and(|why| why.contains("is missing. Copy it")));
    }

    #[test]
    fn files_of_the_kernel_are_not_needed() {
        for path in ["/proc/20002/stat", "/proc/self/maps", "/sys/fs/cgroup/x"] {
            assert!(is_of_kernel(path), "{path}");
        }
        assert!(!is_of_kernel("/process/x"));
    }

    #[test]
    fn files_are_found_in_maps() {
        let line = |rest: &str| format!("7f0000000000-7f0000001000 {rest}");
        let code = line("r-xp 00001000 fe:01 77                         /usr/lib/x y.so");
        assert_eq!(mapped(&code), Some(("/usr/lib/x y.so", true)));
        assert_eq!(mapped(&line("r--p 00000000 fe:01 77  /etc/data")), Some(("/etc/data", false)));
        for other in [
            "rw-p 00000000 00:00 0",
            "rw-p 00000000 00:00 0  [heap]",
            "rw-s 00000000 00:01 9  /memfd:x",
            "rw-s 00000000 fe:01 9  /tmp/x (deleted)",
            "rw-s 00000000 00:05 9  /dev/zero",
            "r--p 00000000 fe:01 9  /a\\012b",
        ] {
            assert_eq!(mapped(&line(other)), None, "{other}");
        }
    }

    #[test]
    fn identities_of_all_files_fit_into_an_answer() {
        let own = NeededFile { path: "/proc/self/exe".into(), used: Use::Code, identity: None };
        let text = Examination::Identify(vec![own; MAX_FILES]).perform().expect("an answer");
        assert!(text.len() <= worker::MAX_ANSWER, "{}", text.len());
        let identities: Vec<Option<String>> = serde_json::from_str(&text).expect("an answer");
        assert_eq!(identities.len(), MAX_FILES);
    }
}
