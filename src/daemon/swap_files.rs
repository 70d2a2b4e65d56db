//! Files for swapped memory that does not fit into host memory (`[swap] file`).
//!
//! Disks can be slow, so a separate thread creates the files and reserves their space. The scheduling
//! loop sends this thread jobs and never waits. The files have no names. The kernel deletes a file once
//! the daemon, systemd's descriptor store and the client have closed it, so no file is ever left
//! behind.
//!
//! The client gets a separate open file description. The daemon checks with a write lease on its
//! own description whether any process still has the file open: the kernel grants the lease only if
//! no other description exists. This check also finds processes that received the descriptor from
//! the client.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;

use rustix::fs::{FallocateFlags, Mode, OFlags, fallocate, ftruncate, open, statvfs};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc::UnboundedSender;
use tracing::warn;

use crate::config::swap::SwapMax;
use crate::daemon::systemd;
use crate::daemon::systemd::fd_store::{EntryName, Kind, SWAP_FILE_RECORD, StoredSwapFile};
use crate::identity::Tenant;
use crate::scheduler::ClientId;
use crate::sys::{descriptors, lease};

/// Granularity of reserved space, in bytes. A small step limits the time for which one call can keep
/// the disk busy.
pub const STEP: u64 = 256 << 20;
/// Granularity of the library's buffers, in bytes. The library cannot use a smaller space.
const GRANULE: u64 = 2 << 20;
/// Bytes that a file may occupy beyond its reserved space, for the file system's own data.
const SLACK: u64 = 64 << 20;

/// What the next daemon must know about a swap file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Record {
    pub tenant: Tenant,
    /// Bytes of host memory that the client's control groups allow.
    pub ram_max: u64,
    /// Bytes reserved in the file. The file's size does not tell, because the client can change it.
    pub reserved: u64,
}

/// A swap file in systemd's descriptor store, which passes it to the next daemon.
#[derive(Debug)]
pub struct Stored {
    name: EntryName,
    memfd: File,
    record: Record,
}

impl Stored {
    /// Stores a client's file. `None` without systemd.
    pub fn keep(client: ClientId, file: &File, record: Record) -> Option<Self> {
        let name = EntryName { kind: Kind::SwapFile, version: SWAP_FILE_RECORD, client: client.0, start_time: 0 };
        let memfd = systemd::record::create("nvshare-swap-file").ok()?;
        systemd::record::write(&memfd, 0, &record).ok()?;
        systemd::keep(&name.to_string(), &[file.as_fd(), memfd.as_fd()]).then_some(Self { name, memfd, record })
    }

    /// Takes over a file that an earlier daemon stored. If its record cannot be read, forgets the file.
    pub fn inherit(stored: StoredSwapFile) -> Option<(ClientId, File, Self)> {
        let StoredSwapFile { name, file, record: memfd } = stored;
        let record = if name.version == SWAP_FILE_RECORD {
            systemd::record::read(&memfd, 0)
        } else {
            Err(io::ErrorKind::Unsupported.into())
        };
        match record {
            Ok(record) => Some((ClientId(name.client), file, Self { name, memfd, record })),
            Err(e) => {
                warn!("cannot take over the swap file of client {}: {e}", name.client);
                systemd::forget(&name.to_string());
                None
            }
        }
    }

    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Records a change of the reserved space.
    pub fn reserve(&mut self, bytes: u64) {
        self.record.reserved = bytes;
        if let Err(e) = systemd::record::write(&self.memfd, 0, &self.record) {
            warn!("cannot record the size of a swap file: {e}");
        }
    }

    /// Removes the file from the store.
    pub fn forget(self) {
        systemd::forget(&self.name.to_string());
    }
}

/// A job for the file thread.
#[derive(Debug)]
pub enum Job {
    /// Raises the client's reserved space to `to` bytes. If the client has no file, creates one.
    Grow { client: ClientId, directory: PathBuf, file: Option<Arc<File>>, reserved: u64, to: u64 },
    /// Checks whether a client has written beyond its reserved space.
    Check { client: ClientId, file: Arc<File>, reserved: u64 },
    /// Checks whether processes still have the file of a disconnected client open, and whether they have
    /// written beyond the reserved space.
    CheckLeft { client: ClientId, file: Arc<File>, reserved: u64 },
}

/// A report of the file thread.
#[derive(Debug)]
pub enum Report {
    /// `reserved` bytes are now reserved for the client. If the client has less space than requested,
    /// `error` is the reason. `theirs`: the client's description of a new file.
    Grown {
        client: ClientId,
        file: Option<Arc<File>>,
        theirs: Option<OwnedFd>,
        reserved: u64,
        error: Option<io::Error>,
    },
    /// The client has written beyond its reserved space. The contents of its file were discarded.
    Overrun { client: ClientId },
    /// No process has the file of the disconnected client open any more.
    Freed { client: ClientId },
}

