//! The proof that this process may use its GPUs: open descriptors of their device files. The scheduler
//! compares the descriptors with the host's device files, and closes them.
//!
//! The library opens the files anew. A copy of the driver's descriptor would keep the memory of a killed
//! program allocated until the scheduler closes the copy. So a copy is sent only if the process cannot
//! open the file any more, for example because it has dropped its privileges.

use crate::sys::{
    file,
    sync::{Mutex, Rank},
};
use alloc::{ffi::CString, vec::Vec};
use nvshare_wire::MAX_DESCRIPTORS;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{FileType, Mode, OFlags, fcntl_getfl, fstat, major, minor, open};

/// The major number of NVIDIA's device files. Minor numbers from 254 on are `nvidia-modeset` and
/// `nvidiactl`.
const MAJOR: u32 = 195;
const CONTROL: u32 = 254;
/// The number of descriptors that are examined in a process that cannot read `/proc`.
const EXAMINED: RawFd = 65536;

/// The device files that the driver has had open. A process that cannot read `/proc` any more, for
/// example after `chroot`, recognizes its descriptors by their identities.
static KNOWN: Mutex<Vec<Identity>> = Mutex::new(Rank::DeviceFiles, Vec::new());

/// Remembers the device files that the driver has open. Called once CUDA has been initialised, because
/// the program may give up its access to files before it uses a GPU.
pub fn remember() {
    device_files();
}

