//! `nvsharectl cdi`: writes a file that tells container runtimes how to give GPUs and nvshare to
//! containers (the Container Device Interface, CDI).
//!
//! - `edits`: a runtime's changes to a container.
//! - `nvidia`: the file of NVIDIA's tools, which lists everything that a GPU needs in a container.
//! - `nodes`: a GPU's device nodes, for hosts without NVIDIA's file.
//! - `spec`: nvshare's file.
//! - [`specs`]: the CDI files of a host.
//! - `hook`: the OCI hook that nvshare's file names.

mod edits;
mod hook;
mod nodes;
mod nvidia;
mod spec;
pub mod specs;

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueHint};
use rustix::fs::{
    Access, AtFlags, Dir, Gid, Mode, OFlags, StatVfsMountFlags, Uid, access, chownat, fchmod, fchown, fstat, openat,
    statvfs,
};
use rustix::io::Errno;

use super::preload::library;
use super::{CtlError, Target, block_on};
use crate::config::paths;
pub use hook::on_create_container;
use nvidia::Nvidia;
pub use spec::{CLAIM_KIND, of_claim};
use spec::{FromHost, Spec};

/// The default output, in the directory that runtimes read for the administrator's CDI files.
const DEFAULT_OUTPUT: &str = "/etc/cdi/nvshare.json";

#[derive(Debug, Args)]
pub struct Generate {
    /// File to write, or - for standard output
    #[arg(long, value_name = "FILE", default_value = DEFAULT_OUTPUT, value_hint = ValueHint::FilePath)]
    output: PathBuf,
    /// Library on this host [default: the library installed with nvsharectl]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// File on this host to mount as /etc/ld.so.preload in containers; it contains the library's path in containers
    #[arg(long, value_name = "PATH", default_value = paths::PRELOAD_LIST)]
    preload_list: PathBuf,
    /// Directory of the scheduler's socket for programs
    #[arg(long, value_name = "DIRECTORY", default_value = paths::SOCKETS_IN_CONTAINERS, value_hint = ValueHint::DirPath)]
    sockets: PathBuf,
    /// Path of nvsharectl on this host [default: this program]. Container runtimes call it to merge an image's
    /// /etc/ld.so.preload with nvshare's
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    hook: Option<PathBuf>,
    /// NVIDIA's CDI file [default: the file in /etc/cdi or /var/run/cdi, if any]
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    nvidia: Option<PathBuf>,
    /// Keep running, and rewrite the file whenever its contents change, until a signal arrives
    #[arg(long)]
    watch: bool,
    /// Write nothing while NVIDIA's CDI file is missing, since containers would lack the driver's libraries
    #[arg(long)]
    require_nvidia: bool,
    /// Write nothing; only check that the file exists and is up to date
    #[arg(long, conflicts_with = "watch")]
    check: bool,
}

/// Period of `--watch`. GPUs and drivers change only a few times a year, but pods wait for each
/// change.
const LOOK: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct Install {
    /// Directory to install into; created if missing
    #[arg(long, value_name = "DIRECTORY", value_hint = ValueHint::DirPath)]
    to: PathBuf,
    /// Library to install [default: the library installed with nvsharectl]
    #[arg(long, value_name = "PATH")]
    library: Option<PathBuf>,
    /// File with the library's path in containers
    #[arg(long, value_name = "PATH", default_value = paths::PRELOAD_LIST)]
    preload_list: PathBuf,
    /// Directory that the scheduler writes to: created if missing, and owned by --owner; can be repeated
    #[arg(long, value_name = "DIRECTORY", requires = "owner", value_hint = ValueHint::DirPath)]
    give: Vec<PathBuf>,
    /// Numeric user and group ID of the scheduler
    #[arg(long, value_name = "UID", requires = "give")]
    owner: Option<u32>,
}

/// Copies the files that containers mount, and this program, into a directory of the host.
/// `install` is for hosts that run nvshare only in containers. Each file is replaced atomically,
/// and running containers keep the old file. Passes remarks to `say`.
pub fn install(asked: &Install, say: impl Fn(&str)) -> Result<(), CtlError> {
    let fail = |path: &Path, e: std::io::Error| CtlError::Failed(format!("{}: {e}", path.display()));
    let copy = |from: &Path, name: &str, mode: u32| {
        let to = asked.to.join(name);
        let mut from_file = File::open(from).map_err(|e| fail(from, e))?;
        publish(&to, mode, |file| std::io::copy(&mut from_file, file).map(drop)).map_err(|e| fail(&to, e))
    };
    copy(&library::find(asked.library.as_deref())?, "libnvshare.so", 0o644)?;
    copy(&asked.preload_list, "ld.so.preload", 0o644)?;
    if statvfs(&asked.to).is_ok_and(|system| system.f_flag.contains(StatVfsMountFlags::NOEXEC)) {
        // A CDI file that names a program which cannot be executed would prevent every container
        // from starting.
        let program = asked.to.join(PROGRAM);
        match std::fs::remove_file(&program) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => return Err(fail(&program, e)),
            _ => say(&format!(
                "container runtimes cannot run nvsharectl from {}, because its file system is mounted with noexec. \
                 {HIDDEN}",
                asked.to.display()
            )),
        }
    } else {
        copy(Path::new("/proc/self/exe"), PROGRAM, 0o755)?;
    }
    for (directory, owner) in asked.give.iter().zip(asked.owner.into_iter().cycle()) {
        give(directory, owner).map_err(|e| {
            CtlError::Failed(format!("cannot change the owner of {} to user {owner}: {e}", directory.display()))
        })?;
    }
    Ok(())
}