/// Sends jobs to the file thread.
#[derive(Debug)]
pub struct Keeper(Sender<Job>);

impl Keeper {
    /// Starts the thread.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(reports: UnboundedSender<Report>) -> io::Result<Self> {
        let (jobs, asked) = mpsc::channel();
        thread::Builder::new().name("swap-files".into()).spawn(move || {
            for job in asked {
                if let Some(report) = does(job)
                    && reports.send(report).is_err()
                {
                    return;
                }
            }
        })?;
        Ok(Self(jobs))
    }

    pub fn ask(&self, job: Job) {
        let _ = self.0.send(job);
    }
}

fn does(job: Job) -> Option<Report> {
    match job {
        Job::Grow { client, directory, mut file, mut reserved, to } => {
            let mut theirs = None;
            let error = grow(&directory, (&mut file, &mut theirs), &mut reserved, to).err();
            Some(Report::Grown { client, file, theirs, reserved, error })
        }
        Job::Check { client, file, reserved } => is_overrun(&file, reserved).then_some(Report::Overrun { client }),
        Job::CheckLeft { client, file, reserved } => {
            if !lease::is_open_elsewhere(&file) {
                return Some(Report::Freed { client });
            }
            // The client is gone and cannot be disconnected.
            let _ = is_overrun(&file, reserved);
            None
        }
    }
}

/// Returns true if more than the reserved space was written to a file. The file's contents are then
/// discarded.
fn is_overrun(file: &File, reserved: u64) -> bool {
    let used = file.metadata().map_or(0, |metadata| metadata.blocks().saturating_mul(512));
    let is_overrun = used > reserved.saturating_add(SLACK);
    if is_overrun {
        let _ = ftruncate(file, 0);
    }
    is_overrun
}

fn grow(
    directory: &Path,
    (file, theirs): (&mut Option<Arc<File>>, &mut Option<OwnedFd>),
    reserved: &mut u64,
    to: u64,
) -> io::Result<()> {
    let file = match file {
        Some(file) => file,
        None => {
            let created = create(directory)?;
            *theirs = Some(reopen(&created)?);
            file.insert(Arc::new(created))
        }
    };
    while *reserved < to {
        let len = STEP.min(to - *reserved);
        fallocate(&**file, FallocateFlags::empty(), *reserved, len)?;
        *reserved += len;
    }
    Ok(())
}

/// Creates an unnamed file that only the daemon's user can open.
fn create(directory: &Path) -> io::Result<File> {
    if !directory.exists() {
        DirBuilder::new().mode(0o700).create(directory)?;
    }
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::EXCL;
    let mode = Mode::RUSR | Mode::WUSR;
    // `O_DIRECT` avoids the page cache, which would use the memory that the file is meant to save. Some
    // file systems do not support it.
    let file = match open(directory, flags | OFlags::DIRECT, mode) {
        Err(Errno::INVAL) => open(directory, flags, mode)?,
        opened => opened?,
    };
    // A file in RAM would save no memory. The file would also be charged to the scheduler's own control
    // group, which has a low limit.
    if descriptors::is_in_memory(&file) {
        return Err(io::Error::other("it is in RAM. Use a directory on a disk"));
    }
    Ok(file.into())
}

/// Opens a file again, with the same flags.
fn reopen(file: &File) -> io::Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(file)? & (OFlags::RDWR | OFlags::DIRECT);
    Ok(open(format!("/proc/self/fd/{}", file.as_raw_fd()), flags | OFlags::CLOEXEC, Mode::empty())?)
}

/// The size in bytes of the file system that contains this directory. The directory need not exist yet.
fn size_of(directory: &Path) -> Option<u64> {
    let there = directory.ancestors().find(|directory| directory.exists())?;
    let system = statvfs(there).ok()?;
    system.f_frsize.checked_mul(system.f_blocks)
}

/// Maximum space for all files together, in bytes.
pub fn most(directory: &Path, max: SwapMax) -> u64 {
    match max {
        SwapMax::Percent(_) => size_of(directory).map_or(0, |total| max.bytes(total)),
        max => max.bytes(0),
    }
}

/// Rounds up to the granularity of the library's buffers.
pub fn rounded(bytes: u64) -> u64 {
    bytes.checked_next_multiple_of(GRANULE).unwrap_or(bytes)
}

/// Rounds down to the granularity of the library's buffers.
pub fn usable(bytes: u64) -> u64 {
    bytes - bytes % GRANULE
}

