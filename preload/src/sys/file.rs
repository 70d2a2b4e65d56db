//! Reading small files of `/proc`, and the descriptors of this library.

use alloc::{ffi::CString, vec::Vec};
use core::{
    ffi::CStr,
    mem::MaybeUninit,
    str,
    sync::atomic::{AtomicI32, AtomicU64, Ordering},
};
use rustix::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use rustix::fs::{Mode, OFlags, RawDir, Stat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

/// The lowest number of this library's descriptors. Some programs rely on getting the lowest numbers
/// themselves.
pub const LOWEST_DESCRIPTOR: RawFd = 400;

/// Returns the contents of a file, or nothing if it cannot be read.
pub fn read(path: &CStr) -> Vec<u8> {
    let mut contents = Vec::new();
    let Ok(file) = rustix::fs::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()) else { return contents };
    let mut part = [0u8; 1024];
    while let Ok(n @ 1..) = rustix::io::read(&file, &mut part) {
        contents.extend_from_slice(part.get(..n).unwrap_or(&[]));
    }
    contents
}

/// Calls `visit` with each descriptor of this process and the path of its file, until `visit` returns
/// `false`. Returns whether `/proc` shows the descriptors and their paths.
pub fn each_open(mut visit: impl FnMut(RawFd, CString) -> bool) -> bool {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(folder) = rustix::fs::open(c"/proc/self/fd", flags, Mode::empty()) else { return false };
    let mut is_shown = true;
    let is_read = each_number(&folder, |number, name| match rustix::fs::readlinkat(&folder, name, Vec::new()) {
        Ok(path) => visit(number, path),
        Err(Errno::NOENT) => true, // the program has closed it since
        Err(_) => {
            is_shown = false;
            false
        }
    });
    is_read && is_shown
}

/// Calls `visit` with each entry of a directory whose name is a number, until `visit` returns `false`.
/// Returns `false` if the directory cannot be read.
pub fn each_number(folder: impl AsFd, mut visit: impl FnMut(i32, &CStr) -> bool) -> bool {
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = RawDir::new(folder, &mut buffer);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return false };
        let number = str::from_utf8(entry.file_name().to_bytes()).ok().and_then(|name| name.parse().ok());
        if number.is_some_and(|number| !visit(number, entry.file_name())) {
            break;
        }
    }
    true
}

/// A descriptor of this library. The program may close any descriptor, and then open another file under
/// the same number. So a `Descriptor` records the identity of its file, and never uses or closes another
/// file. The child of a fork closes its copies of all descriptors ([`close_in_child`]).
#[derive(Debug)]
pub struct Descriptor(&'static DescriptorRecord);

/// The most descriptors: two lock files for each GPU, and sockets and swap files.
const MOST_DESCRIPTORS: usize = 2 * nvshare_wire::MAX_SLOTS as usize + 16;

static DESCRIPTORS: [DescriptorRecord; MOST_DESCRIPTORS] = [const { DescriptorRecord::none() }; MOST_DESCRIPTORS];

impl Descriptor {
    /// Takes over a file, under a number from [`LOWEST_DESCRIPTOR`] on.
    pub fn new(file: OwnedFd) -> Option<Self> {
        let file = fcntl_dupfd_cloexec(&file, LOWEST_DESCRIPTOR).unwrap_or(file);
        let identity = Identity::of(&file)?;
        let record = DESCRIPTORS.iter().find(|record| record.claim())?;
        record.set(file.into_raw_fd(), identity);
        Some(Self(record))
    }

    /// Returns the descriptor, unless the program has closed it.
    pub fn get(&self) -> Option<BorrowedFd<'_>> {
        let (number, identity) = self.0.get()?;
        // SAFETY: the descriptor is open, and borrowed only for one call.
        identity.is(number).then(|| unsafe { BorrowedFd::borrow_raw(number) })
    }

    /// Whether the descriptor still refers to the file. The program may have closed it.
    pub fn is_open(&self) -> bool {
        self.get().is_some()
    }

    /// Returns the number and the identity.
    pub fn name(&self) -> Option<(RawFd, Identity)> {
        self.0.get()
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        self.0.close();
        self.0.descriptor.store(FREE, Ordering::SeqCst);
    }
}

/// Closes all descriptors of this library in the child of a fork, which uses none of them.
pub fn close_in_child() {
    DESCRIPTORS.iter().for_each(DescriptorRecord::close);
}

/// A descriptor number and the identity of its file, which any thread and the child of a fork can read
/// without a lock. Only one thread writes these fields. A child forked in the middle of a write reads no
/// descriptor, or one that fails the check against `device` and `inode`.
#[derive(Debug)]
pub struct DescriptorRecord {
    /// [`FREE`] or [`CLAIMED`] if there is none.
    descriptor: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

const FREE: RawFd = -1;
const CLAIMED: RawFd = -2;

impl DescriptorRecord {
    pub const fn none() -> Self {
        Self { descriptor: AtomicI32::new(FREE), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }

    fn claim(&self) -> bool {
        self.descriptor.compare_exchange(FREE, CLAIMED, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    /// Sets the descriptor of a record that has none.
    pub fn set(&self, descriptor: RawFd, Identity { device, inode }: Identity) {
        self.device.store(device, Ordering::SeqCst);
        self.inode.store(inode, Ordering::SeqCst);
        self.descriptor.store(descriptor, Ordering::SeqCst);
    }

    pub fn get(&self) -> Option<(RawFd, Identity)> {
        let descriptor = self.descriptor.load(Ordering::SeqCst);
        let identity =
            Identity { device: self.device.load(Ordering::SeqCst), inode: self.inode.load(Ordering::SeqCst) };
        (descriptor >= 0).then_some((descriptor, identity))
    }

    /// Closes the descriptor, unless it refers to another file.
    fn close(&self) {
        if let Some((number, _)) = self.get().filter(|(number, identity)| identity.is(*number)) {
            // SAFETY: the descriptor is open, and belongs to this library, which does not use it any more.
            drop(unsafe { OwnedFd::from_raw_fd(number) });
        }
    }
}

/// The identity of an open file. Once the program has closed the file, its descriptor number may belong
/// to another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Identity {
    device: u64,
    inode: u64,
}

impl From<&Stat> for Identity {
    fn from(stat: &Stat) -> Self {
        Self { device: stat.st_dev, inode: stat.st_ino }
    }
}

impl Identity {
    pub fn of(descriptor: impl AsFd) -> Option<Self> {
        rustix::fs::fstat(descriptor).ok().as_ref().map(Self::from)
    }

    /// Whether this descriptor still refers to that file.
    pub fn is(self, descriptor: RawFd) -> bool {
        // SAFETY: the descriptor is only queried. A number that is not a descriptor gives an error.
        descriptor >= 0 && Self::of(unsafe { BorrowedFd::borrow_raw(descriptor) }) == Some(self)
    }
}
