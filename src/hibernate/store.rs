//! The images. Each image is a directory of the store, which only root can enter:
//!
//! - `criu/`: CRIU's files. `work/`: its logs.
//! - `manifest`: what the image contains, with the checksum of each file of `criu/`. `signature`: the
//!   manifest's HMAC-SHA-256 with the host's key, which is checked before the manifest is parsed.
//! - `record`: the [`Stage`] of the image, which is replaced atomically. **Exactly one of the image and
//!   its process is the program**: the stage says which, and another helper ends the other one.
//!
//! A helper holds a lock on the directory while it works. If a helper was killed, the stage names the
//! scope in which its CRIU may still work.
//!
//! While CRIU writes, `criu/` belongs to the program's owner. Afterwards, it belongs to root, and no
//! process may have its files open for writing. So CRIU reads what was checked.

use crate::{
    Refusal,
    claims::{self, MAX_CORE},
    needs::Needs,
    process::{Identity, Tree},
    record::{self, Stage, VERSION, open_sealed, read_sealed, replace},
    rights::Rights,
    scope::{Scope, random},
    worker::TIMEOUT,
};
use hmac::{Hmac, Mac};
use nvshare_hibernate::{Image, MAX_LISTED, Place, Reply};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, fsync};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::{
    collections::BTreeSet,
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Read},
    os::{
        fd::OwnedFd,
        unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, chown},
    },
    path::{Path, PathBuf},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use sum::IsCancelled;

