//! Files that clients lock while no scheduler runs. Each GPU has two lock files, next to the clients'
//! socket. Clients that see different directories must lock the same files. So the files in the
//! directories of the Kubernetes claims are hard links to one common set.

use std::fs::{OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use tracing::debug;

use crate::scheduler::GpuId;

/// The directories of the lock files.
#[derive(Debug, Default)]
pub struct LockDirectories {
    /// The directory of the clients' socket.
    clients: Option<PathBuf>,
    /// The parent of the claims' directories. This parent contains a second set of lock files. The
    /// files in the claims' directories are hard links to that set.
    ///
    /// The claims cannot share the set in the clients' directory. To a container runtime, the two
    /// directories are separate volumes, and the kernel creates no hard links across mounts. Two sets
    /// suffice. A GPU is offered either through claims or in other ways, so programs that share a GPU
    /// always use the same set.
    claims: Option<PathBuf>,
}

impl LockDirectories {
    fn files(gpu: GpuId) -> [String; 2] {
        ["turn", "here"].map(|what| format!("nvshare-{}.{what}", gpu.0))
    }

    fn of_claims(&self) -> impl Iterator<Item = PathBuf> {
        let entries =
            self.claims.as_ref().and_then(|directory| directory.read_dir().ok()).into_iter().flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| path.is_dir())
    }

    /// Sets the directory of the clients' socket. Lock files are created in this directory from now on.
    pub fn create_in(&mut self, directory: &Path) {
        self.clients = Some(directory.to_owned());
    }

    /// Sets the parent of the claims' directories. Lock files are also created in this parent, and linked
    /// into the directory of each claim.
    pub fn serve_claims_in(&mut self, directory: &Path) {
        self.claims = Some(directory.to_owned());
    }

    /// Creates a GPU's lock files. On failure, clients run without them.
    pub fn create(&self, gpu: GpuId) {
        for file in Self::files(gpu) {
            for path in [&self.clients, &self.claims].into_iter().flatten().map(|directory| directory.join(&file)) {
                if let Err(e) = create(&path) {
                    debug!("cannot create {}: {e}", path.display());
                }
            }
        }
        self.of_claims().for_each(|directory| self.link(gpu, &directory));
    }

    /// Hard-links a GPU's lock files into the directory of a claim.
    pub fn link(&self, gpu: GpuId, directory: &Path) {
        let Some(claims) = &self.claims else { return };
        for file in Self::files(gpu) {
            if let Err(e) = link(&claims.join(&file), &directory.join(&file)) {
                debug!("cannot link {file} in {}: {e}", directory.display());
            }
        }
    }

    /// Removes the lock files of a GPU that no client uses.
    pub fn remove(&self, gpu: GpuId) {
        let directories = [&self.clients, &self.claims].into_iter().flatten().cloned().chain(self.of_claims());
        for directory in directories {
            for file in Self::files(gpu) {
                let _ = std::fs::remove_file(directory.join(file));
            }
        }
    }
}

fn create(path: &Path) -> io::Result<()> {
    let mut options = OpenOptions::new();
    // Without `O_NONBLOCK`, opening a FIFO would wait for a reader.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let file = options.write(true).create(true).truncate(false).custom_flags(flags).open(path)?;
    // Every user must be able to lock the file. Locking requires read access, which the umask may
    // have removed.
    file.set_permissions(Permissions::from_mode(0o644))
}

fn link(original: &Path, link: &Path) -> io::Result<()> {
    let number = |path: &Path| path.symlink_metadata().map(|metadata| metadata.ino());
    match number(link) {
        Ok(there) if there == number(original)? => return Ok(()),
        Ok(_) => std::fs::remove_file(link)?,
        Err(_) => {}
    }
    std::fs::hard_link(original, link)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_fifo_instead_of_a_lock_file_does_not_block() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().is_ok_and(|status| status.success()));
        assert!(create(&path).is_err());
    }

    #[test]
    fn claim_directories_contain_the_same_lock_files() {
        let above = tempfile::tempdir().expect("a directory");
        let [clients, claims] = ["clients", "claims"].map(|name| above.path().join(name));
        let [one, other] = ["1", "2"].map(|name| claims.join(name));
        for directory in [&clients, &one] {
            std::fs::create_dir_all(directory).expect("a directory");
        }
        let directories = LockDirectories { clients: Some(clients.clone()), claims: Some(claims.clone()) };
        let gpu = GpuId(nvshare_wire::Uuid([7; 16]));
        directories.create(gpu);
        std::fs::create_dir(&other).expect("a directory");
        directories.link(gpu, &other);
        // If a file has replaced a link, `create` restores the link.
        let [turn, _] = LockDirectories::files(gpu);
        std::fs::remove_file(one.join(&turn)).and_then(|()| std::fs::write(one.join(&turn), "")).expect("a file");
        directories.create(gpu);
        for file in LockDirectories::files(gpu) {
            let number = |directory: &Path| directory.join(&file).metadata().expect("it is there").ino();
            assert_eq!((number(&one), number(&other)), (number(&claims), number(&claims)), "{file}");
            assert_ne!(number(&clients), number(&claims));
            assert_eq!(one.join(&file).metadata().expect("it is there").mode() & 0o777, 0o644);
        }
        directories.remove(gpu);
        assert!([&clients, &one, &other].iter().all(|directory| directory.read_dir().expect("it").next().is_none()));
    }
}
