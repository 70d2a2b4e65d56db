//! Swap files: copies of chunks that do not fit in host memory.
//!
//! The scheduler creates the file, reserves its space and passes its descriptor to this process
//! ([`SwapFile::open`]). No other process has the file open. The file's threads ([`worker`]) write
//! chunks from host buffers and read them into host buffers in the background. The client's thread
//! queues jobs and applies the results.
//!
//! The program can neither close the file nor pass it on. The file is open only in a separate
//! descriptor table (`close_range` with `CLOSE_RANGE_UNSHARE`), which the file's threads share. A fork
//! does not copy this table, and `exec` does not keep it. The file has no name, so its space is freed
//! when the process ends.
//!
//! Chunks are written from their buffers and read into new ones, several at a time, by direct I/O if
//! the file system supports it. Unlike copies to the GPU, this I/O makes no driver calls. Reading
//! overlaps with copying to the GPU. Rejected: io_uring. Four threads reach nine tenths of the disk's
//! rate or more (`bench/RESULTS.md`), containers do not allow io_uring, and it would need the threads
//! too.
//!
//! A chunk that is read from a file keeps its place there, so it is written again only after it has
//! changed ([`super::fingerprint`]). A chunk's checksum stays in memory and is compared when the chunk
//! is read. A mismatch or a failure of the disk means that the contents are lost. The gate then stays
//! closed, and every call that could have used the contents fails with `CUDA_ERROR_ECC_UNCORRECTABLE`.
//! An error of the GPU's own memory has the same effect, and no process recovers from that error
//! either.

mod extents;
mod worker;

use super::{fingerprint::Fingerprint, staging::Buffer};
use crate::{
    submit::threads,
    sys::{
        file::Descriptor,
        futex,
        sync::{Mutex, Rank},
    },
};
use alloc::{collections::VecDeque, sync::Arc, vec::Vec};
use core::{
    mem,
    sync::atomic::{AtomicU32, Ordering},
};
use extents::{Extent, Extents};
use rustix::fd::OwnedFd;

pub use worker::is_supported;

/// The number of threads that read and write, and therefore of concurrent disk requests. With fewer
/// than four, a fast NVMe disk is idle at times.
const WORKERS: usize = 4;

/// Identifies a chunk by its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkName {
    pub gpu: u32,
    pub base: u64,
    pub offset: u64,
    pub len: u64,
}

/// A swap file. Clones refer to the same file.
#[derive(Debug, Clone)]
pub struct SwapFile(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    state: Mutex<FileState>,
    /// A futex word that changes when the threads have a new job or status.
    news: AtomicU32,
}

#[derive(Debug)]
struct FileState {
    /// The size in bytes. The whole size is reserved on disk.
    size: u64,
    free: Extents,
    jobs: VecDeque<Job>,
    /// The number of jobs that threads have taken from `jobs` and not finished.
    in_progress: usize,
    done: Vec<Done>,
    status: Status,
    /// Bytes that are being written or whose writing is in `done`, and bytes written so far.
    writing: u64,
    written: u64,
    /// The descriptor in the program's table, which is closed after the threads have got their own
    /// table.
    handed_over: Option<Descriptor>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    /// The threads have not started.
    Opening,
    Usable,
    /// No more chunks are written, because a newer file exists, a write has failed, or the file could not
    /// be opened.
    ReadOnly,
}

#[derive(Debug)]
struct Job {
    chunk: ChunkName,
    what: What,
}

#[derive(Debug)]
enum What {
    Write {
        copy: HostCopy,
        to: FileCopy,
    },
    /// Reads into `into` if that buffer has the chunk's size, otherwise into a new buffer.
    Read {
        copy: FileCopy,
        into: Option<Buffer>,
    },
}

/// A finished job.
#[derive(Debug)]
pub(in crate::memory) struct Done {
    pub chunk: ChunkName,
    pub outcome: Outcome,
}

#[derive(Debug)]
pub(in crate::memory) enum Outcome {
    Written(FileCopy, Buffer),
    /// The write failed, so the copy stays in host memory.
    NotWritten(HostCopy),
    /// The chunk was read. The file still has the contents too.
    Read(HostCopy),
    /// The host has no memory for a buffer at the moment.
    NoBuffer(FileCopy),
    /// The read failed, or returned data other than the written contents. The buffer is returned,
    /// because it may be registered with the driver, which these threads never call.
    Lost(Buffer),
}

/// A chunk's contents in host memory.
#[derive(Debug)]
pub(in crate::memory) struct HostCopy {
    pub buffer: Buffer,
    /// The fingerprint of the contents, if known.
    pub fingerprint: Option<Fingerprint>,
    /// A copy of the same contents in a swap file. With such a copy, the contents need not be
    /// written again.
    pub file: Option<FileCopy>,
}

/// A chunk's contents in a file. Dropping the `FileCopy` frees the space.
#[derive(Debug)]
pub(in crate::memory) struct FileCopy {
    file: SwapFile,
    extents: Vec<Extent>,
    checksum: u64,
    fingerprint: Option<Fingerprint>,
}

