//! Programs in the control groups of pods. The programs are clients of the scheduler that do
//! nothing. The tests with these programs require root and control groups of version 2, which are
//! mounted in a separate mount namespace.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use kubernetes_test_support::program::Program;

/// Mounts control groups at `$1`, enters the control group `$2`, and executes the remaining
/// arguments.
const ENTER: &str =
    r#"mount -t cgroup2 none "$1" && mkdir -p "$1/$2" && echo $$ > "$1/$2/cgroup.procs" && shift 2 && exec "$@""#;
/// Removes the control groups again, innermost first.
const LEAVE: &str = r#"mount -t cgroup2 none "$1" && cd "$1" && rmdir -p "$2""#;

/// A client in a container of a pod. Dropping this value ends the client.
#[derive(Debug)]
pub struct Inmate {
    child: Child,
    mount: PathBuf,
    group: String,
}

impl Inmate {
    /// Starts a client. Returns `None` and prints a line if this machine does not permit the mount
    /// and the control group.
    pub fn start(directory: &Path, socket: &Path, uid: &str, container: &str) -> Option<Self> {
        let mount = directory.join("cgroup");
        std::fs::create_dir_all(&mount).expect("a directory");
        let group = format!("kubepods/besteffort/pod{uid}/{container}");
        let possible = within(ENTER, &mount, &format!("nvshare-test-{}", std::process::id())).arg("true").status();
        let _ = within(LEAVE, &mount, &format!("nvshare-test-{}", std::process::id())).status();
        if !possible.is_ok_and(|status| status.success()) {
            test_support::skip("root and control groups of version 2, for a process in a pod's control group");
            return None;
        }
        let mut command = within(ENTER, &mount, &group);
        command.arg(std::env::current_exe().expect("this program"));
        command.args(["agent::helper_stays_connected", "--exact", "--ignored", "--test-threads=1"]);
        let child = command.env("NVSHARE_TEST_SOCKET", socket).stdin(Stdio::piped()).spawn().expect("unshare is there");
        Some(Self { child, mount, group })
    }
}

fn within(script: &str, mount: &Path, group: &str) -> Command {
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script, "sh"]).arg(mount).arg(group);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

impl Drop for Inmate {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = within(LEAVE, &self.mount, &self.group).status();
    }
}

/// The code of the client process: connects to the scheduler, and stays connected until the process
/// is killed.
pub fn stay_connected() {
    let path = PathBuf::from(std::env::var_os("NVSHARE_TEST_SOCKET").expect("run by a test, not by hand"));
    Program::connect(&path).expect("a scheduler").stay();
}