/// Describes an error for users.
pub fn in_words(error: &io::Error) -> String {
    match Errno::from_io_error(error) {
        Some(Errno::NOSPC | Errno::DQUOT) => "the disk is full".into(),
        Some(Errno::OPNOTSUPP) => "its file system cannot reserve space (ext4, XFS and Btrfs can)".into(),
        Some(Errno::ACCESS | Errno::PERM) => "the scheduler's user may not write there".into(),
        Some(Errno::ROFS) => "it is read-only for the scheduler. Add it to ReadWritePaths= of nvshare.service".into(),
        Some(Errno::NOENT) => "there is no such directory".into(),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::atomic::{AtomicU32, Ordering};

    use test_support::Directory;

    use super::*;

    const CLIENT: ClientId = ClientId(1);

    /// A directory on a disk: the directory for temporary files may be in RAM.
    fn there() -> Directory {
        let tests = std::env::current_exe().expect("this test").with_file_name("swap-files");
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let directory = Directory(tests.with_extension(format!("{}-{number}", std::process::id())));
        fs::create_dir_all(&directory.0).expect("a directory");
        directory
    }

    fn grown(
        directory: &Path,
        file: Option<Arc<File>>,
        reserved: u64,
        to: u64,
    ) -> (Option<Arc<File>>, u64, Option<io::Error>) {
        match does(Job::Grow { client: CLIENT, directory: directory.into(), file, reserved, to }) {
            Some(Report::Grown { file, reserved, error, .. }) => (file, reserved, error),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_swap_file_is_unlinked_and_preallocated() {
        let there = there();
        let directory = there.0.join("swap");
        let (file, reserved, error) = grown(&directory, None, 0, 4 << 20);
        assert!(error.is_none() && reserved == 4 << 20, "{error:?}");
        let file = file.expect("a file");
        assert_eq!(fs::read_dir(&directory).expect("a directory").count(), 0);
        let metadata = file.metadata().expect("its figures");
        assert_eq!((metadata.mode() & 0o777, metadata.nlink()), (0o600, 0));
        assert!(metadata.blocks() * 512 >= 4 << 20, "{}", metadata.blocks());
        let (file, reserved, error) = grown(&directory, Some(file), reserved, 6 << 20);
        assert!(error.is_none() && reserved == 6 << 20, "{error:?}");
        assert!(file.expect("a file").metadata().expect("its figures").len() == 6 << 20);
    }

    #[test]
    fn a_failed_reservation_is_reported() {
        let there = there();
        let (file, reserved, error) = grown(&there.0.join("no/such"), None, 0, 4 << 20);
        assert!(file.is_none() && reserved == 0);
        assert_eq!(in_words(&error.expect("an error")), "there is no such directory");
        assert_eq!(in_words(&Errno::NOSPC.into()), "the disk is full");
    }

    #[test]
    fn a_client_that_exceeds_its_reservation_is_detected() {
        let there = there();
        let file = grown(&there.0, None, 0, 4 << 20).0.expect("a file");
        let check = || does(Job::Check { client: CLIENT, file: file.clone(), reserved: 4 << 20 });
        assert!(check().is_none());
        fallocate(&*file, FallocateFlags::empty(), 4 << 20, SLACK + GRANULE).expect("space");
        assert!(matches!(check(), Some(Report::Overrun { client: CLIENT })));
        assert_eq!(file.metadata().expect("its figures").blocks(), 0);
        assert!(check().is_none());
    }

    #[test]
    fn file_of_a_disconnected_client_is_free_when_no_process_has_it_open() {
        let there = there();
        let grow = Job::Grow { client: CLIENT, directory: there.0.clone(), file: None, reserved: 0, to: 4 << 20 };
        let Some(Report::Grown { file: Some(file), theirs: Some(theirs), .. }) = does(grow) else {
            panic!("no file");
        };
        let is_free = || {
            let check = Job::CheckLeft { client: CLIENT, file: file.clone(), reserved: 4 << 20 };
            matches!(does(check), Some(Report::Freed { client: CLIENT }))
        };
        assert!(!is_free());
        let mut heir = std::process::Command::new("sleep").arg("60").stdin(theirs).spawn().expect("a process");
        assert!(!is_free(), "a child has it open");
        heir.kill().expect("it runs");
        heir.wait().expect("its end");
        assert!(is_free());
    }

    #[test]
    fn swap_max_is_a_percentage_of_the_file_system_or_a_size() {
        let there = there();
        let all = size_of(&there.0.join("not/yet/there")).expect("a size");
        assert_eq!(most(&there.0, SwapMax::Percent(50)), all / 2);
        assert_eq!(most(&there.0, SwapMax::Bytes(7)), 7);
        assert_eq!(most(&there.0, SwapMax::None), u64::MAX);
        assert_eq!((rounded(1), rounded(2 << 20)), (2 << 20, 2 << 20));
        assert_eq!((usable((2 << 20) - 1), usable(5 << 20)), (0, 4 << 20));
    }
}