/// Calls `send` with descriptors of the GPUs' device files that the driver has open in this process.
pub fn with_device_files<R>(send: impl FnOnce(&[BorrowedFd<'_>]) -> R) -> R {
    let files = device_files();
    let opened: Vec<Option<OwnedFd>> = files.iter().map(DeviceFile::open_anew).collect();
    let descriptors = files.iter().zip(&opened).map(|(file, opened)| match opened {
        Some(opened) => opened.as_fd(),
        // SAFETY: the descriptor is only sent. If the program has closed it, sending fails; if the number
        // belongs to another file by now, the scheduler refuses and closes that file.
        None => unsafe { BorrowedFd::borrow_raw(file.descriptor) },
    });
    send(&descriptors.collect::<Vec<_>>())
}

/// The identity of a device file. It includes the type and the device number, because a file system may
/// give the inode of a deleted device file to another file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Identity {
    inode: file::Identity,
    kind: FileType,
    number: u64,
}

impl Identity {
    fn of(descriptor: impl AsFd) -> Option<Self> {
        let stat = fstat(descriptor).ok()?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        Some(Self { inode: file::Identity::from(&stat), kind, number: stat.st_rdev })
    }

    fn is_of_gpu(self) -> bool {
        self.kind == FileType::CharacterDevice && major(self.number) == MAJOR && minor(self.number) < CONTROL
    }
}

/// A GPU's device file that the driver has open.
struct DeviceFile {
    descriptor: RawFd,
    identity: Identity,
    /// Empty in a process that cannot read `/proc`.
    path: CString,
}

impl DeviceFile {
    fn open_anew(&self) -> Option<OwnedFd> {
        let opened = open(&*self.path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        // Another file may have replaced the device file at this path.
        (Identity::of(&opened) == Some(self.identity)).then_some(opened)
    }
}

/// Returns each device file once.
fn device_files() -> Vec<DeviceFile> {
    let mut known = KNOWN.lock();
    let mut files = Vec::new();
    let is_shown = file::each_open(|descriptor, path| {
        add(&mut files, &mut known, descriptor, path);
        true
    });
    if !is_shown {
        (0..EXAMINED).for_each(|descriptor| add(&mut files, &mut known, descriptor, CString::default()));
    }
    files
}

/// Adds the file of a descriptor, if it is a device file that is open for reading and writing.
fn add(files: &mut Vec<DeviceFile>, known: &mut Vec<Identity>, descriptor: RawFd, path: CString) {
    // Other files are not examined: `fstat` may wait for a file server.
    if !path.is_empty() && !is_device_file(path.as_bytes()) {
        return;
    }
    // SAFETY: the descriptor is only queried. A number that is not a descriptor gives an error.
    let open = unsafe { BorrowedFd::borrow_raw(descriptor) };
    if !fcntl_getfl(open).is_ok_and(|flags| flags & OFlags::RWMODE == OFlags::RDWR) {
        return;
    }
    let Some(identity) = Identity::of(open) else { return };
    let is_known = known.contains(&identity);
    if path.is_empty() && !is_known && !identity.is_of_gpu() || files.iter().any(|file| file.identity == identity) {
        return;
    }
    if !is_known {
        if known.len() >= MAX_DESCRIPTORS {
            known.remove(0); // its GPU is no longer this process's, for example after a move
        }
        known.push(identity);
    }
    if files.len() < MAX_DESCRIPTORS {
        files.push(DeviceFile { descriptor, identity, path });
    }
}

/// Whether this is the path of a GPU's device file: `/dev/nvidia0`, or the same name elsewhere. `/proc`
/// appends a suffix to the path of a deleted file.
fn is_device_file(path: &[u8]) -> bool {
    let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
    let number = name.strip_prefix(b"nvidia").unwrap_or(b"");
    !number.is_empty() && number.iter().all(u8::is_ascii_digit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fd::AsRawFd as _;
    use std::fs;
    use std::os::fd::AsRawFd as _;

    #[test]
    fn device_files_are_recognized_by_name() {
        for path in ["/dev/nvidia0", "/run/gpu/nvidia12", "nvidia3", "/dev/nvidia0 (deleted)"] {
            assert!(is_device_file(path.as_bytes()), "{path}");
        }
        for path in ["/dev/nvidiactl", "/dev/nvidia", "/dev/nvidia-uvm", "/dev/nvidia0/x", ""] {
            assert!(!is_device_file(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn each_device_file_is_opened_anew_once() {
        let folder = std::env::temp_dir().join(std::format!("nvshare-proof-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("nvidia7");
        fs::write(&path, "").unwrap();
        let reader = fs::File::open(&path).unwrap();
        let drivers = [(); 3].map(|()| fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
        let numbers: Vec<RawFd> = drivers.iter().map(|file| file.as_raw_fd()).collect();
        // SAFETY: the file is open until the end of this test.
        let identity = Identity::of(unsafe { BorrowedFd::borrow_raw(reader.as_raw_fd()) });
        let sent = || {
            with_device_files(|sent| {
                let own = sent.iter().filter(|fd| Identity::of(fd) == identity);
                own.map(|fd| numbers.contains(&fd.as_raw_fd())).collect::<Vec<bool>>()
            })
        };
        assert_eq!(sent(), [false], "a new descriptor");
        // The path now leads to another file.
        fs::remove_file(&path).unwrap();
        fs::write(&path, "").unwrap();
        assert_eq!(sent(), [true], "a copy of the driver's descriptor");
        fs::remove_file(&path).unwrap();
        assert_eq!(sent(), [true], "a copy, although no file has the name");
        drop(drivers);
        assert_eq!(sent(), [true; 0], "a descriptor for reading proves nothing");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn known_files_are_recognized_without_a_path() {
        let path = std::env::temp_dir().join(std::format!("nvidia{}", std::process::id()));
        let driver = fs::OpenOptions::new().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
        let (mut files, mut known) = (Vec::new(), Vec::new());
        add(&mut files, &mut known, driver.as_raw_fd(), CString::default());
        assert!(files.is_empty() && known.is_empty());
        add(&mut Vec::new(), &mut known, driver.as_raw_fd(), c"/dev/nvidia1".into());
        add(&mut files, &mut known, driver.as_raw_fd(), CString::default());
        assert!(matches!(*files, [DeviceFile { descriptor, .. }] if descriptor == driver.as_raw_fd()));
        fs::remove_file(path).unwrap();
    }
}
