//! Code that is shared by tests and benchmarks of several layers.

pub mod cgroup;
pub mod daemon;
mod dice;
mod directory;
pub mod disk;
pub mod in_flight;
pub mod jobs;
pub mod machine;
pub mod manager;
mod own_process;
pub mod record;
pub mod steps;

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

pub use dice::Dice;
pub use directory::Directory;
pub use own_process::has_own_process;

pub const MIB: u64 = 1 << 20;

/// The time limit of every wait. It is long enough for a loaded machine, so only a failure reaches
/// it.
pub const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(5);

/// The variable with a directory of another version's or architecture's artifacts, which replace the
/// built ones. `make check-compatibility` and `make check-arm64` set it.
const OTHER_VERSION: &str = "NVSHARE_TEST_OTHER_VERSION";

/// The variable that requires every test to run. `.ci/run` sets it, on a machine that meets all
/// requirements of tests.
const ALL: &str = "NVSHARE_TEST_ALL";

/// Reports that this machine lacks a requirement of a test, or of a part of a test. The caller then
/// returns, and the test passes.
///
/// # Panics
/// Panics if `NVSHARE_TEST_ALL` is set.
#[track_caller]
pub fn skip(needed: impl Display) {
    assert!(std::env::var_os(ALL).is_none(), "{ALL} is set, and this machine lacks {needed}");
    eprintln!("skipped: this test needs {needed}");
}

/// Returns the path of a build artifact. Cargo stores artifacts in the parent directory of this
/// test program's directory.
pub fn artifact(name: &str) -> PathBuf {
    if let Some(directory) = std::env::var_os(OTHER_VERSION) {
        let path = Path::new(&directory).join(name);
        if path.exists() {
            return path;
        }
    }
    let exe = std::env::current_exe().expect("the path of this program");
    let path = exe.parent().and_then(Path::parent).expect("target/PROFILE/deps").join(name);
    assert!(path.exists(), "{} is missing: run `make artifacts` first", path.display());
    path
}

/// Raises the soft limit on open files to the hard limit.
pub fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is valid during both calls.
    unsafe {
        assert_eq!(libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit), 0);
        limit.rlim_cur = limit.rlim_max;
        assert_eq!(libc::setrlimit(libc::RLIMIT_NOFILE, &limit), 0);
    }
}

/// Calls `look` until it returns a value.
#[track_caller]
pub fn wait_for<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    wait_within(PATIENCE * machine::Card::of_environment().slowness(), what, look)
}

#[track_caller]
pub fn wait_within<T>(patience: Duration, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(answer) = look() {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {patience:?} in vain for {what}");
        thread::sleep(LOOK);
    }
}

#[track_caller]
pub fn kill(pid: u32, signal: i32) {
    // SAFETY: `kill` has no preconditions.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0, "signal {signal} to {pid}");
}