const MANIFEST: &str = "manifest";
const SIGNATURE: &str = "signature";
const KEY: &str = "key";
/// The directory with the keys of other hosts whose images are accepted.
const TRUSTED: &str = "trusted";
/// Minimum length of a key in bytes.
const MIN_KEY: usize = 32;
/// Maximum length of a manifest in bytes. CRIU writes a few files for each process.
const MAX_MANIFEST: u64 = 4 << 20;
/// Longest name of an image.
const MAX_NAME: usize = 64;
/// Maximum length of the reason why an image cannot be used, in characters.
const MAX_DAMAGE: usize = 200;
/// The start of the names of directories that are no images any more.
const DELETED: &str = ".deleted-";
/// The start of the names of parts of copies from other hosts.
const INCOMING: &str = ".incoming-";
/// A part of a copy that has not changed for this time is deleted.
const MAX_PAUSE: Duration = Duration::from_secs(24 * 60 * 60);
/// The time for which all processes of unfinished operations together are waited for. Some may never end, and
/// every helper settles before it works.
const SETTLE_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest {
    version: u32,
    pub program: String,
    pub rights: Rights,
    pub root: i32,
    pub needs: Needs,
    /// The IDs of all threads.
    pub threads: Vec<i32>,
    pub saved: u64,
    /// The program's network connections are closed by the restore.
    #[serde(default)]
    pub closes_connections: bool,
    files: Vec<SavedFile>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct SavedFile {
    name: String,
    bytes: u64,
    /// See [`sum::of`].
    sum: String,
}

impl Manifest {
    fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    key: Vec<u8>,
    /// The keys of the hosts that this host trusts.
    trusted: Vec<Vec<u8>>,
}

/// An image that this process has locked.
#[derive(Debug)]
pub struct Entry {
    pub name: String,
    path: PathBuf,
    _lock: OwnedFd,
}

fn words(what: &str) -> impl Fn(io::Error) -> Refusal {
    let what = what.to_owned();
    move |e| Refusal::new(format!("cannot {what}: {e}"))
}

/// Returns the bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
        let trusted =
            Self::trusted(&path.join(TRUSTED)).map_err(words(&format!("read the keys in {shown}/{TRUSTED}")))?;
        Ok(Self { path, key, trusted })
    }

    /// Reads the keys of other hosts. A key that others can change is not accepted.
    fn trusted(path: &Path) -> io::Result<Vec<Vec<u8>>> {
        let entries = match fs::read_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut keys = Vec::new();
        for entry in entries {
            let path = entry?.path();
            match read_key(&path) {
                Ok(key) => keys.push(key),
                Err(e) => eprintln!("nvshare-hibernate: cannot use the key {}: {e}", path.display()),
            }
        }
        Ok(keys)
    }

    fn key(path: &Path) -> io::Result<Vec<u8>> {
        match read_key(&path.join(KEY)) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            key => return key,
        }
        let mut key = vec![0; MIN_KEY];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        replace(path, KEY, &key)?;
        Ok(key)
    }

    /// The names of all images.
    fn names(&self) -> io::Result<Vec<String>> {
        let names: io::Result<Vec<_>> = fs::read_dir(&self.path)?.map(|entry| Ok(entry?.file_name())).collect();
        Ok(names?.into_iter().filter_map(|name| name.into_string().ok()).filter(|name| is_name(name)).collect())
    }

    /// Creates an image of a program that is about to be stopped. CRIU can write to `criu/` and `work/`, in
    /// the scope. `expected`: the estimated size.
    ///
    /// # Errors
    /// The disk is full.
    pub fn create(
        &self,
        program: &str,
        process: &Identity,
        rights: &Rights,
        expected: u64,
    ) -> Result<(Entry, Scope), Refusal> {
        let failed = words("create the image");
        let program: String = program.chars().take(16).collect();
        // The name is an argument of commands, so it must not look like an option.
        let program = match program.trim_start_matches('-') {
            "" => "program",
            program => program,
        };
        let name = format!("{program}-{}-{}-{}", process.pid, now(), random().map_err(&failed)?);
        let path = self.path.join(&name);
        // From here on, the directory is this helper's.
        fs::DirBuilder::new().mode(0o755).create(&path).map_err(&failed)?;
        let owner = &rights.owner;
        let create = || -> io::Result<(Entry, Scope)> {
            let scope = Scope::new(&name, owner.uid)?;
            let lock = lock(&path)?.ok_or(io::ErrorKind::ResourceBusy)?;
            let entry = Entry { name: name.clone(), path: path.clone(), _lock: lock };
            entry.record(owner.uid, &Stage::Saving { process: process.clone(), scope: scope.clone(), expected })?;
            for part in ["criu", "work"] {
                fs::DirBuilder::new().mode(0o700).create(path.join(part))?;
                chown(path.join(part), Some(owner.uid), Some(owner.gid))?;
            }
            Ok((entry, scope))
        };
        create().inspect_err(|_| drop(fs::remove_dir_all(&path))).map_err(failed)
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
        Ok(lock.map(|lock| Entry { name: name.into(), path, _lock: lock }))
    }

    /// Completes an image: seals CRIU's files, signs the manifest, and checks that a restore will accept what
    /// the files claim. They are on the disk then. They are not read back: the kernel reports what it could
    /// not write, and reading would take as long as writing.
    ///
    /// # Errors
    /// The disk is full or broken, the image is larger than its user's share, or CRIU has written something
    /// other than files.
    pub fn complete(
        &self,
        entry: &Entry,
        manifest: &Manifest,
        is_cancelled: IsCancelled<'_>,
    ) -> Result<Image, Refusal> {
        // CRIU has ended, so the files do not grow any more.
        let others = self.room_of_others(entry, manifest.rights.owner.uid)?;
        self.check_written(entry, others)?;
        let complete = || -> io::Result<Manifest> {
            let manifest = Manifest { files: entry.seal(is_cancelled)?, ..manifest.clone() };
            let text = serde_json::to_vec(&manifest)?;
            replace(&entry.path, SIGNATURE, hex(&mac(&self.key, &text).finalize().into_bytes()).as_bytes())?;
            replace(&entry.path, MANIFEST, &text)?;
            fsync(File::open(&self.path)?)?;
            self.manifest(&entry.path)
        };
        let manifest = complete().map_err(words("complete the image"))?;
        entry.check_claims(&manifest).map_err(words(&format!("use image {}", entry.name)))?;
        Ok(describe(&entry.name, &manifest, None))
    }

    /// True if this host, or a host that it trusts, has signed a text.
    fn is_signed(&self, text: &[u8], signature: &[u8]) -> bool {
        let mut keys = std::iter::once(&self.key).chain(&self.trusted);
        keys.any(|key| mac(key, text).verify_slice(signature).is_ok())
    }

    /// Reads the manifest of an image, after its signature was checked.
    ///
    /// # Errors
    /// Neither this host nor one that it trusts has signed the manifest.
    fn manifest(&self, path: &Path) -> io::Result<Manifest> {
        let read = |name: &str| read_sealed(&path.join(name), MAX_MANIFEST);
        let (text, signature) = (read(MANIFEST)?, read(SIGNATURE)?);
        let signature: Option<Vec<u8>> =
            signature.chunks(2).map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect();
        if !signature.is_some_and(|signature| self.is_signed(&text, &signature)) {
            return Err(io::Error::other("this host has not signed it, and trusts no host that has"));
        }
        let manifest: Manifest = serde_json::from_slice(&text)?;
        match manifest.version == VERSION {
            true => Ok(manifest),
            false => Err(io::Error::other("another version of nvshare has saved it")),
        }
    }

    /// Checks an image of a user completely, so that CRIU may read it.
    ///
    /// # Errors
    /// The image belongs to another user, has no valid signature, was changed, or claims rights that are not
    /// recorded.
    pub fn verify(&self, entry: &Entry, uid: u32) -> Result<Manifest, Refusal> {
        let manifest = self.owned(entry, uid)?;
        let checked = entry.compare(&manifest).and_then(|()| entry.check_claims(&manifest));
        checked.map_err(words(&format!("use image {}", entry.name)))?;
        Ok(manifest)
    }

    /// Reads the manifest of an image of this user.
    ///
    /// # Errors
    /// The image belongs to another user, or has no valid signature.
    pub fn owned(&self, entry: &Entry, uid: u32) -> Result<Manifest, Refusal> {
        let manifest = self.manifest(&entry.path).map_err(words(&format!("use image {}", entry.name)))?;
        if manifest.rights.owner.uid != uid || uid == 0 {
            return Err(Refusal::new(format!("image {} belongs to another user", entry.name)));
        }
        Ok(manifest)
    }

    /// Deletes an image of a user. [`Reply::Busy`]: the image is not the program, or an operation has to be finished.
    ///
    /// # Errors
    /// The image belongs to another user, or another version of nvshare has written its record.
    pub fn delete(&self, entry: &Entry, uid: u32) -> Result<Reply, Refusal> {
        if self.find(&entry.name).is_none_or(|image| image.uid != uid) {
            return Err(Refusal::new("it belongs to another user"));
        }
        let refused = |e: io::Error| Refusal::new(e.to_string());
        match entry.stage() {
            Ok(Stage::Saved | Stage::Restored { .. } | Stage::Sent { .. }) => {}
            // The process of another stage is the program, or has to be ended.
            Ok(_) => return Ok(Reply::Busy),
            // The system may be able to read the record later.
            Err(e) if e.raw_os_error().is_some() => return Ok(Reply::Busy),
            // The stage may be one that this version does not know.
            Err(e) if e.kind() == io::ErrorKind::Unsupported => return Err(refused(e)),
            Err(_) => {}
        }
        entry.delete().map(|()| Reply::Done).map_err(refused)
    }

    /// Returns a page of the images of a user, or of all users, the newest first, after the first
    /// `skip` images.
    ///
    /// # Errors
    /// The directory of the images cannot be read.
    pub fn list(&self, uid: Option<u32>, skip: usize) -> Result<Vec<Image>, Refusal> {
        let mut images = self.images(uid)?;
        images.sort_by(|a, b| b.saved.cmp(&a.saved).then(b.name.cmp(&a.name)));
        Ok(images.into_iter().skip(skip).take(MAX_LISTED).collect())
    }

    fn images(&self, uid: Option<u32>) -> Result<Vec<Image>, Refusal> {
        let names = self.names().map_err(words("list the images"))?;
        let images = names.into_iter().filter_map(|name| self.find(&name));
        Ok(images.filter(|image| uid.is_none_or(|uid| image.uid == uid)).collect())
    }

    /// Describes an image. `None`: it does not exist.
    ///
    /// A damaged image belongs to the user of its record, or to root.
    pub fn find(&self, name: &str) -> Option<Image> {
        let path = self.path.join(name);
        if !is_name(name) || !path.is_dir() {
            return None;
        }
        let damaged = |uid, damage: &io::Error| {
            let damage = damage.to_string().chars().take(MAX_DAMAGE).collect();
            Some(Image { name: name.into(), uid, damage: Some(damage), ..Image::default() })
        };
        match (record::read(&path), self.manifest(&path)) {
            (Ok(None), _) => None,
            (Ok(Some((uid, Stage::Saving { process, expected, .. }))), _) => Some(Image {
                name: name.into(),
                uid,
                program: name.rsplitn(4, '-').last().unwrap_or_default().into(),
                saved: created(name),
                bytes: written(&path),
                place: Place::Saving { process: process.pid, expected },
                damage: None,
            }),
            (Ok(Some((_, stage))), Ok(manifest)) => Some(describe(name, &manifest, Some(&stage))),
            (Ok(Some((uid, _))), Err(e)) => damaged(uid, &e),
            (Err(e), Ok(manifest)) => damaged(manifest.rights.owner.uid, &e),
            (Err(e), Err(_)) => damaged(0, &e),
        }
    }

    /// Finishes what killed helpers have begun. Returns `false` if CRIU or another helper is at work, or
    /// something could not be finished.
    pub fn settle(&self) -> bool {
        let Ok(names) = self.names() else { return false };
        let mut is_settled = self.delete_rest(MAX_PAUSE).is_ok();
        let until = Instant::now() + SETTLE_PATIENCE;
        for name in names {
            // Deleted since, if there is an error.
            let Ok(lock) = self.lock(&name) else { continue };
            let done = lock.map_or(Ok(false), |entry| self.settle_one(&entry, until));
            is_settled &= done.unwrap_or_else(|e| {
                eprintln!("nvshare-hibernate: cannot settle image {name}: {e}");
                false
            });
        }
        is_settled
    }

    /// Deletes the rest of deleted images, and parts of copies that have not changed for `pause`. Other helpers may be
    /// deleting them, too.
    fn delete_rest(&self, pause: Duration) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let entry = entry?;
            let (name, mut path) = (entry.file_name(), entry.path());
            let name = name.to_string_lossy();
            if let Some(image) = name.strip_prefix(INCOMING) {
                if changed(&path).is_none_or(|changed| now().saturating_sub(changed) < pause.as_secs()) {
                    continue;
                }
                // The sender renames a complete copy. Only one of the two succeeds.
                let deleted = self.path.join(format!("{DELETED}{image}"));
                unless_missing(fs::rename(&path, &deleted))?;
                path = deleted;
            } else if !name.starts_with(DELETED) {
                continue;
            }
            unless_missing(fs::remove_dir_all(path))?;
        }
        Ok(())
    }

    /// Finishes one operation. `until`: waits no longer for processes that do not end.
    fn settle_one(&self, entry: &Entry, until: Instant) -> io::Result<bool> {
        let Some((uid, stage)) = record::read(&entry.path)? else {
            // The helper was killed before it stopped the program. An image that lost its record is kept.
            if !entry.path.join(MANIFEST).try_exists()? {
                entry.delete()?;
            }
            return Ok(true);
        };
        match stage {
            // CRIU may end without the helper. Ending CRIU while it is in the program may damage the program.
            Stage::Saving { scope, .. } if scope.is_populated()? && entry.age()? < TIMEOUT => return Ok(false),
            Stage::Saving { process, scope, .. } => {
                scope.kill(until)?;
                entry.give_up(&process)?;
            }
            Stage::Ending { process } => entry.end(uid, &process, until)?,
            Stage::Restoring { scope } => entry.end_restore(uid, &scope, until)?,
            Stage::Continuing { process, scope } => entry.go_on(uid, process, &scope)?,
            Stage::Saved | Stage::Restored { .. } | Stage::Sent { .. } => {}
        }
        Ok(true)
    }
}

