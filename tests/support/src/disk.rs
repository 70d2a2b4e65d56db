//! A private disk for a test: an ext4 file system on a loop device. The disk can become full, or
//! lose most of its contents.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::{Directory, MIB, artifact};

/// Bytes of the disk's image that remain after [`Disk::lose`]: the first tables of the file system.
const LEFT: u64 = 4 << 20;

#[derive(Debug)]
pub struct Disk {
    image: File,
    mounted: PathBuf,
    directory: Directory,
}

impl Disk {
    /// Returns `None` and prints the reason if the disk cannot be created.
    pub fn new(name: &str, size: u64) -> Option<Self> {
        // The image is not in the temporary directory, because that directory may be in RAM.
        let directory =
            Directory(artifact("nvshare-scheduler").with_file_name(format!("{name}-{}", std::process::id())));
        let (image, mounted) = (directory.0.join("image"), directory.0.join("disk"));
        fs::create_dir_all(&mounted).expect("a directory");
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(&image).expect("an image");
        file.set_len(size).expect("its size");
        let does = |program: &str, options: &[&str], last: Option<&PathBuf>| {
            let mut command = Command::new(program);
            command.args(options).arg(&image).args(last).stderr(Stdio::null());
            command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").status().is_ok_and(|status| status.success())
        };
        if !does("mkfs.ext4", &["-q", "-F", "-m", "0"], None) || !does("mount", &["-o", "loop"], Some(&mounted)) {
            crate::skip("mkfs.ext4, and the right to mount a loop device");
            return None;
        }
        Some(Self { image: file, mounted, directory })
    }

    /// The path of a file on the disk.
    pub fn path(&self, name: &str) -> PathBuf {
        self.mounted.join(name)
    }

    /// Fills the disk.
    pub fn fill(&self) {
        let file = File::create(self.path("filler")).expect("a file");
        let mut end = 0;
        for size in [64 * MIB as i64, 1 << 20, 4 << 10] {
            let error = loop {
                // SAFETY: `file` keeps the descriptor open during the call.
                match unsafe { libc::posix_fallocate(file.as_raw_fd(), end, size) } {
                    0 => end += size,
                    error => break error,
                }
            };
            assert_eq!(error, libc::ENOSPC);
        }
    }

    /// Truncates the disk's image, so that most contents of the disk cannot be read.
    pub fn lose(&self) -> io::Result<()> {
        self.image.sync_all()?;
        self.image.set_len(LEFT)
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // The unmount is lazy, because processes that are about to end may still have open files.
        let _ = Command::new("umount").arg("-l").arg(&self.mounted).status();
        let _ = fs::remove_dir_all(&self.directory.0);
    }
}
