//! The room for images: each user has a share of the disk, and a reserve of the disk stays free.

use super::{Entry, Store, words, written};
use crate::Refusal;
use nvshare_hibernate::Image;

/// Maximum number of images of a user.
const MAX_IMAGES: usize = 64;
/// Each user's images may take this part of the disk.
pub(super) const SHARE_OF_USER: u64 = 2;
const DELETE: &str = "Delete images with: nvsharectl hibernated --delete IMAGE";

impl Store {
    /// Checks that an image of this size may be created for a user.
    ///
    /// # Errors
    /// The disk has no room, or the user has too many or too large images.
    pub fn check_room(&self, uid: u32, bytes: u64) -> Result<(), Refusal> {
        let own = self.images(Some(uid))?;
        if own.len() >= MAX_IMAGES {
            return Err(Refusal::new(format!("its user has {MAX_IMAGES} images. {DELETE}")));
        }
        self.check_share(own.iter().map(Image::room).sum(), bytes)?;
        let disk = self.disk()?;
        if disk.free >= bytes + disk.reserve() {
            return Ok(());
        }
        let (needed, free, at) = (mib(bytes + disk.reserve()), mib(disk.free), self.path.display());
        Err(Refusal::new(format!("the image needs {needed} MiB, and {at} has {free} MiB. Free space there")))
    }

    /// Returns the bytes that a user's other images take. An image that is being saved counts with its estimated
    /// size. Reads all manifests.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn room_of_others(&self, entry: &Entry, uid: u32) -> Result<u64, Refusal> {
        let others = self.images(Some(uid))?.into_iter().filter(|image| image.name != entry.name);
        Ok(others.map(|image| image.room()).sum())
    }

    /// Checks that an image of this size fits beside a user's other images, which take `used` bytes.
    fn check_share(&self, used: u64, bytes: u64) -> Result<(), Refusal> {
        let most = self.disk()?.size / SHARE_OF_USER;
        if used + bytes <= most {
            return Ok(());
        }
        let (used, most, needed) = (mib(used), mib(most), mib(bytes));
        Err(Refusal::new(format!(
            "the image needs {needed} MiB. Its user's images may have {most} MiB, and have {used} MiB. {DELETE}"
        )))
    }

    /// Checks the files that CRIU has written so far to an image. `others`: see [`Self::room_of_others`].
    ///
    /// # Errors
    /// They have taken the reserve of the disk, or more than the user's share.
    pub fn check_written(&self, entry: &Entry, others: u64) -> Result<(), Refusal> {
        self.check_reserve()?;
        self.check_share(others, written(&entry.path))
    }

    fn check_reserve(&self) -> Result<(), Refusal> {
        let (disk, at) = (self.disk()?, self.path.display());
        match disk.free >= disk.reserve() {
            true => Ok(()),
            false => Err(Refusal::new(format!("the disk of {at} is almost full. Free space there"))),
        }
    }

    pub(super) fn disk(&self) -> Result<Disk, Refusal> {
        let stat = rustix::fs::statvfs(&self.path).map_err(|e| words("read the free space")(e.into()))?;
        Ok(Disk { size: stat.f_blocks * stat.f_frsize, free: stat.f_bavail * stat.f_frsize })
    }
}

/// Size and free space of the disk of the images, in bytes.
pub(super) struct Disk {
    pub size: u64,
    free: u64,
}

impl Disk {
    fn reserve(&self) -> u64 {
        nvshare_hibernate::reserve(self.size)
    }
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}