impl Entry {
    /// Reads the stage of the image.
    ///
    /// # Errors
    /// The record is missing or cannot be read.
    pub fn stage(&self) -> io::Result<Stage> {
        Ok(record::read(&self.path)?.ok_or(io::ErrorKind::NotFound)?.1)
    }

    /// Writes the stage of the image, which belongs to this user.
    ///
    /// # Errors
    /// The record may have the old or the new stage.
    pub fn record(&self, uid: u32, stage: &Stage) -> io::Result<()> {
        record::write(&self.path, uid, stage)
    }

    /// Returns how long ago the image was created.
    fn age(&self) -> io::Result<Duration> {
        Ok(Duration::from_secs(now().saturating_sub(created(&self.name))))
    }

    /// Opens `criu` or `work`.
    pub fn part(&self, name: &str) -> io::Result<OwnedFd> {
        Ok(rustix::fs::open(self.path.join(name), directory_flags(), Mode::empty())?)
    }

    /// Returns CRIU's first error in a log: later ones only follow from it. An error that contains a part in
    /// `harmless` is returned only if all errors do.
    pub fn error_in(&self, log: &str, harmless: &[&str]) -> Option<String> {
        let path = self.path.join("work").join(log);
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path).ok()?;
        let mut text = Vec::new();
        file.take(64 << 20).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text);
        let mut errors = text.lines().filter_map(|line| Some(line.split_once("Error (")?.1.split_once("): ")?.1));
        let is_reason = |error: &&str| !harmless.iter().any(|known| error.contains(known));
        let error = errors.clone().find(is_reason).or_else(|| errors.next())?;
        Some(error.chars().filter(|c| !c.is_control()).take(200).collect())
    }

    /// Deletes the image. What is left if the helper is killed is no image any more, and is deleted by the next
    /// helper.
    pub fn delete(&self) -> io::Result<()> {
        let deleted = self.path.with_file_name(format!("{DELETED}{}", self.name));
        fs::rename(&self.path, &deleted)?;
        // Otherwise, it could be an image again after a power failure.
        if let Some(store) = deleted.parent() {
            File::open(store)?.sync_all()?;
        }
        fs::remove_dir_all(deleted)
    }

    /// Lets the process of an image that is not complete continue, and deletes the image.
    pub fn give_up(&self, process: &Identity) -> io::Result<()> {
        if let Some(tree) = Tree::of(process)? {
            tree.resume(process.uid);
        }
        self.delete()
    }

    /// Ends the process of a complete image.
    pub fn end(&self, uid: u32, process: &Identity, until: Instant) -> io::Result<()> {
        if let Some(tree) = Tree::of(process)? {
            tree.kill(process.uid, until)?;
        }
        self.record(uid, &Stage::Saved)
    }

    /// Ends the processes that CRIU has created in a restore that was not finished.
    pub fn end_restore(&self, uid: u32, scope: &Scope, until: Instant) -> io::Result<()> {
        scope.kill(until)?;
        self.record(uid, &Stage::Saved)
    }

    /// Lets a restored program continue.
    pub fn go_on(&self, uid: u32, process: Identity, scope: &Scope) -> io::Result<()> {
        // Without its scope, the program has ended.
        if scope.is_populated()? {
            Tree::of_all(&scope.pids()?)?.resume(Some(uid));
            scope.thaw()?;
        }
        self.record(uid, &Stage::Restored { process })
    }

    /// Takes CRIU's files from the owner, writes them to the disk, and returns their checksums.
    fn seal(&self, is_cancelled: IsCancelled<'_>) -> io::Result<Vec<SavedFile>> {
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
            let metadata = file.metadata()?;
            // A link would give the other name's file to root.
            if !metadata.is_file() || metadata.nlink() != 1 {
                return Err(io::Error::other(format!("{name:?} is not a file of its own")));
            }
            rustix::fs::fchown(&file, Some(rustix::process::geteuid()), Some(rustix::process::getegid()))?;
            file.set_permissions(Permissions::from_mode(0o444))?;
            file.sync_all()?;
            let (bytes, sum) = sum::of(&open_sealed(&entry.path())?, is_cancelled)?;
            // The host's memory is needed for programs. This is advice, which may fail.
            let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed);
            files.push(SavedFile { name, bytes, sum });
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
        for SavedFile { name, bytes, sum } in &manifest.files {
            if sum::of(&open_sealed(&directory.join(name))?, &|| false)? != (*bytes, sum.clone()) {
                return Err(io::Error::other(format!("{name} is damaged")));
            }
        }
        Ok(())
    }

    /// Checks that each thread has a file with its rights, and that no file claims other rights.
    fn check_claims(&self, manifest: &Manifest) -> io::Result<()> {
        let mut threads = BTreeSet::new();
        for SavedFile { name, .. } in &manifest.files {
            if let Some(thread) = claims::thread_of(name).map_err(io::Error::other)? {
                let file = read_sealed(&self.path.join("criu").join(name), MAX_CORE)?;
                claims::check(&file, &manifest.rights).map_err(|why| io::Error::other(format!("{name} {why}")))?;
                threads.insert(thread);
            }
        }
        match threads == manifest.threads.iter().copied().collect() {
            true => Ok(()),
            false => Err(io::Error::other("it describes other threads than were saved")),
        }
    }
}

