//! What container runtimes call for each container that gets a GPU by the CDI file, as an OCI hook `createContainer`: in the
//! container's mount namespace, after all mounts, before the container's root becomes the root.
//!
//! The file that nvshare has mounted as `/etc/ld.so.preload` hides the one of an image that has its own. Where there is
//! one, this mounts a third file over both, which names the libraries of both. The image stays as it is, and a container whose image
//! has none is not touched. The invariant: a container either has the libraries of both, or does not start.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fchmod, fstat, openat, openat2};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_reconfigure, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen, move_mount, open_tree, unmount,
};
use serde::Deserialize;

use crate::ctl::CtlError;
use crate::ctl::preload::entries;

/// The name of the command after `nvsharectl cdi`. CDI files are older and newer than the program that they name, so it stays.
pub const COMMAND: &str = "merge-preload";

const NAME: &str = "ld.so.preload";
/// More than a list of libraries can reasonably have, in bytes.
const LONGEST: u64 = 64 << 10;
const OPEN: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW);
/// The runtime's file system is still around the container's: what the image has links to is looked for in the image.
const WITHIN: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// What a runtime tells a hook.
#[derive(Deserialize)]
struct State {
    bundle: PathBuf,
}

/// The bundle's `config.json`.
#[derive(Deserialize)]
struct Container {
    root: Root,
    #[serde(default)]
    linux: Linux,
}

#[derive(Deserialize)]
struct Root {
    path: PathBuf,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Linux {
    /// SELinux's label of the container's own mounts.
    #[serde(default)]
    mount_label: String,
}

/// Reads the state of the container that a runtime writes to a hook.
///
/// # Errors
/// If the image's own list can be seen and not be merged. Then the runtime starts no container, and says why, in Kubernetes by an event
/// of the pod. What keeps this from looking for one at all, such as a kernel before 5.6, goes to standard error and is no error: the
/// container starts without what its image preloads.
pub fn merge_preload(state: impl Read) -> Result<(), CtlError> {
    let found = match Found::look(state) {
        Ok(found) => found,
        Err(why) => {
            eprintln!("nvsharectl: cannot look for the image's own /etc/ld.so.preload: {why}");
            return Ok(());
        }
    };
    found.merge().map_err(|why| {
        CtlError::Failed(format!(
            "the image's own /etc/ld.so.preload cannot be merged with that of nvshare: {why}; have the image name its \
             libraries in LD_PRELOAD instead"
        ))
    })
}

/// A container that is being created.
struct Found {
    container: Container,
    /// Its `/etc`.
    etc: OwnedFd,
    /// The same without what is mounted in it.
    own: OwnedFd,
}

impl Found {
    fn look(state: impl Read) -> Result<Self, String> {
        // Not to the end: who writes it need not hang up.
        let state = State::deserialize(&mut serde_json::Deserializer::from_reader(state));
        let state = state.map_err(|e| format!("standard input: {e}"))?;
        let file = state.bundle.join("config.json");
        let named = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
        let text = std::fs::read(&file).map_err(|e| named(&e))?;
        let container: Container = serde_json::from_slice(&text).map_err(|e| named(&e))?;
        let path = state.bundle.join(&container.root.path);
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let open = || {
            let root = openat(CWD, &path, directory, Mode::empty())?;
            let etc = openat2(root, "etc", directory, Mode::empty(), WITHIN)?;
            let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let own = open_tree(&etc, "", clone | OpenTreeFlags::AT_EMPTY_PATH)?;
            Ok((etc, own))
        };
        let (etc, own) = open().map_err(|e: Errno| format!("{}: {e}", path.display()))?;
        Ok(Self { container, etc, own })
    }

    fn merge(&self) -> Result<(), String> {
        let Some((_, own)) = read(&self.own)? else { return Ok(()) };
        let Some((mounted, nvshares)) = read(&self.etc)? else { return Ok(()) };
        let Some(text) = merged(&own, &nvshares) else { return Ok(()) };
        self.mount(&text, &mounted).map_err(|e| format!("no file with both can be mounted: {e}"))
    }

