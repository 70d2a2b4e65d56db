//! The images. Each image is a directory of the store, which only root can enter:
//!
//! - `criu/`: CRIU's files. `work/`: its logs.
//! - `manifest`: what the image contains, with the checksum of each file of `criu/`. `signature`: the
//!   manifest's HMAC-SHA-256 with the host's key, which is checked before the manifest is parsed.
//! - `record`: the [`Stage`] of the image, which is replaced atomically. **Exactly one of the image and
//!   its process is the program**: the stage says which, and another helper ends the other one.
//!
//! A helper and its CRIU hold a lock on the directory while they work.
//!
//! While CRIU writes, `criu/` belongs to the program's owner. Afterwards, it belongs to root, and no
//! process may have its files open for writing. So CRIU reads what was checked.

use crate::{
    Refusal,
    process::{self, Credentials, Identity, Tree},
    scope,
};
use hmac::{Hmac, Mac};
use nvshare_hibernate::{Image, MAX_LISTED};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fsync};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

/// The latest process of CRIU.
const CRIU: &str = "criu-process";
const RECORD: &str = "record";
const MANIFEST: &str = "manifest";
const SIGNATURE: &str = "signature";
const KEY: &str = "key";
/// Maximum length of a manifest in bytes. CRIU writes a few files for each process.
const MAX_MANIFEST: u64 = 4 << 20;
/// Longest name of an image.
const MAX_NAME: usize = 64;
/// Free space, in bytes, that a dump needs beside the memory of the program.
const SPARE: u64 = 64 << 20;

/// Where the program is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// In this process, which is stopped. The image is not complete.
    Saving { process: Identity },
    /// In the image. This process is stopped and has to be ended.
    Ending { process: Identity },
    /// In the image.
    Saved,
    /// In the image. CRIU may have created processes, which have to be ended. They began after this
    /// helper, and are in its control groups.
    Restoring { helper: Identity, cgroups: String },
    /// In this process, which is stopped and has to continue.
    Continuing { process: Identity },
    /// In this process, until it ends.
    Restored { process: Identity },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    pub program: String,
    pub owner: Credentials,
    pub root: i32,
    /// The IDs of all threads.
    pub threads: Vec<i32>,
    pub saved: u64,
    files: Vec<SavedFile>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct SavedFile {
    name: String,
    bytes: u64,
    sha256: String,
}

impl Manifest {
    fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

/// A process of CRIU, which runs as this user.
#[derive(Debug, Serialize, Deserialize)]
struct Worker {
    process: Identity,
    uid: u32,
}

#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    key: Vec<u8>,
}

/// An image that this process has locked.
#[derive(Debug)]
pub struct Entry {
    pub name: String,
    path: PathBuf,
    pub lock: OwnedFd,
}