impl Drop for FileCopy {
    fn drop(&mut self) {
        let mut state = self.file.0.state.lock();
        mem::take(&mut self.extents).into_iter().for_each(|extent| state.free.give(extent));
        let is_over = state.is_over();
        drop(state);
        if is_over {
            self.file.tell();
        }
    }
}

impl FileState {
    /// Whether the file is read-only and empty, and has no jobs.
    fn is_over(&self) -> bool {
        self.status == Status::ReadOnly
            && self.jobs.is_empty()
            && self.in_progress == 0
            && self.free.bytes() == self.size
    }
}

impl SwapFile {
    /// Takes over a file that the scheduler has created; nothing is reserved in it yet. Returns `None` if
    /// no thread can be started.
    pub fn open(descriptor: OwnedFd) -> Option<Self> {
        let descriptor = Descriptor::new(descriptor)?;
        let (number, identity) = descriptor.name()?;
        let state = FileState {
            size: 0,
            free: Extents::default(),
            jobs: VecDeque::new(),
            in_progress: 0,
            done: Vec::new(),
            status: Status::Opening,
            writing: 0,
            written: 0,
            handed_over: Some(descriptor),
        };
        let file = Self(Arc::new(Shared { state: Mutex::new(Rank::SwapFile, state), news: AtomicU32::new(0) }));
        let its_own = file.clone();
        threads::spawn(c"nvshare-file", move || worker::begin(its_own, number, identity)).then_some(file)
    }

    /// Closes the descriptor in the program's table, if the threads have their own table. Called by
    /// the thread that received the descriptor.
    pub fn close_in_program(&self) {
        let mut state = self.0.state.lock();
        if state.status != Status::Opening {
            state.handed_over = None;
        }
    }

    /// Sets the reserved size, in bytes. The size never decreases.
    pub fn grow(&self, size: u64) {
        let mut state = self.0.state.lock();
        if let Some(len) = size.checked_sub(state.size) {
            let offset = mem::replace(&mut state.size, size);
            state.free.give(Extent { offset, len });
        }
    }

    /// Stops writing to this file. Chunks in the file can still be read.
    pub fn retire(&self) {
        self.0.state.lock().status = Status::ReadOnly;
        self.tell();
    }

    /// Whether the file is empty and will stay empty.
    pub fn is_over(&self) -> bool {
        let state = self.0.state.lock();
        state.is_over() && state.done.is_empty() && state.handed_over.is_none()
    }

    /// Whether a chunk that has been read should keep its place in the file, so that it need not be written
    /// again.
    pub(in crate::memory) fn is_kept(&self) -> bool {
        self.0.state.lock().status == Status::Usable
    }

    /// Bytes that can be written now.
    pub fn room(&self) -> u64 {
        let state = self.0.state.lock();
        if state.status == Status::Usable { state.free.bytes() } else { 0 }
    }

    /// Bytes that are being written, or whose result was not taken yet.
    pub fn bytes_in_queue(&self) -> u64 {
        self.0.state.lock().writing
    }

    /// Bytes that have been written so far.
    pub fn bytes_on_disk(&self) -> u64 {
        self.0.state.lock().written
    }

    /// The number of jobs whose result was not taken yet.
    pub fn jobs(&self) -> usize {
        let state = self.0.state.lock();
        state.jobs.len() + state.in_progress + state.done.len()
    }

    /// Whether the threads of the file have not started yet. Nothing is written until then. The first thread
    /// then wakes the client's thread.
    pub fn is_opening(&self) -> bool {
        self.0.state.lock().status == Status::Opening
    }

    /// Queues the writing of a chunk's copy. Returns the copy if the file has no room.
    pub(in crate::memory) fn write(&self, chunk: ChunkName, copy: HostCopy) -> Result<(), HostCopy> {
        let mut state = self.0.state.lock();
        let Some(extents) = (state.status == Status::Usable).then(|| state.free.take(chunk.len)).flatten() else {
            return Err(copy);
        };
        let to = FileCopy { file: self.clone(), extents, checksum: 0, fingerprint: copy.fingerprint };
        state.writing += chunk.len;
        state.jobs.push_back(Job { chunk, what: What::Write { copy, to } });
        drop(state);
        self.tell();
        Ok(())
    }

    /// Takes the finished jobs for this GPU.
    pub(in crate::memory) fn take_done(&self, gpu: u32) -> Vec<Done> {
        let mut state = self.0.state.lock();
        let taken: Vec<_> = state.done.extract_if(.., |done| done.chunk.gpu == gpu).collect();
        let writes = taken.iter().filter(|done| matches!(done.outcome, Outcome::Written(..) | Outcome::NotWritten(_)));
        state.writing -= writes.map(|done| done.chunk.len).sum::<u64>();
        taken
    }

    /// Wakes the threads for a new job or status.
    fn tell(&self) {
        self.0.news.fetch_add(1, Ordering::SeqCst);
        futex::wake_all(&self.0.news);
    }
}

impl FileCopy {
    /// Queues the reading of the chunk, into the given buffer if that buffer has the chunk's size.
    pub fn read(self, chunk: ChunkName, into: Option<Buffer>) {
        let file = self.file.clone();
        let into = into.filter(|buffer| buffer.len() == chunk.len);
        file.0.state.lock().jobs.push_back(Job { chunk, what: What::Read { copy: self, into } });
        file.tell();
    }