    /// Mounts a read-only file with this text over the one that is mounted.
    fn mount(&self, text: &[u8], over: &File) -> std::io::Result<()> {
        // A file system of its own, which goes with the container: nothing that is there can be written to in all containers.
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(&context, "mode", "0755")?;
        fsconfig_set_string(&context, "size", "128k")?;
        let label = &self.container.linux.mount_label;
        if !label.is_empty() {
            fsconfig_set_string(&context, "context", label.as_str())?;
        }
        fsconfig_create(&context)?;
        let attributes =
            MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV | MountAttrFlags::MOUNT_ATTR_NOEXEC;
        let system = fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)?;
        // Before Linux 6.15 a file of it can be mounted only while it is mounted somewhere itself: here, where nobody is yet.
        let by_descriptors = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
        move_mount(&system, "", &self.etc, "", by_descriptors)?;
        let create = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OPEN;
        let mut file = File::from(openat(&system, NAME, create, Mode::from_raw_mode(0o644))?);
        fchmod(&file, Mode::from_raw_mode(0o644))?;
        file.write_all(text)?;
        drop(file);
        fsconfig_set_flag(&context, "ro")?;
        fsconfig_reconfigure(&context)?;
        let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        move_mount(open_tree(&system, NAME, clone)?, "", over, "", by_descriptors)?;
        Ok(unmount(by_descriptor(&system), UnmountFlags::DETACH)?)
    }
}

fn by_descriptor(fd: &OwnedFd) -> PathBuf {
    Path::new("/proc/self/fd").join(fd.as_raw_fd().to_string())
}

/// The list in a directory, and its text; `None` if there is none.
fn read(directory: impl AsFd) -> Result<Option<(File, Vec<u8>)>, String> {
    // In an image it can be anything, also a device, which does something when it is opened.
    let place = match openat(directory, NAME, OFlags::PATH | OPEN, Mode::empty()) {
        Ok(place) => place,
        Err(Errno::NOENT) => return Ok(None),
        Err(e) => return Err(e.to_string()),
    };
    match fstat(&place).map(|stat| FileType::from_raw_mode(stat.st_mode)) {
        Ok(FileType::RegularFile) => {}
        Ok(FileType::Symlink) => return Err("it is a symbolic link".into()),
        Ok(_) => return Err("it is not a regular file".into()),
        Err(e) => return Err(e.to_string()),
    }
    let file = File::open(by_descriptor(&place)).map_err(|e| e.to_string())?;
    let mut text = Vec::new();
    (&file).take(LONGEST + 1).read_to_end(&mut text).map_err(|e| e.to_string())?;
    if text.len() as u64 > LONGEST {
        return Err(format!("it is longer than {} KiB", LONGEST >> 10));
    }
    Ok(Some((file, text)))
}

/// The names in the image's list and the library in nvshare's, which comes last, as on a host; `None` if that is what is there.
fn merged(own: &[u8], nvshares: &[u8]) -> Option<Vec<u8>> {
    // The loader stops at a NUL.
    let own = own.split(|byte| *byte == 0).next().unwrap_or_default();
    let all: Vec<&[u8]> = entries::names(own).into_iter().filter(|name| !entries::is_ours(name)).collect();
    let ours = entries::names(nvshares).into_iter().find(|name| entries::is_ours(name))?;
    // Without comments, of which the loader understands some in another way at another place.
    (!all.is_empty()).then(|| all.into_iter().chain([ours]).flat_map(|name| [name, b"\n"].concat()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_both_are_named_and_the_images_come_first() {
        let ours = b"/usr/lib/nvshare/libnvshare.so\n";
        for (own, expected) in [
            ("/usr/lib/liba.so", Some("/usr/lib/liba.so\n/usr/lib/nvshare/libnvshare.so\n")),
            (
                "# why\nliba.so:libb.so # that\nlibc.so\n",
                Some("liba.so\nlibb.so\nlibc.so\n/usr/lib/nvshare/libnvshare.so\n"),
            ),
            ("/opt/libnvshare.so liba.so\n", Some("liba.so\n/usr/lib/nvshare/libnvshare.so\n")),
            ("liba.so\0libb.so", Some("liba.so\n/usr/lib/nvshare/libnvshare.so\n")),
            ("", None),
            ("\n# nothing\n", None),
            ("/usr/lib/nvshare/libnvshare.so\n", None),
        ] {
            let merged = merged(own.as_bytes(), ours).map(|text| String::from_utf8(text).expect("text"));
            assert_eq!(merged.as_deref(), expected, "{own:?}");
        }
        assert_eq!(merged(b"liba.so", b"libother.so\n"), None, "what is mounted is not nvshare's");
    }
}
