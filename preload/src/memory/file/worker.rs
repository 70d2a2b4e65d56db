//! The threads of a swap file.

use super::{Done, Extent, FileCopy, HostCopy, Job, Outcome, Status, SwapFile, WORKERS, What, checksum};
use crate::{
    connection::{self, wakeup},
    memory::staging::Buffer,
    submit::threads,
    sys::{file::Identity, futex},
};
use alloc::vec::Vec;
use core::{
    ops::Range,
    sync::atomic::{AtomicU8, Ordering},
    time::Duration,
};
use rustix::{
    fd::{BorrowedFd, RawFd},
    io::{Errno, pread, pwrite},
};

/// The most bytes per call: enough for the full speed of a disk, and few enough that a shared disk also
/// serves other requests.
const PIECE: usize = 8 << 20;

/// The longest sleep of a thread that has no job.
const SLEEP: Duration = Duration::from_secs(3600);

/// The kernel's `CLOSE_RANGE_UNSHARE`.
const UNSHARE: libc::c_uint = 1 << 1;

/// Closes the descriptors from `first` to `last` in the calling thread's table.
fn close_range(first: u32, last: u32, flags: libc::c_uint) -> Result<(), Errno> {
    // SAFETY: the call takes only integers. The caller decides which descriptors may be closed.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, flags) };
    // SAFETY: `errno` is the calling thread's own.
    if result == 0 { Ok(()) } else { Err(Errno::from_raw_os_error(unsafe { *libc::__errno_location() })) }
}

/// Whether a thread of this process can have its own descriptor table. Requires Linux 5.9, and no
/// seccomp filter that forbids the call.
pub fn is_supported() -> bool {
    const UNKNOWN: u8 = 2;
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    if ANSWER.load(Ordering::Relaxed) == UNKNOWN {
        // A kernel that supports the call rejects this range as invalid and closes no descriptor.
        let answer = crate::sys::errno::preserve(|| close_range(1, 0, UNSHARE)) == Err(Errno::INVAL);
        ANSWER.store(u8::from(answer), Ordering::Relaxed);
    }
    ANSWER.load(Ordering::Relaxed) == 1
}

/// Gives the calling thread its own descriptor table, in which only `descriptors` are open.
fn keep_only(mut descriptors: Vec<RawFd>) -> Result<(), Errno> {
    descriptors.sort_unstable();
    let mut end = u32::MAX;
    let mut flags = UNSHARE; // only in the first call, which copies no entry above the last kept descriptor
    for descriptor in descriptors.into_iter().rev().filter_map(|descriptor| u32::try_from(descriptor).ok()) {
        if descriptor < end {
            close_range(descriptor + 1, end, flags)?;
            flags = 0;
        }
        match descriptor.checked_sub(1) {
            Some(before) => end = before,
            None => return Ok(()),
        }
    }
    close_range(0, end, flags)
}

/// Runs the first thread of a file. In the program's table, the file is open as `number`.
pub(super) fn begin(file: SwapFile, number: RawFd, identity: Identity) {
    let sender = wakeup::sender();
    let kept = [number].into_iter().chain(sender).collect();
    // The program may have closed a descriptor and opened another file under the same number. That file
    // must not stay open here.
    let is_open = keep_only(kept).is_ok() && identity.is(number) && wakeup::sender() == sender;
    {
        let mut state = file.0.state.lock();
        if state.status == Status::Opening {
            state.status = if is_open { Status::Usable } else { Status::ReadOnly };
        }
    }
    // Wake the client's thread, so that it closes the program's copy, and writes to the file.
    connection::wake();
    if !is_open {
        return;
    }
    // Threads that this thread starts share its table.
    for _ in 1..WORKERS {
        let its_own = file.clone();
        threads::spawn(c"nvshare-file", move || work(&its_own, number));
    }
    work(&file, number);
}

/// Carries out jobs. Ends when the file is read-only and empty.
fn work(file: &SwapFile, number: RawFd) {
    // SAFETY: no code closes `number` in the table of these threads.
    let descriptor = unsafe { BorrowedFd::borrow_raw(number) };
    loop {
        let news = file.0.news.load(Ordering::SeqCst);
        let job = {
            let mut state = file.0.state.lock();
            if state.is_over() {
                drop(state);
                file.tell(); // wakes the other threads, which end too
                return;
            }
            let job = state.jobs.pop_front();
            state.in_progress += usize::from(job.is_some());
            job
        };
        let Some(Job { chunk, what }) = job else {
            futex::wait(&file.0.news, news, SLEEP);
            continue;
        };
        let outcome = match what {
            What::Write { copy, to } => write(descriptor, copy, to),
            What::Read { copy, into } => read(descriptor, chunk.len, copy, into),
        };
        {
            let mut state = file.0.state.lock();
            state.in_progress -= 1;
            match outcome {
                Outcome::Written(..) => state.written += chunk.len,
                Outcome::NotWritten(_) => state.status = Status::ReadOnly,
                _ => {}
            }
            state.done.push(Done { chunk, outcome });
        }
        connection::wake();
    }
}

fn write(file: BorrowedFd<'_>, copy: HostCopy, mut to: FileCopy) -> Outcome {
    to.checksum = checksum(&copy.buffer);
    let bytes = copy.buffer.bytes();
    let written = each_piece(&to.extents, |piece, offset| pwrite(file, bytes.get(piece).ok_or(Errno::IO)?, offset));
    if written.is_ok() { Outcome::Written(to, copy.buffer) } else { Outcome::NotWritten(copy) }
}

fn read(file: BorrowedFd<'_>, len: u64, copy: FileCopy, into: Option<Buffer>) -> Outcome {
    let Some(mut buffer) = into.or_else(|| Buffer::new(len)) else { return Outcome::NoBuffer(copy) };
    let bytes = buffer.bytes_mut();
    let read = each_piece(&copy.extents, |piece, offset| pread(file, bytes.get_mut(piece).ok_or(Errno::IO)?, offset));
    if read.is_err() || checksum(&buffer) != copy.checksum {
        return Outcome::Lost(buffer);
    }
    Outcome::Read(HostCopy { buffer, fingerprint: copy.fingerprint, file: Some(copy) })
}

/// Calls `transfer` for the pieces of a chunk, with the place of each piece in the chunk's buffer and in the file.
/// `transfer` returns the number of bytes that it has transferred; 0 at the end of a file that was truncated.
fn each_piece(
    extents: &[Extent],
    mut transfer: impl FnMut(Range<usize>, u64) -> Result<usize, Errno>,
) -> Result<(), Errno> {
    let mut at = 0;
    for Extent { mut offset, len } in extents.iter().copied() {
        let end = at + len as usize;
        while at < end {
            match transfer(at..end.min(at + PIECE), offset) {
                Ok(0) => return Err(Errno::IO),
                Ok(n) => (at, offset) = (at + n, offset + n as u64),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(())
}