    pub fn fingerprint(&self) -> Option<Fingerprint> {
        self.fingerprint
    }
}

/// The checksum of a chunk's contents. Only detects errors of the disk: with 64 bits, the checksum is too
/// weak a reason to skip a write.
fn checksum(buffer: &Buffer) -> u64 {
    xxhash_rust::xxh3::xxh3_64(buffer.bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::file::Identity;
    use rustix::fd::{AsRawFd, FromRawFd};
    use std::{
        fs::{self, File},
        os::{fd::IntoRawFd, unix::fs::FileExt},
        thread, time,
    };

    const LEN: u64 = 4 << 20;
    const CHUNK: ChunkName = ChunkName { gpu: 3, base: 0, offset: 0, len: LEN };

    /// Creates an unlinked file like the scheduler's. Returns two descriptors of it.
    fn file(name: &str) -> (OwnedFd, File) {
        let path = std::env::temp_dir().join(std::format!("nvshare-file-{}-{name}", std::process::id()));
        let file = File::options().create_new(true).read(true).write(true).open(&path).unwrap();
        fs::remove_file(path).unwrap();
        // SAFETY: the descriptor was just created, and no other object owns it.
        (unsafe { OwnedFd::from_raw_fd(file.try_clone().unwrap().into_raw_fd()) }, file)
    }

    fn copy(seed: u8) -> HostCopy {
        let mut buffer = Buffer::new(LEN).unwrap();
        let bytes = buffer.bytes_mut().iter_mut().enumerate();
        bytes.for_each(|(at, byte)| *byte = (at / 4096) as u8 ^ at as u8 ^ seed);
        HostCopy { buffer, fingerprint: None, file: None }
    }

    fn next(file: &SwapFile) -> Outcome {
        for _ in 0..6000 {
            if let Some(done) = file.take_done(CHUNK.gpu).pop() {
                assert_eq!(done.chunk, CHUNK);
                return done.outcome;
            }
            thread::sleep(time::Duration::from_millis(10));
        }
        panic!("nothing was done");
    }

    fn until(what: impl Fn() -> bool) {
        for _ in 0..6000 {
            if what() {
                return;
            }
            thread::sleep(time::Duration::from_millis(10));
        }
        panic!("it did not happen");
    }

    fn opened(name: &str) -> (SwapFile, File) {
        let (descriptor, other) = file(name);
        let file = SwapFile::open(descriptor).unwrap();
        file.grow(3 * LEN);
        until(|| file.room() > 0);
        (file, other)
    }

    fn write_copy(file: &SwapFile, seed: u8) -> FileCopy {
        assert!(file.write(CHUNK, copy(seed)).is_ok());
        match next(file) {
            Outcome::Written(copy, _) => copy,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn chunks_are_readable_after_the_program_closes_all_descriptors() {
        if !is_supported() {
            return;
        }
        let (descriptor, _other) = file("closed");
        let (number, identity) = (descriptor.as_raw_fd(), Identity::of(&descriptor).unwrap());
        let file = SwapFile::open(descriptor).unwrap();
        file.grow(3 * LEN);
        until(|| file.room() > 0);
        file.close_in_program();
        assert!(!identity.is(number), "it is not the program's");
        let copies = [5, 6, 7].map(|seed| (seed, write_copy(&file, seed)));
        assert_eq!(file.room(), 0);
        assert!(file.write(CHUNK, copy(8)).is_err(), "there is no room");
        for (seed, there) in copies {
            there.read(CHUNK, None);
            match next(&file) {
                Outcome::Read(back) => assert!(back.buffer.bytes() == copy(seed).buffer.bytes()),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!((file.room(), file.bytes_in_queue(), file.jobs()), (3 * LEN, 0, 0));
    }

    #[test]
    fn a_chunk_changed_on_disk_is_reported_lost() {
        if !is_supported() {
            return;
        }
        let (file, other) = opened("changed");
        let there = write_copy(&file, 1);
        other.write_all_at(&[0xee], 12345).unwrap();
        there.read(CHUNK, None);
        assert!(matches!(next(&file), Outcome::Lost(_)));
        let there = write_copy(&file, 2);
        other.set_len(LEN / 2).unwrap();
        there.read(CHUNK, None);
        assert!(matches!(next(&file), Outcome::Lost(_)));
        assert_eq!(file.room(), 3 * LEN, "its space is free again");
    }

    #[test]
    fn a_retired_file_keeps_its_chunks_until_they_are_read() {
        if !is_supported() {
            return;
        }
        let (file, _other) = opened("retired");
        let there = write_copy(&file, 9);
        file.close_in_program();
        file.retire();
        assert!(!file.is_over() && file.room() == 0 && file.write(CHUNK, copy(1)).is_err());
        there.read(CHUNK, None);
        assert!(matches!(next(&file), Outcome::Read(_)));
        assert!(file.is_over());
        until(|| Arc::strong_count(&file.0) == 1); // the file's threads have ended
    }
}