/// Changes the owner of a directory and its files, and of the directories of claims and their
/// files. A scheduler that ran as another user may have left sockets and locks there.
fn give(directory: &Path, owner: u32) -> std::io::Result<()> {
    std::fs::create_dir_all(directory)?;
    give_opened(&rustix::fs::open(directory, DIRECTORY, Mode::empty())?, owner, true)
}

/// The file name of this program's copy.
const PROGRAM: &str = "nvsharectl";
const HIDDEN: &str = "In containers, nvshare's /etc/ld.so.preload hides the image's own file, and the libraries \
                      listed in the image's file are not loaded";

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// Changes owners through descriptors, because the previous owner could replace entries at the same
/// time. Descends no deeper than the directories of claims.
fn give_opened(directory: &OwnedFd, owner: u32, has_claims: bool) -> std::io::Result<()> {
    // Other users who can write to the directory could replace the scheduler's socket. If the mode
    // does not let other users write, the mode stays unchanged.
    if fstat(directory)?.st_mode & 0o022 != 0 {
        fchmod(directory, Mode::from_raw_mode(0o755))?;
    }
    let (user, group) = (Some(Uid::from_raw(owner)), Some(Gid::from_raw(owner)));
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) {
            continue;
        }
        match openat(directory, name, DIRECTORY | OFlags::NOFOLLOW, Mode::empty()) {
            Ok(below) if has_claims => give_opened(&below, owner, false)?,
            Ok(_) | Err(Errno::NOTDIR | Errno::LOOP) => {
                chownat(directory, name, user, group, AtFlags::SYMLINK_NOFOLLOW)?;
            }
            Err(e) => return Err(e.into()),
        }
    }
    Ok(fchown(directory, user, group)?)
}

/// Writes the file, and passes remarks to `say`.
pub fn generate(target: &Target, asked: &Generate, say: impl Fn(&str)) -> Result<(), CtlError> {
    if asked.check {
        return check(target, asked);
    }
    if !asked.watch {
        return make(target, asked)?.publish(&asked.output, &say);
    }
    let mut before = None;
    loop {
        let now = make(target, asked).map_err(|e| e.to_string());
        if before.as_ref() != Some(&now) {
            match &now {
                Ok(made) => made.publish(&asked.output, &say)?,
                Err(why) => say(why),
            }
            before = Some(now);
        }
        std::thread::sleep(LOOK);
    }
}

/// Compares the file with newly generated content.
fn check(target: &Target, asked: &Generate) -> Result<(), CtlError> {
    let made = make(target, asked)?;
    let output = asked.output.display();
    match std::fs::read(&asked.output) {
        Ok(there) if there == made.text.as_bytes() => Ok(()),
        Ok(_) => Err(CtlError::Failed(format!(
            "{output} is out of date. Run this command without --check to write it again"
        ))),
        Err(e) => {
            Err(CtlError::Failed(format!("cannot read {output}: {e}. Run this command without --check to write it")))
        }
    }
}

/// The file, and remarks about it.
#[derive(Debug, PartialEq)]
struct Made {
    text: String,
    remarks: Vec<String>,
}

impl Made {
    fn publish(&self, output: &Path, say: impl Fn(&str)) -> Result<(), CtlError> {
        self.remarks.iter().for_each(|remark| say(remark));
        if output == Path::new("-") {
            print!("{}", self.text);
            return Ok(());
        }
        let failed = |e| CtlError::Failed(format!("cannot write {}: {e}", output.display()));
        write(output, self.text.as_bytes()).map_err(failed)
    }
}