impl Manifest {
    /// A manifest without files.
    pub fn new(program: &str, rights: Rights, root: &Identity, tree: &Tree, needs: Needs) -> Self {
        let (program, root, threads) = (program.into(), root.pid, tree.threads());
        let (closes_connections, files) = (false, Vec::new());
        Self { version: VERSION, program, rights, root, needs, threads, saved: now(), closes_connections, files }
    }
}

fn describe(name: &str, manifest: &Manifest, stage: Option<&Stage>) -> Image {
    let place = match stage {
        None | Some(Stage::Saved) => Place::Image,
        Some(Stage::Sent { host }) => Place::Sent(host.clone()),
        Some(stage) => match (stage.process(), stage) {
            (Some(pid), _) => Place::Process(pid),
            (None, Stage::Restored { .. }) => Place::Ended,
            (None, _) => Place::Unfinished,
        },
    };
    Image {
        name: name.into(),
        uid: manifest.rights.owner.uid,
        program: manifest.program.clone(),
        saved: manifest.saved,
        bytes: manifest.bytes(),
        place,
        damage: None,
    }
}

/// When an image was created, in seconds since 1970. The name of its directory contains the time, and only the
/// helper can rename the directory.
fn created(name: &str) -> u64 {
    name.rsplit('-').nth(1).and_then(|time| time.parse().ok()).unwrap_or(0)
}