fn words(what: &str) -> impl Fn(io::Error) -> Refusal {
    let what = what.to_owned();
    move |e| Refusal::new(format!("cannot {what}: {e}"))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Writes a file so that it has either the old or the new contents, even after a crash.
fn replace(directory: &Path, name: &str, contents: &[u8]) -> io::Result<()> {
    let new = directory.join(format!("{name}.new"));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
    file.write_all(contents)?;
    file.sync_all()?;
    fs::rename(new, directory.join(name))?;
    File::open(directory)?.sync_all()
}

/// Opens a regular file that only the helper's user can change and no process has open for writing.
fn open_sealed(path: &Path) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let metadata = file.metadata()?;
    let own = rustix::process::geteuid().as_raw();
    if !metadata.is_file() || metadata.nlink() != 1 || metadata.uid() != own || metadata.mode() & 0o022 != 0 {
        return Err(io::Error::other("it is not a file that only the helper can change"));
    }
    // The kernel grants a read lease only if no process has the file open for writing.
    for lease in [libc::F_RDLCK, libc::F_UNLCK] {
        // SAFETY: the descriptor is open.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLEASE, lease) } != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(file)
}

impl Store {
    /// Opens the directory of the images, and creates it and the host's key if they are missing.
    ///
    /// # Errors
    /// Other users can enter the directory, or it cannot be used.
    pub fn open(path: &Path) -> Result<Self, Refusal> {
        let shown = path.display();
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(words(&format!("create {shown}")))?;
        let path = path.canonicalize().map_err(words(&format!("open {shown}")))?;
        let metadata = path.metadata().map_err(words(&format!("read {shown}")))?;
        if metadata.uid() != rustix::process::geteuid().as_raw() || metadata.mode() & 0o077 != 0 {
            return Err(Refusal::new(format!(
                "other users can enter {shown}. Run: chown root {shown}; chmod 700 {shown}"
            )));
        }
        let key = Self::key(&path).map_err(words(&format!("read the key in {shown}")))?;
        Ok(Self { path, key })
    }

    fn key(path: &Path) -> io::Result<Vec<u8>> {
        if let Ok(mut file) = open_sealed(&path.join(KEY)) {
            let mut key = Vec::new();
            file.read_to_end(&mut key)?;
            return if key.len() >= 32 { Ok(key) } else { Err(io::Error::other("it is too short")) };
        }
        if path.join(KEY).exists() {
            return Err(io::Error::other("other users can change it"));
        }
        let mut key = vec![0; 32];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        replace(path, KEY, &key)?;
        Ok(key)
    }

    /// The names of all images.
    fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_name(name)).collect()
    }

    /// Creates an image of a program that is about to be stopped. CRIU can write to `criu/` and `work/`.
    ///
    /// # Errors
    /// The disk is full.
    pub fn create(&self, program: &str, process: &Identity, owner: &Credentials) -> Result<Entry, Refusal> {
        let program: String = program.chars().take(16).collect();
        let name = format!("{program}-{}-{}", process.pid, now());
        let path = self.path.join(&name);
        let create = || -> io::Result<Entry> {
            fs::DirBuilder::new().mode(0o755).create(&path)?;
            let entry = Entry { name, path: path.clone(), lock: lock(&path)?.ok_or(io::ErrorKind::ResourceBusy)? };
            entry.record(&Stage::Saving { process: process.clone() })?;
            for part in ["criu", "work"] {
                fs::DirBuilder::new().mode(0o700).create(path.join(part))?;
                chown(path.join(part), Some(owner.uid), Some(owner.gid))?;
            }
            Ok(entry)
        };
        create().inspect_err(|_| drop(fs::remove_dir_all(&path))).map_err(words("create the image"))
    }

    /// Checks that the disk has room for the memory of a program.
    ///
    /// # Errors
    /// It has not.
    pub fn check_room(&self, bytes: u64) -> Result<(), Refusal> {
        let stat = rustix::fs::statvfs(&self.path).map_err(|e| words("read the free space")(e.into()))?;
        let (free, needed) = (stat.f_bavail * stat.f_frsize, bytes + SPARE);
        let mib = |bytes: u64| bytes.div_ceil(1 << 20);
        if free >= needed {
            return Ok(());
        }
        let (needed, free, at) = (mib(needed), mib(free), self.path.display());
        Err(Refusal::new(format!("the image needs {needed} MiB, and {at} has {free} MiB. Free space there")))
    }

    /// Locks an image. `None`: CRIU or another helper is at work.
    ///
    /// # Errors
    /// The image does not exist.
    pub fn lock(&self, name: &str) -> Result<Option<Entry>, Refusal> {
        let path = self.path.join(name);
        if !is_name(name) || !path.is_dir() {
            return Err(Refusal::new(format!("there is no image {name:?}. List images with: nvsharectl hibernated")));
        }
        let lock = lock(&path).map_err(words("lock the image"))?;
        Ok(lock.map(|lock| Entry { name: name.into(), path, lock }))
    }

    /// Completes an image: seals CRIU's files, and signs the manifest. **From then on, the program is the
    /// image.**
    ///
    /// # Errors
    /// The disk is full, or CRIU has written something other than files.
    pub fn complete(&self, entry: &Entry, manifest: &Manifest, process: Identity) -> Result<Image, Refusal> {
        let complete = || -> io::Result<Image> {
            let manifest = Manifest { files: entry.seal()?, ..manifest.clone() };
            let text = serde_json::to_vec(&manifest)?;
            replace(&entry.path, SIGNATURE, hex(&self.mac(&text).finalize().into_bytes()).as_bytes())?;
            replace(&entry.path, MANIFEST, &text)?;
            fsync(File::open(&self.path)?)?;
            entry.record(&Stage::Ending { process })?;
            Ok(describe(&entry.name, &manifest, None))
        };
        complete().map_err(words("complete the image"))
    }

    fn mac(&self, text: &[u8]) -> Hmac<Sha256> {
        // An HMAC accepts keys of any length.
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("any key is valid");
        mac.update(text);
        mac
    }

    /// Reads the manifest of an image, after its signature was checked.
    ///
    /// # Errors
    /// This host has not signed the manifest.
    fn manifest(&self, path: &Path) -> io::Result<Manifest> {
        let read = |name: &str| -> io::Result<Vec<u8>> {
            let mut contents = Vec::new();
            open_sealed(&path.join(name))?.take(MAX_MANIFEST).read_to_end(&mut contents)?;
            Ok(contents)
        };
        let (text, signature) = (read(MANIFEST)?, read(SIGNATURE)?);
        let signature: Option<Vec<u8>> =
            signature.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect();
        let is_signed = signature.is_some_and(|signature| self.mac(&text).verify_slice(&signature).is_ok());
        if !is_signed {
            return Err(io::Error::other("this host has not signed it"));
        }
        Ok(serde_json::from_slice(&text)?)
    }

    /// Checks an image of a user completely, so that CRIU may read it.
    ///
    /// # Errors
    /// The image belongs to another user, is not signed by this host, or was changed.
    pub fn verify(&self, entry: &Entry, uid: u32) -> Result<Manifest, Refusal> {
        let manifest = self.owned(entry, uid)?;
        entry.compare(&manifest).map_err(words(&format!("use image {}", entry.name)))?;
        Ok(manifest)
    }

    /// Reads the manifest of an image of this user.
    ///
    /// # Errors
    /// The image belongs to another user, or is not signed by this host.
    pub fn owned(&self, entry: &Entry, uid: u32) -> Result<Manifest, Refusal> {
        let manifest = self.manifest(&entry.path).map_err(words(&format!("use image {}", entry.name)))?;
        if manifest.owner.uid != uid || uid == 0 {
            return Err(Refusal::new(format!("image {} belongs to another user", entry.name)));
        }
        Ok(manifest)
    }

    /// Lists the complete images, the newest first.
    pub fn list(&self) -> Vec<Image> {
        let image = |name: &String| {
            let path = self.path.join(name);
            match (read_record(&path)?, self.manifest(&path)) {
                (Stage::Saving { .. }, _) => None,
                (stage, Ok(manifest)) => Some(describe(name, &manifest, stage.process())),
                (_, Err(e)) => Some(Image {
                    name: name.clone(),
                    uid: 0,
                    program: String::new(),
                    pids: Vec::new(),
                    saved: 0,
                    bytes: 0,
                    runs_as: None,
                    damage: Some(e.to_string()),
                }),
            }
        };
        let mut images: Vec<Image> = self.names().iter().filter_map(image).collect();
        images.sort_by(|a, b| b.saved.cmp(&a.saved).then(b.name.cmp(&a.name)));
        images.truncate(MAX_LISTED);
        images
    }

    /// Finishes what killed helpers have begun. Returns `false` if CRIU or another helper is at work.
    pub fn settle(&self) -> bool {
        let mut is_settled = true;
        for name in self.names() {
            match self.lock(&name) {
                Ok(Some(entry)) => {
                    if let Err(e) = self.settle_one(&entry) {
                        eprintln!("nvshare-hibernate: cannot settle image {name}: {e}");
                        is_settled = false;
                    }
                }
                Ok(None) => {
                    end_leftovers(&self.path.join(&name));
                    is_settled = false;
                }
                Err(_) => {} // deleted since
            }
        }
        is_settled
    }

    fn settle_one(&self, entry: &Entry) -> io::Result<()> {
        let Some(stage) = read_record(&entry.path) else {
            // The helper was killed before it stopped the program.
            return entry.delete();
        };
        match stage {
            Stage::Saving { process } => entry.give_up(&process),
            Stage::Ending { process } => entry.end(&process),
            Stage::Restoring { helper, cgroups } => {
                let manifest = self.manifest(&entry.path)?;
                entry.end_restore(&manifest, &helper, &cgroups)
            }
            Stage::Continuing { process } => entry.go_on(process),
            Stage::Saved | Stage::Restored { .. } => Ok(()),
        }
    }
}