fn make(target: &Target, asked: &Generate) -> Result<Made, CtlError> {
    let gpus = block_on(async { Ok(target.connect().await?.list_gpus().await?) })?;
    if gpus.is_empty() {
        return Err(CtlError::Failed(
            "the scheduler knows no GPU. If the driver was loaded after the scheduler started, restart the scheduler. \
             Without NVML, the scheduler finds a GPU only when a program uses it"
                .into(),
        ));
    }
    let library = library::find(asked.library.as_deref())?;
    let from_host = FromHost {
        library: existing(&library, "library")?,
        preload_list: existing(&asked.preload_list, "preload-list")?,
        sockets: existing(&asked.sockets, "sockets")?,
        hook: asked.hook.clone().or_else(|| std::env::current_exe().ok()).and_then(startable),
    };
    let nvidia = match &asked.nvidia {
        Some(file) => Some(Nvidia::read(file).map_err(CtlError::Failed)?),
        None => Nvidia::find(&specs::DIRECTORIES.map(Path::new), &gpus).map_err(CtlError::Failed)?,
    };
    let mut remarks = Vec::new();
    if from_host.hook.is_none() {
        let program = asked.hook.as_deref().map_or("the file of this nvsharectl".into(), Path::to_string_lossy);
        remarks.push(format!("container runtimes cannot run {program}. {HIDDEN}"));
    }
    if nvidia.is_none() {
        let missing = "no NVIDIA CDI file in /etc/cdi or /var/run/cdi names a GPU. Run `nvidia-ctk cdi generate \
            --output=/etc/cdi/nvidia.yaml` on the host";
        if asked.require_nvidia {
            return Err(CtlError::Failed(missing.into()));
        }
        let then = if asked.watch || asked.check { "" } else { ", then run this command again" };
        remarks.push(format!(
            "{missing}{then}. Until then, containers get their GPUs' device nodes, and their images must contain the \
             driver's libraries"
        ));
    }
    let spec = Spec::of(&gpus, &from_host, nvidia.as_ref(), &mut remarks).map_err(CtlError::Failed)?;
    if asked.output != Path::new("-") && !asked.check {
        remarks.push(format!("{}: {}", asked.output.display(), spec.names()));
    }
    Ok(Made { text: format!("{:#}\n", spec.json()), remarks })
}

/// Returns the absolute path of a file that runtimes mount. The file must exist, and its path must
/// be valid UTF-8.
fn existing(path: &Path, option: &str) -> Result<String, CtlError> {
    let fail = |why: String| CtlError::Failed(format!("--{option} {}: {why}", path.display()));
    let whole = std::path::absolute(path).map_err(|e| fail(e.to_string()))?;
    whole.metadata().map_err(|e| fail(e.to_string()))?;
    let text = whole.into_os_string().into_string();
    text.map_err(|_| fail("its path is not valid UTF-8, which a CDI file requires".into()))
}

/// Returns the absolute path of a program if the host can execute the program.
fn startable(program: PathBuf) -> Option<String> {
    let whole = std::path::absolute(program).ok()?;
    let is_startable = whole.is_file() && access(&whole, Access::EXEC_OK).is_ok();
    whole.into_os_string().into_string().ok().filter(|_| is_startable)
}

/// Writes a file atomically, because runtimes may read it at any time. Creates the file's
/// directory.
///
/// # Errors
/// A system call fails. An earlier file then stays unchanged.
pub fn write(path: &Path, content: &[u8]) -> std::io::Result<()> {
    publish(path, 0o644, |file| file.write_all(content))
}

/// Writes a file atomically, with the mode `mode` and the content that `fill` writes.
fn publish(path: &Path, mode: u32, fill: impl FnOnce(&mut File) -> std::io::Result<()>) -> std::io::Result<()> {
    let path = std::path::absolute(path)?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(directory)?;
    // Runtimes ignore names that do not end in `.json`, so they ignore the temporary file.
    let mut file = tempfile::Builder::new().prefix(".nvshare-").suffix(".new").tempfile_in(directory)?;
    fill(file.as_file_mut())?;
    file.as_file().set_permissions(std::fs::Permissions::from_mode(mode))?;
    file.as_file().sync_all()?;
    // The file is closed before it gets its name, because a program that is open for writing cannot
    // be executed.
    Ok(file.into_temp_path().persist(&path)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn changing_the_owner_covers_the_contents_and_is_idempotent() {
        if !rustix::process::geteuid().is_root() {
            return test_support::skip("root, to give files away");
        }
        let above = tempfile::tempdir().expect("a directory");
        let directory = above.path().join("run/nvshare");
        give(&directory, 900_180).expect("it is made");
        std::fs::write(directory.join("scheduler.sock.lock"), "1").expect("a file of root");
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777)).expect("its mode");
        std::os::unix::fs::symlink(above.path(), directory.join("link")).expect("a link");
        std::fs::create_dir(directory.join("claim")).expect("a directory");
        std::fs::write(directory.join("claim/scheduler.sock"), "").expect("a file of root");
        give(&directory, 900_180).expect("it is given again");
        let owner = |path: &Path| {
            let metadata = path.symlink_metadata().expect("it is there");
            (metadata.uid(), metadata.gid())
        };
        for path in [
            directory.clone(),
            directory.join("scheduler.sock.lock"),
            directory.join("link"),
            directory.join("claim"),
            directory.join("claim/scheduler.sock"),
        ] {
            assert_eq!(owner(&path), (900_180, 900_180), "{path:?}");
        }
        assert_eq!(owner(above.path()).0, 0, "links are not followed");
        assert_eq!(directory.metadata().expect("it is there").mode() & 0o777, 0o755);
    }
}