/// When a file, or a file in a directory, was last changed, in seconds since 1970. rsync sets the time of modification
/// to the time on the other host, so this is the time of the last change of the inode.
fn changed(path: &Path) -> Option<u64> {
    let own = u64::try_from(fs::symlink_metadata(path).ok()?.ctime()).ok()?;
    let files = fs::read_dir(path).into_iter().flatten().flatten();
    files.filter_map(|file| changed(&file.path())).chain([own]).max()
}

/// The bytes that CRIU has written to an image so far. The files of an image that is being deleted count 0.
fn written(image: &Path) -> u64 {
    let files = fs::read_dir(image.join("criu")).into_iter().flatten().flatten();
    files.filter_map(|file| file.metadata().ok()).map(|file| file.len()).sum()
}

fn mac(key: &[u8], text: &[u8]) -> Hmac<Sha256> {
    // An HMAC accepts keys of any length.
    let mut mac = Hmac::<Sha256>::new_from_slice(key).expect("any key is valid");
    mac.update(text);
    mac
}

fn read_key(path: &Path) -> io::Result<Vec<u8>> {
    let key = read_sealed(path, 4096)?;
    if key.len() >= MIN_KEY { Ok(key) } else { Err(io::Error::other("it is too short")) }
}

fn unless_missing(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
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
    name.len() <= MAX_NAME && !name.starts_with('-') && name.contains('-') && name.chars().all(is_allowed)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

mod room;
mod sum;
#[cfg(test)]
mod tests;