impl Stage {
    /// The process that was restored, if it lives.
    pub fn process(&self) -> Option<i32> {
        match self {
            Self::Continuing { process } | Self::Restored { process } if process.lives() => Some(process.pid),
            _ => None,
        }
    }
}

impl Entry {
    pub fn stage(&self) -> Option<Stage> {
        read_record(&self.path)
    }

    pub fn record(&self, stage: &Stage) -> io::Result<()> {
        replace(&self.path, RECORD, &serde_json::to_vec(stage)?)
    }

    /// Opens `criu` or `work`.
    pub fn part(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(self.path.join(name), directory_flags(), Mode::empty())?)
    }

    /// Returns CRIU's first error in a log.
    pub fn error_in(&self, log: &str) -> Option<String> {
        let path = self.path.join("work").join(log);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).ok()?;
        let mut text = Vec::new();
        file.take(64 << 20).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let error = text.lines().find_map(|line| line.split_once("Error (")?.1.split_once("): "))?.1;
        Some(error.chars().filter(|c| !c.is_control()).take(200).collect())
    }

    /// Records that this process is CRIU's.
    pub fn begin(&self, process: Identity, uid: u32) -> io::Result<()> {
        replace(&self.path, CRIU, &serde_json::to_vec(&Worker { process, uid })?)
    }

    /// Ends the children of a CRIU that was killed.
    pub fn end_leftovers(&self) {
        end_leftovers(&self.path);
    }

    pub fn delete(&self) -> io::Result<()> {
        fs::remove_dir_all(&self.path)
    }

    /// Lets the process of an image that is not complete continue, and deletes the image.
    pub fn give_up(&self, process: &Identity) -> io::Result<()> {
        let tree = process.lives().then(|| Tree::of(process.pid)).flatten();
        tree.as_ref().inspect(|tree| tree.resume());
        self.delete()
    }

    /// Ends the process of a complete image.
    pub fn end(&self, process: &Identity) -> io::Result<()> {
        let tree = process.lives().then(|| Tree::of(process.pid)).flatten();
        tree.as_ref().inspect(|tree| tree.kill());
        self.record(&Stage::Saved)
    }

    /// Ends the processes that CRIU has created in a restore that was not finished. Their PIDs were free
    /// before the restore.
    pub fn end_restore(&self, manifest: &Manifest, helper: &Identity, cgroups: &str) -> io::Result<()> {
        let root = Identity::of(manifest.root);
        let is_new = |root: &Identity| {
            root.boot == helper.boot
                && root.started >= helper.started
                && process::cgroups(root.pid).as_deref() == Some(cgroups)
                && process::owner(root.pid) == Some(manifest.owner.uid)
        };
        root.filter(is_new).and_then(|root| Tree::of(root.pid)).as_ref().inspect(|tree| tree.kill());
        self.record(&Stage::Saved)
    }

    /// Lets a restored program continue, in a scope of its own.
    pub fn go_on(&self, process: Identity) -> io::Result<()> {
        if let Some(tree) = process.lives().then(|| Tree::of(process.pid)).flatten() {
            scope::put_into(&tree, &self.name);
            tree.resume();
        }
        self.record(&Stage::Restored { process })
    }

    /// Takes CRIU's files from the owner, writes them to the disk, and returns their checksums.
    fn seal(&self) -> io::Result<Vec<SavedFile>> {
        let directory = self.path.join("criu");
        let opened = File::open(&directory)?;
        // First the directory, so that the owner can add and replace no file any more.
        rustix::fs::fchown(&opened, Some(rustix::process::geteuid()), Some(rustix::process::getegid()))?;
        rustix::fs::fchmod(&opened, Mode::from_raw_mode(0o555))?;
        let mut files = Vec::new();
        for entry in fs::read_dir(&directory)? {
            let entry = entry?;
            let name = entry.file_name().into_string().map_err(|_| io::Error::other("a file has an invalid name"))?;
            let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
            let file = OpenOptions::new().read(true).custom_flags(flags).open(entry.path())?;
            if !file.metadata()?.is_file() {
                return Err(io::Error::other(format!("{name} is not a file")));
            }
            rustix::fs::fchown(&file, Some(rustix::process::geteuid()), Some(rustix::process::getegid()))?;
            file.set_permissions(Permissions::from_mode(0o444))?;
            file.sync_all()?;
            let (bytes, sha256) = checksum(open_sealed(&entry.path())?)?;
            files.push(SavedFile { name, bytes, sha256 });
        }
        opened.sync_all()?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(files)
    }

    /// Compares CRIU's files with the manifest.
    fn compare(&self, manifest: &Manifest) -> io::Result<()> {
        let directory = self.path.join("criu");
        let metadata = fs::symlink_metadata(&directory)?;
        let own = rustix::process::geteuid().as_raw();
        if !metadata.is_dir() || metadata.uid() != own || metadata.mode() & 0o022 != 0 {
            return Err(io::Error::other("others can change its files"));
        }
        let mut names: Vec<String> = Vec::new();
        for entry in fs::read_dir(&directory)? {
            names.push(entry?.file_name().into_string().map_err(|_| io::Error::other("a file has an invalid name"))?);
        }
        names.sort();
        if !names.iter().eq(manifest.files.iter().map(|file| &file.name)) {
            return Err(io::Error::other("files are missing, or were added"));
        }
        for SavedFile { name, bytes, sha256 } in &manifest.files {
            let (found, sum) = checksum(open_sealed(&directory.join(name))?)?;
            if found != *bytes || sum != *sha256 {
                return Err(io::Error::other(format!("{name} is damaged")));
            }
        }
        Ok(())
    }
}

