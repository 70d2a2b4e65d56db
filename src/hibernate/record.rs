//! The record of an image: whether the program is the image or a process, and what has to be finished.
//!
//! **A record that cannot be read changes nothing**: its image is neither deleted nor restored, and no
//! process is ended or continued. It may be readable later, or by a newer version.

use crate::{process::Identity, scope::Scope};
use serde::{Deserialize, Serialize};
use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{MetadataExt, OpenOptionsExt},
    },
    path::Path,
};

const RECORD: &str = "record";
/// The version of records and manifests.
pub const VERSION: u32 = 2;
/// Maximum length of a record in bytes.
const MAX_RECORD: u64 = 4096;

/// Where the program is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// In this process, which may be stopped. The image is not complete. CRIU may be at work in the scope.
    /// `expected`: the estimated size of the image, in bytes.
    Saving {
        process: Identity,
        scope: Scope,
        #[serde(default)]
        expected: u64,
    },
    /// In the image. This process is stopped and has to be ended.
    Ending { process: Identity },
    /// In the image.
    Saved,
    /// In the image. The processes of the scope have to be ended.
    Restoring { scope: Scope },
    /// In this process of the scope. All processes of the scope were checked, are stopped and frozen, and
    /// have to continue.
    Continuing { process: Identity, scope: Scope },
    /// In this process, until it ends.
    Restored { process: Identity },
    /// In the image, or on this other host, which has a copy of the image and of this record. Only an order says
    /// that it is in the image.
    Sent { host: String },
}

#[derive(Debug, Serialize, Deserialize)]
struct Record {
    version: u32,
    /// The user of the program.
    uid: u32,
    stage: Stage,
}

impl Stage {
    /// The process that was restored, unless it has ended.
    pub fn process(&self) -> Option<i32> {
        match self {
            Self::Continuing { process, .. } | Self::Restored { process } if process.lives().unwrap_or(true) => {
                Some(process.pid)
            }
            _ => None,
        }
    }
}

/// Reads the record of an image: the user and the stage. `None`: the image has no record.
///
/// # Errors
/// The record cannot be read now, or by this version. [`io::ErrorKind::Unsupported`]: another version has written it.
pub fn read(image: &Path) -> io::Result<Option<(u32, Stage)>> {
    let text = match read_sealed(&image.join(RECORD), MAX_RECORD) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        text => text?,
    };
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let Version { version } = serde_json::from_slice(&text)?;
    if version != VERSION {
        let why = format!("its record has version {version}, of another version of nvshare");
        return Err(io::Error::new(io::ErrorKind::Unsupported, why));
    }
    let Record { uid, stage, .. } = serde_json::from_slice(&text)?;
    Ok(Some((uid, stage)))
}

/// Writes the record of an image.
///
/// # Errors
/// The record may have the old or the new contents.
pub fn write(image: &Path, uid: u32, stage: &Stage) -> io::Result<()> {
    replace(image, RECORD, &serde_json::to_vec(&Record { version: VERSION, uid, stage: stage.clone() })?)
}

/// Writes a file so that it has either the old or the new contents, even after a crash.
pub fn replace(directory: &Path, name: &str, contents: &[u8]) -> io::Result<()> {
    let new = directory.join(format!("{name}.new"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(contents)?;
    file.sync_all()?;
    fs::rename(new, directory.join(name))?;
    File::open(directory)?.sync_all()
}

/// Reads a file that only the helper can change.
///
/// # Errors
/// The file is longer than `max` bytes, or others can change it.
pub fn read_sealed(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut contents = Vec::new();
    open_sealed(path)?.take(max + 1).read_to_end(&mut contents)?;
    match contents.len() as u64 > max {
        true => Err(io::Error::other("it is too long")),
        false => Ok(contents),
    }
}

/// Opens a regular file that only the helper's user can change and no process has open for writing.
pub fn open_sealed(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_file() || metadata.nlink() != 1 || metadata.uid() != own || metadata.mode() & 0o022 != 0 {
        return Err(io::Error::other("it is not a file that only the helper can change"));
    }
    // The kernel grants a read lease only if no process has the file open for writing.
    for lease in [libc::F_RDLCK, libc::F_UNLCK] {
        // SAFETY: the descriptor is open.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, lease) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(file)
}
