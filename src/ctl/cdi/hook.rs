//! The OCI hook `createContainer` of nvshare's CDI file. Runtimes call the hook for each container
//! with a GPU from that file. The hook runs in the container's mount namespace, after all mounts
//! and before `pivot_root`.
//!
//! A container gets the library through an `/etc/ld.so.preload` that the runtime mounts. The mount
//! hides the image's own file. If the image has such a file, the hook mounts a third file over
//! both. The third file lists the libraries of both. The hook never changes the image, and does
//! nothing in containers of images without the file. So only containers whose image has the file
//! depend on the hook. Invariant: if the hook finds the image's file, the container either preloads
//! the libraries of both files, or does not start.
//!
//! Three designs were rejected:
//!
//! - Writing the line into the container's own file: that needs a writable root, and `commit` would
//!   make the line a part of the image.
//! - A hook in place of the mount: every container would depend on the hook.
//! - Merging the files in the agent, on an event: the file under a mount is visible only in that
//!   mount namespace and with `CAP_SYS_ADMIN`.
//!
//! The hook also refuses containers with several ResourceClaims of Kubernetes. Each claim mounts
//! its socket at the same path. Only the last mount is visible, and kubelet and the runtime decide
//! which mount is the last.

use std::collections::BTreeMap;
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

/// The name of the command after `nvsharectl cdi`. This name must never change, because a CDI file
/// may be older or newer than the program that the file names.
pub const COMMAND: &str = "merge-preload";

/// The prefix of a variable that each claim adds to its containers. The claim's UID follows the
/// prefix.
pub const CLAIM_VARIABLE: &str = "NVSHARE_CLAIM_";

const NAME: &str = "ld.so.preload";
/// The size limit of a preload list, in bytes. A longer file cannot be a real preload list.
const LONGEST: u64 = 64 << 10;
const OPEN: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW);
/// Links of the image are resolved within the image, because the hook still runs with the runtime's
/// root.
const WITHIN: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);

/// The part of the container's state that the hook needs. The runtime writes the state to the
/// hook's standard input.
#[derive(Deserialize)]
struct ContainerState {
    bundle: PathBuf,
}

/// The bundle's `config.json`.
#[derive(Deserialize)]
struct Container {
    root: Root,
    #[serde(default)]
    process: Process,
    #[serde(default)]
    linux: Linux,
}

#[derive(Deserialize)]
struct Root {
    path: PathBuf,
}

#[derive(Default, Deserialize)]
struct Process {
    /// Variables with their values.
    #[serde(default)]
    env: Vec<String>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Linux {
    /// The SELinux label of the container's own mounts.
    #[serde(default)]
    mount_label: String,
}

/// Checks the container that `state` describes, and merges the container's preload lists.
///
/// # Errors
/// The container has several claims, or the image's own list exists and cannot be merged. The
/// runtime then does not start the container and reports the reason, in Kubernetes as an event of
/// the pod.
///
/// If the hook cannot look for a list, for example on a kernel before 5.6, the hook prints the
/// reason on standard error and succeeds. The container then starts without the image's preloaded
/// libraries.
pub fn on_create_container(state: impl Read) -> Result<(), CtlError> {
    let unknown = |why: &str| eprintln!("nvsharectl: cannot check whether the image has an /etc/ld.so.preload: {why}");
    let (bundle, container) = match read_container(state) {
        Ok(found) => found,
        Err(why) => {
            unknown(&why);
            return Ok(());
        }
    };
    check_claims(&container.process.env).map_err(CtlError::Failed)?;
    let found = match Found::open(&bundle, container) {
        Ok(found) => found,
        Err(why) => {
            unknown(&why);
            return Ok(());
        }
    };
    found.merge().map_err(|why| {
        CtlError::Failed(format!(
            "cannot merge the image's /etc/ld.so.preload with nvshare's: {why}. List the image's libraries in \
             LD_PRELOAD instead"
        ))
    })
}

/// The container's bundle and its configuration.
fn read_container(state: impl Read) -> Result<(PathBuf, Container), String> {
    // Only the JSON value is parsed, because the runtime may keep the pipe open.
    let state = ContainerState::deserialize(&mut serde_json::Deserializer::from_reader(state));
    let bundle = state.map_err(|e| format!("standard input: {e}"))?.bundle;
    let file = bundle.join("config.json");
    let named = |e: &dyn std::fmt::Display| format!("{}: {e}", file.display());
    let text = std::fs::read(&file).map_err(|e| named(&e))?;
    let container = serde_json::from_slice(&text).map_err(|e| named(&e))?;
    Ok((bundle, container))
}

fn check_claims(env: &[String]) -> Result<(), String> {
    let claims: BTreeMap<&str, &str> =
        env.iter().filter_map(|variable| variable.strip_prefix(CLAIM_VARIABLE)?.split_once('=')).collect();
    if claims.len() < 2 {
        return Ok(());
    }
    let names: Vec<&str> = claims.into_values().collect();
    Err(format!(
        "the container has several claims of nvshare ({}), but it can use only one. Use one claim with several \
         requests or with `count`",
        names.join(", ")
    ))
}

/// A container that is being created.
struct Found {
    container: Container,
    /// The container's `/etc`.
    etc: OwnedFd,
    /// The container's `/etc`, without the mounts on files in it.
    own: OwnedFd,
}

impl Found {
    fn open(bundle: &Path, container: Container) -> Result<Self, String> {
        let path = bundle.join(&container.root.path);
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
        self.mount(&text, &mounted).map_err(|e| format!("cannot mount the merged file: {e}"))
    }

    /// Mounts a read-only file with this text over the mounted file.
    fn mount(&self, text: &[u8], over: &File) -> std::io::Result<()> {
        // The file is on a separate tmpfs, which ends with the container. No existing file system
        // is writable in every container.
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
        // Before Linux 6.15, bind-mounting a file of the tmpfs requires that the tmpfs itself is
        // mounted. The hook mounts the tmpfs on the container's `/etc`, because no process uses
        // that directory yet.
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

/// Opens the list in a directory, and reads its text. Returns `None` if there is no list.
fn read(directory: impl AsFd) -> Result<Option<(File, Vec<u8>)>, String> {
    // The file's type is checked before opening, because an image may contain any file type, and
    // opening a device can have effects.
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

/// Merges the names in the image's list with the library in nvshare's list. nvshare's library comes
/// last, as on a host. Returns `None` if the image's list adds no library, or the mounted list is
/// not nvshare's.
fn merged(own: &[u8], nvshares: &[u8]) -> Option<Vec<u8>> {
    // The loader stops reading at a NUL.
    let own = own.split(|byte| *byte == 0).next().unwrap_or_default();
    let all: Vec<&[u8]> = entries::names(own).into_iter().filter(|name| !entries::is_ours(name)).collect();
    let ours = entries::names(nvshares).into_iter().find(|name| entries::is_ours(name))?;
    // Comments are dropped, because their meaning to the loader depends on their position.
    (!all.is_empty()).then(|| all.into_iter().chain([ours]).flat_map(|name| [name, b"\n"].concat()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merged_list_has_the_images_libraries_first() {
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
