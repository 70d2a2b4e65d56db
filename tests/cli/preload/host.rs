//! A host for one test: the real host with a private `/etc`.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_bind, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};
use test_support::artifact;

pub const FILE: &str = "/etc/ld.so.preload";
/// The library's path, in the private part of the host.
pub const LIBRARY: &str = "/mnt/lib/libnvshare.so";
pub const NOBODY: u32 = 65534;

/// The host of the current thread. Valid only in `on_a_host`.
#[derive(Debug)]
pub struct Host(());

/// Runs a test on a private host, or skips it if mounts are not permitted.
pub fn on_a_host(test: impl FnOnce(&Host) + Send) {
    if !rustix::process::geteuid().is_root() {
        return test_support::skip("root, for an /etc/ld.so.preload of its own");
    }
    // Uses a new thread, because a mount namespace applies only to one thread and its child
    // processes.
    let run = || match set_up() {
        Ok(()) => test(&Host(())),
        Err(e) => test_support::skip(format_args!("the right to mount, for an /etc/ld.so.preload of its own: {e}")),
    };
    if let Err(panic) = std::thread::scope(|scope| scope.spawn(run).join()) {
        std::panic::resume_unwind(panic);
    }
}

fn set_up() -> std::io::Result<()> {
    // SAFETY: `unshare` without `FILES` keeps descriptors shared, so no descriptor becomes invalid.
    unsafe { unshare_unsafe(UnshareFlags::FS | UnshareFlags::NEWNS)? };
    mount_change("/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
    for place in ["/mnt", "/run"] {
        mount("tmpfs", place, "tmpfs", MountFlags::empty(), Some(c"mode=0755"))?;
    }
    for place in ["/mnt/etc", "/mnt/lib", "/mnt/bin"] {
        fs::create_dir(place)?;
        fs::set_permissions(place, Permissions::from_mode(0o755))?;
    }
    let copied = Command::new("cp").args(["-a", "/etc/.", "/mnt/etc"]).status()?;
    assert!(copied.success(), "/etc is copied");
    mount_bind("/mnt/etc", "/etc")?;
    let _ = fs::remove_file(FILE);
    let place = |from: PathBuf, to: &str, mode: u32| {
        fs::copy(&from, to).unwrap_or_else(|e| panic!("{}, which `make artifacts` builds: {e}", from.display()));
        fs::set_permissions(to, Permissions::from_mode(mode)).expect("its mode");
    };
    place(artifact("libnvshare.so"), LIBRARY, 0o644);
    place(artifact("static/nvsharectl"), "/mnt/bin/nvsharectl", 0o755);
    Ok(())
}

/// The output and the exit status of a program.
#[derive(Debug)]
pub struct Said {
    pub status: ExitStatus,
    pub stdout: String,
    pub stderr: String,
}

impl Said {
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// Asserts success without messages on standard error. Returns standard output.
    #[track_caller]
    pub fn fine(self) -> String {
        assert_eq!((self.code(), &*self.stderr), (Some(0), ""), "{self:?}");
        self.stdout
    }

    /// Asserts a failure whose message contains `sentence`.
    #[track_caller]
    pub fn refused(self, sentence: &str) {
        assert_eq!((self.code(), &*self.stdout), (Some(1), ""), "{self:?}");
        assert!(self.stderr.contains(sentence), "no {sentence:?} in {}", self.stderr);
    }
}

pub fn said(command: &mut Command) -> Said {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    Said { status: output.status, stdout: text(&output.stdout), stderr: text(&output.stderr) }
}

/// The identity of a file. It reveals a change or a replacement of the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub inode: u64,
    modified: (i64, i64),
}

impl Host {
    pub fn command(&self, verb: &str) -> Command {
        let mut command = Command::new("/mnt/bin/nvsharectl");
        command.arg("preload").arg(verb).env_remove("NVSHARE_CONTROL");
        command.env("DBUS_SYSTEM_BUS_ADDRESS", "unix:path=/mnt/no-bus");
        command
    }

    /// `nvsharectl preload` with the library at [`LIBRARY`].
    fn with_library(&self, verb: &str) -> Command {
        let mut command = self.command(verb);
        if ["enable", "verify"].contains(&verb) {
            command.args(["--library", LIBRARY]);
        }
        command
    }

    pub fn preload(&self, verb: &str) -> Said {
        said(&mut self.with_library(verb))
    }

    pub fn start(&self, verb: &str) -> Child {
        let mut command = self.with_library(verb);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("nvsharectl starts")
    }

    pub fn write(&self, text: &[u8]) {
        fs::write(FILE, text).expect("the file is written");
        fs::set_permissions(FILE, Permissions::from_mode(0o644)).expect("its mode");
    }

    /// Writes new text to the same inode.
    pub fn write_keeping(&self, text: &[u8]) {
        fs::write(FILE, text).expect("the file is written");
    }

    pub fn text(&self) -> Option<Vec<u8>> {
        fs::read(FILE).ok()
    }

    pub fn identity(&self) -> Identity {
        let metadata = fs::metadata(FILE).expect("the file is there");
        Identity { inode: metadata.ino(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }

    /// Asserts that programs of every user start without messages.
    #[track_caller]
    pub fn is_sound(&self) {
        for uid in [0, NOBODY] {
            let said = said(Command::new("/bin/true").uid(uid).gid(uid));
            assert_eq!((said.code(), &*said.stdout, &*said.stderr), (Some(0), "", ""), "as {uid}");
        }
    }

    /// Whether programs of this user load the library.
    pub fn loads(&self, uid: u32) -> bool {
        said(Command::new("/bin/cat").arg("/proc/self/maps").uid(uid).gid(uid)).fine().contains(LIBRARY)
    }

    /// Asserts that no temporary file is left.
    #[track_caller]
    pub fn is_tidy(&self) {
        let names = fs::read_dir("/etc").expect("/etc").map(|entry| entry.expect("an entry").file_name());
        let left: Vec<_> = names.filter(|name| name.to_string_lossy().contains("nvshare-")).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// Compiles `library.c`.
    pub fn compile(&self, to: &str, options: &[&str]) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cli/preload/library.c");
        let mut cc = Command::new(std::env::var_os("CC").unwrap_or("cc".into()));
        // Creates a new inode, as a package manager does: a mapped file must not be written to.
        let _ = fs::remove_file(to);
        cc.args(["-shared", "-fPIC", "-w", "-o", to]).arg(source).args(options);
        said(&mut cc).fine();
        fs::set_permissions(to, Permissions::from_mode(0o644)).expect("its mode");
    }

    /// Builds a harmless library that is not nvshare's.
    pub fn other(&self, to: &str) {
        self.compile(to, &[]);
    }

    /// Replaces the library by a changed copy.
    pub fn patch(&self, change: impl FnOnce(&mut Vec<u8>)) {
        let mut bytes = fs::read(LIBRARY).expect("the library");
        change(&mut bytes);
        fs::remove_file(LIBRARY).expect("it goes");
        fs::write(LIBRARY, bytes).expect("it is written");
        fs::set_permissions(LIBRARY, Permissions::from_mode(0o644)).expect("its mode");
    }

    pub fn open(&self) -> File {
        File::open(FILE).expect("the file opens")
    }
}
