use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

/// A directory that is removed at the end of the test, unless `NVSHARE_TEST_KEEP` is set.
#[derive(Debug)]
pub struct Directory(pub PathBuf);

impl Directory {
    #[expect(clippy::new_without_default, reason = "it creates a directory")]
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let path = loop {
            let name = format!("nvshare-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
            let path = std::env::temp_dir().join(name);
            match fs::create_dir(&path) {
                Ok(()) => break path,
                // A test with the same pid was killed and left this directory.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => panic!("{}: {e}", path.display()),
            }
        };
        // Helpers that run as other users need the sockets in this directory.
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("its mode");
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        match std::env::var_os("NVSHARE_TEST_KEEP") {
            None => drop(fs::remove_dir_all(&self.0)),
            Some(_) => eprintln!("kept: {}", self.0.display()),
        }
    }
}
