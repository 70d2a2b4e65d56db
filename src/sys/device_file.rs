//! The identity of device files, used to compare them with open descriptors.

use std::fs::Metadata;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use rustix::fs::{AtFlags, FileType, OFlags, StatxFlags, makedev};

/// The identity of a device file. Two files of the same device are equal. For a simulated GPU, a
/// regular file replaces the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeviceFile {
    /// The number of a character device.
    Device(u64),
    Regular {
        device: u64,
        inode: u64,
    },
}

impl DeviceFile {
    /// Returns the device file with these numbers.
    pub fn numbered(major: u32, minor: u32) -> Self {
        Self::Device(makedev(major, minor))
    }

    /// Returns the device file at a path.
    ///
    /// # Errors
    /// The file cannot be examined, or has another type.
    pub fn at(path: &Path) -> io::Result<Self> {
        let found: Metadata = std::fs::metadata(path)?;
        match found.file_type() {
            kind if kind.is_char_device() => Ok(Self::Device(found.rdev())),
            kind if kind.is_file() => Ok(Self::Regular { device: found.dev(), inode: found.ino() }),
            _ => Err(io::Error::other("it is no device file")),
        }
    }

    /// Returns the device file that a descriptor has open for reading and writing, if any. Only
    /// processes that may use a device can open its file in this way.
    pub fn opened(descriptor: impl AsFd) -> Option<Self> {
        let flags = rustix::fs::fcntl_getfl(&descriptor).ok()?;
        if flags.contains(OFlags::PATH) || flags & OFlags::RWMODE != OFlags::RDWR {
            return None;
        }
        // Without `DONT_SYNC`, a file system in user space could delay the answer without end.
        let how = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
        let found = rustix::fs::statx(&descriptor, c"", how, StatxFlags::TYPE | StatxFlags::INO).ok()?;
        match FileType::from_raw_mode(found.stx_mode.into()) {
            FileType::CharacterDevice => Some(Self::numbered(found.stx_rdev_major, found.stx_rdev_minor)),
            FileType::RegularFile => {
                let device = makedev(found.stx_dev_major, found.stx_dev_minor);
                Some(Self::Regular { device, inode: found.stx_ino })
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};

    use super::*;

    #[test]
    fn only_a_descriptor_for_reading_and_writing_counts() {
        let path = Path::new("/dev/null");
        let both = OpenOptions::new().read(true).write(true).open(path).expect("/dev/null");
        assert_eq!(DeviceFile::opened(&both), Some(DeviceFile::numbered(1, 3)));
        assert_eq!(DeviceFile::opened(&both), DeviceFile::at(path).ok());
        assert_eq!(DeviceFile::opened(File::open(path).expect("/dev/null")), None);
        let by_path = rustix::fs::open(path, OFlags::PATH, rustix::fs::Mode::empty()).expect("/dev/null");
        assert_eq!(DeviceFile::opened(by_path), None);
        let socket = std::os::unix::net::UnixStream::pair().expect("a pair").0;
        assert_eq!(DeviceFile::opened(socket), None);
        assert!(DeviceFile::at(Path::new("/dev")).is_err());
    }

    #[test]
    fn regular_files_are_told_apart_by_inode() {
        let directory = test_support::Directory::new();
        let open = |name: &str| {
            let path = directory.0.join(name);
            OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).expect("a file")
        };
        let of = |name: &str| DeviceFile::opened(open(name)).expect("a file");
        assert!(of("a") == of("a") && of("a") != of("b"));
    }
}