impl Manifest {
    /// A manifest without files.
    pub fn new(program: &str, owner: Credentials, tree: &Tree) -> Self {
        let (root, threads) = (tree.root(), tree.threads());
        Self { program: program.into(), owner, root, threads, saved: now(), files: Vec::new() }
    }
}

fn describe(name: &str, manifest: &Manifest, runs_as: Option<i32>) -> Image {
    Image {
        name: name.into(),
        uid: manifest.owner.uid,
        program: manifest.program.clone(),
        pids: manifest.threads.iter().copied().take(64).collect(),
        saved: manifest.saved,
        bytes: manifest.bytes(),
        runs_as,
        damage: None,
    }
}

/// Ends the processes that a killed CRIU has left: some wait forever, and hold the lock of the image. They
/// run as the owner of the program, and have inherited the lock. Processes of a CRIU that succeeded have
/// closed it.
fn end_leftovers(path: &Path) {
    let read = || -> io::Result<Worker> {
        let mut text = Vec::new();
        open_sealed(&path.join(CRIU))?.take(MAX_MANIFEST).read_to_end(&mut text)?;
        Ok(serde_json::from_slice(&text)?)
    };
    if let Some(Worker { uid, .. }) = read().ok().filter(|worker| !worker.process.lives() && worker.uid != 0) {
        process::kill_all(|pid| process::owner(pid) == Some(uid) && process::has_open(pid, path));
    }
}

fn read_record(path: &Path) -> Option<Stage> {
    let mut text = Vec::new();
    open_sealed(&path.join(RECORD)).ok()?.take(MAX_MANIFEST).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

fn checksum(mut file: File) -> io::Result<(u64, String)> {
    let mut hash = Sha256::new();
    let bytes = io::copy(&mut file, &mut hash)?;
    Ok((bytes, hex(&hash.finalize())))
}

fn directory_flags() -> OFlags {
    OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC
}

fn lock(path: &Path) -> io::Result<Option<OwnedFd>> {
    let directory = rustix::fs::open(path, directory_flags(), Mode::empty())?;
    match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(directory)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// Whether this is the name of an image. Such a name is a single part of a path.
fn is_name(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    !name.is_empty() && name.len() <= MAX_NAME && name != KEY && name.contains('-') && name.chars().all(is_allowed)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests;
