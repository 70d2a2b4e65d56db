//! The proof that this process may use its GPUs: open descriptors of their device files. The scheduler
//! compares the descriptors with the host's device files, and closes them.
//!
//! The library opens the files anew. A copy of the driver's descriptor would keep the memory of a killed
//! program allocated until the scheduler closes the copy. So a copy is sent only if the process cannot
//! open the file any more, for example because it has dropped its privileges.

use crate::sys::file::{self, Identity};
use alloc::{ffi::CString, vec::Vec};
use nvshare_wire::MAX_DESCRIPTORS;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};

/// The major number of NVIDIA's device files. Minor number 255 is the control device.
const MAJOR: u32 = 195;
const CONTROL: u32 = 255;
/// The number of descriptors that are examined in a process without `/proc`.
const EXAMINED: RawFd = 1024;

/// Calls `send` with descriptors of the GPUs' device files that the driver has open in this process.
pub fn with_device_files<R>(send: impl FnOnce(&[BorrowedFd<'_>]) -> R) -> R {
    let files = device_files().unwrap_or_else(unnamed_device_files);
    let opened: Vec<Option<OwnedFd>> = files.iter().map(DeviceFile::open_anew).collect();
    let descriptors = files.iter().zip(&opened).map(|(file, opened)| match opened {
        Some(opened) => opened.as_fd(),
        // SAFETY: the descriptor is only sent. If the program has closed it, sending fails; if the number
        // belongs to another file by now, the scheduler refuses and closes that file.
        None => unsafe { BorrowedFd::borrow_raw(file.descriptor) },
    });
    send(&descriptors.collect::<Vec<_>>())
}

/// A GPU's device file that the driver has open.
struct DeviceFile {
    descriptor: RawFd,
    identity: Identity,
    /// Empty in a process without `/proc`.
    path: CString,
}

impl DeviceFile {
    fn open_anew(&self) -> Option<OwnedFd> {
        let opened = open(&*self.path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
        // Another file may have replaced the device file at this path.
        (Identity::of(&opened) == Some(self.identity)).then_some(opened)
    }
}

/// Returns each device file once, or `None` without `/proc`.
fn device_files() -> Option<Vec<DeviceFile>> {
    let mut files = Vec::new();
    let is_shown = file::each_open(|descriptor, path| {
        if is_device_file(path.as_bytes()) {
            add(&mut files, descriptor, path);
        }
        true
    });
    is_shown.then_some(files)
}

fn unnamed_device_files() -> Vec<DeviceFile> {
    let mut files = Vec::new();
    for descriptor in 0..EXAMINED {
        // SAFETY: the descriptor is only queried. A number that is not a descriptor gives an error.
        let stat = fstat(unsafe { BorrowedFd::borrow_raw(descriptor) });
        let is_of_gpu = stat.is_ok_and(|stat| {
            FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice
                && major(stat.st_rdev) == MAJOR
                && minor(stat.st_rdev) < CONTROL
        });
        if is_of_gpu {
            add(&mut files, descriptor, CString::default());
        }
    }
    files
}

fn add(files: &mut Vec<DeviceFile>, descriptor: RawFd, path: CString) {
    // SAFETY: the descriptor is only queried. A number that is not a descriptor gives an error.
    let identity = Identity::of(unsafe { BorrowedFd::borrow_raw(descriptor) });
    if let Some(identity) = identity.filter(|identity| !files.iter().any(|file| file.identity == *identity))
        && files.len() < MAX_DESCRIPTORS
    {
        files.push(DeviceFile { descriptor, identity, path });
    }
}

/// Whether this is the path of a GPU's device file: `/dev/nvidia0`, or the same name elsewhere.
fn is_device_file(path: &[u8]) -> bool {
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
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn device_files_are_recognized_by_name() {
        for path in ["/dev/nvidia0", "/run/gpu/nvidia12", "nvidia3"] {
            assert!(is_device_file(path.as_bytes()), "{path}");
        }
        for path in ["/dev/nvidiactl", "/dev/nvidia", "/dev/nvidia-uvm", "/dev/nvidia0/x", "/dev/nvidia0 (deleted)", ""]
        {
            assert!(!is_device_file(path.as_bytes()), "{path}");
        }
    }

    #[test]
    fn each_device_file_is_opened_anew_once() {
        let folder = std::env::temp_dir().join(std::format!("nvshare-proof-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let path = folder.join("nvidia7");
        fs::write(&path, "").unwrap();
        let drivers = [(); 3].map(|()| fs::OpenOptions::new().read(true).write(true).open(&path).unwrap());
        let numbers: Vec<RawFd> = drivers.iter().map(|file| file.as_raw_fd()).collect();
        // SAFETY: the file is open until the end of this test.
        let identity = Identity::of(unsafe { BorrowedFd::borrow_raw(numbers[0]) });
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
        assert_eq!(sent(), [true; 0], "the driver's file has no path");
        fs::remove_file(&path).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        fs::remove_dir_all(&folder).unwrap();
    }
}
